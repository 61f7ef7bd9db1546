"""A step, from the columns that describe the rows to the sampled ids, in two parts.

The forward is separate from the sampling for two reasons. The host may have to say meanwhile which tokens are allowed.
And the forward has the shape of the step's tokens, while logits are made for the step's rows only.
"""

from dataclasses import fields, replace

import torch
import triton

from pagewire.kernels.attention_layer import Batch
from pagewire.kernels.triton.sampling.edit_logits import edit_logits
from pagewire.kernels.triton.sampling.sampler import TILE, sample
from pagewire.kernels.triton.step.bookkeeping import bookkeeping
from pagewire.kernels.triton.step.step_inputs import SampledPlaces, StepInputs, step_inputs
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend, StepAttention
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.slot_tables import GpuSlots
from pagewire.services.executor.devices.cuda.step_columns import StepColumns
from pagewire.services.executor.models.model import CausalLM


class StepMemory:
    """The results of a forward of any bucket, for the sampling at any number of places up to P.

    Attributes:
        num_computed_tokens, lengths: int32 [max_num_seqs], see `StepInputs`.
        sampled: [P], see `SampledPlaces`.
        last_hidden: [P, D], the hidden states of the token before each place; [0] before the first forward.
        masks: int32 [P, ceil(V / 32)], the tokens that grammars allow at each place, a bit per token.
        logits: float32 [P, V], shared by all graphs: a tensor for each would take gigabytes.
    """

    def __init__(self, max_num_seqs: int, places: int, vocab_size: int, device: torch.device) -> None:
        def column(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.num_computed_tokens, self.lengths = column(max_num_seqs), column(max_num_seqs)
        self.sampled = SampledPlaces(*(column(places) for _ in fields(SampledPlaces)))
        self.last_hidden = torch.empty(0, device=device)
        self.masks = column(places * -(-vocab_size // 32)).view(places, -1)
        self.logits = torch.empty(places, vocab_size, device=device)

    def first(self, places: int) -> SampledPlaces:
        """Returns the first of the places."""
        return SampledPlaces(*(getattr(self.sampled, field.name)[:places] for field in fields(SampledPlaces)))

    def allow(self, places: torch.Tensor, masks: torch.Tensor) -> None:
        """Enqueues the `masks` int32 [M, ceil(V / 32)] of the tokens allowed at `places` int64 [M]."""
        self.masks.index_copy_(0, places, masks)


class Forward:
    """The first part of a step of R rows and T tokens, padding included. Every run uses the same memory.

    Attributes:
        hidden: [T, D], the hidden states after a run, until the next run of any forward.
        plan: prepares the next run for a batch, see `BucketAttention.plan`.
    """

    hidden: torch.Tensor

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        tables: GpuSlots,
        columns: StepColumns,
        memory: StepMemory,
        bucket: Bucket,
        *,
        captured: bool = False,
    ) -> None:
        """`captured`: runs will repeat one that was captured."""
        rows, device = bucket.rows, tables.memory.device

        def column(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(bucket.tokens, dtype=dtype, device=device)

        self._model, self._pool, self._tables, self._memory = model, backend.pool, tables, memory
        self._slots = columns.slots[:rows]
        self._cu_queries, self._cu_places = columns.cu_queries[: rows + 1], columns.cu_places[: rows + 1]
        self._inputs = StepInputs(
            ids=column(),
            positions=column(),
            places=column(torch.int64),
            num_computed_tokens=memory.num_computed_tokens[:rows],
            lengths=memory.lengths[:rows],
            sampled=memory.first(bucket.tokens),
        )
        # The inputs of each group of layers differ in the places of keys and values.
        others = [column(torch.int64) for _ in tables.block_tables[1:]]
        self._groups = [self._inputs, *(replace(self._inputs, places=places) for places in others)]
        batches = [Batch(self._slots, self._inputs.lengths, self._cu_queries, table) for table in tables.block_tables]
        self._backend = backend.attend(batches, bucket, captured=captured)
        self._attend = StepAttention(self._pool, self._groups, self._backend)
        self.plan = self._backend.plan

    @torch.inference_mode()
    def run(self) -> None:
        """Enqueues the kernels from the columns to the last hidden states."""
        state, inputs, memory = self._tables.state, self._inputs, self._memory
        block_size = self._pool.caches[0][0].shape[2]
        for table, group in zip(self._tables.block_tables, self._groups, strict=True):
            own = replace(state, block_tables=table)
            step_inputs(own, self._slots, self._cu_queries, self._cu_places, self._pool.dummy, block_size, group)
        self._backend.begin()
        self.hidden = self._model(inputs.ids, inputs.positions, self._attend)
        if not len(memory.last_hidden):  # only the model knows how wide they are
            shape = len(memory.logits), self.hidden.shape[1]
            memory.last_hidden = torch.zeros(shape, dtype=self.hidden.dtype, device=self.hidden.device)
        tokens = inputs.sampled.tokens
        torch.index_select(self.hidden, 0, tokens, out=memory.last_hidden[: len(tokens)])


class Sampler:
    """The second part of a step of any rows, for P places of them, padding included. Every run uses the same memory.

    Attributes:
        tokens: int32 [P], the sampled ids after a run; -1 where a place sampled none.
        logits: float32 [P, V], the edited logits of each place after a run, until the next run of any.
    """

    def __init__(
        self, model: CausalLM, tables: GpuSlots, columns: StepColumns, memory: StepMemory, places: int
    ) -> None:
        device, rows = tables.memory.device, min(places, len(columns.slots))
        self._model, self._tables, self._memory = model, tables, memory
        self._slots, self._starts = columns.slots[:rows], memory.num_computed_tokens[:rows]
        self._cu_queries, self._cu_places = columns.cu_queries[: rows + 1], columns.cu_places[: rows + 1]
        self._sampled, self._masks = memory.first(places), memory.masks[:places]
        self.tokens = torch.zeros(places, dtype=torch.int32, device=device)
        self.logits = memory.logits[:places]
        self._tiles = torch.empty(places, 2, triton.cdiv(model.spec.vocab_size, TILE), device=device)
        self._finishes = torch.zeros(rows, dtype=torch.uint8, device=device)

    @torch.inference_mode()
    def run(self) -> None:
        """Enqueues the kernels that make logits of the last hidden states and sample from them."""
        state, sampling, logits, sampled = self._tables.state, self._tables.sampling, self.logits, self._sampled
        self._model.logits(self._memory.last_hidden[: len(logits)], logits)
        edit_logits(sampling, logits, sampled.slots, sampled.ends, sampled.drafts, self._masks, state.tokens)
        sample(sampling, logits, sampled.slots, sampled.ends, self._tiles, self.tokens)
        bookkeeping(
            state,
            self._slots,
            self._cu_queries,
            self._cu_places,
            self._starts,
            sampled.ends,
            self._tables.checked_stop_ids,
            self.tokens,
            self._finishes,
            sampling.seen,
        )
