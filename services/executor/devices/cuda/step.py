"""A step, from the columns that describe the rows to the sampled ids, in two parts.

The forward is separate from the sampling for two reasons. The host may have to say meanwhile which tokens are allowed.
And the forward has the shape of the step's tokens, while logits are made for the step's rows only.
"""

from dataclasses import replace

import torch
import triton

from pagewire.kernels.attention_layer import Batch
from pagewire.kernels.triton.sampling.edit_logits import edit_logits
from pagewire.kernels.triton.sampling.sampler import TILE, sample
from pagewire.kernels.triton.step.bookkeeping import bookkeeping
from pagewire.kernels.triton.step.step_inputs import StepInputs, step_inputs
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend, StepAttention
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.slot_tables import GpuSlots
from pagewire.services.executor.devices.cuda.step_columns import StepColumns
from pagewire.services.executor.models.model import CausalLM


class StepMemory:
    """The results of a forward of any bucket, for the sampling of any number of rows up to S = `max_num_seqs`.

    Attributes:
        num_computed_tokens, ends, lengths: int32 [S], see `StepInputs`.
        last_hidden: [S, D], the hidden states of each row's last token; [0] before the first forward.
        logits: float32 [S, V], shared by all graphs: a tensor for each would take gigabytes.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        def column() -> torch.Tensor:
            return torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

        self.num_computed_tokens, self.ends, self.lengths = column(), column(), column()
        self.last_hidden = torch.empty(0, device=device)
        self.logits = torch.empty(max_num_seqs, vocab_size, device=device)


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
        self._slots, self._cu_queries = columns.slots[:rows], columns.cu_queries[: rows + 1]
        self._inputs = StepInputs(
            ids=column(),
            positions=column(),
            places=column(torch.int64),
            num_computed_tokens=memory.num_computed_tokens[:rows],
            ends=memory.ends[:rows],
            lengths=memory.lengths[:rows],
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
            step_inputs(own, self._slots, self._cu_queries, self._pool.dummy, block_size, group)
        self._backend.begin()
        self.hidden = self._model(inputs.ids, inputs.positions, self._attend)
        if not len(memory.last_hidden):  # only the model knows how wide they are
            shape = len(memory.logits), self.hidden.shape[1]
            memory.last_hidden = torch.zeros(shape, dtype=self.hidden.dtype, device=self.hidden.device)
        last = (self._cu_queries[1:] - 1).clamp_min(0)
        torch.index_select(self.hidden, 0, last, out=memory.last_hidden[: len(last)])


class Sampler:
    """The second part of a step of R rows, padding included. Every run uses the same memory.

    Attributes:
        tokens: int32 [R], the sampled ids after a run; -1 where a row sampled none.
        logits: float32 [R, V], the edited logits of the last token of each row after a run, until the next run of any.
    """

    def __init__(self, model: CausalLM, tables: GpuSlots, columns: StepColumns, memory: StepMemory, rows: int) -> None:
        device = tables.memory.device
        self._model, self._tables, self._memory = model, tables, memory
        self._slots, self._cu_queries = columns.slots[:rows], columns.cu_queries[: rows + 1]
        self._starts, self._ends = memory.num_computed_tokens[:rows], memory.ends[:rows]
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.logits = memory.logits[:rows]
        self._tiles = torch.empty(rows, 2, triton.cdiv(model.spec.vocab_size, TILE), device=device)
        self._finishes = torch.zeros(rows, dtype=torch.uint8, device=device)

    @torch.inference_mode()
    def run(self) -> None:
        """Enqueues the kernels that make logits of the last hidden states and sample from them."""
        state, sampling, logits = self._tables.state, self._tables.sampling, self.logits
        self._model.logits(self._memory.last_hidden[: len(logits)], logits)
        edit_logits(sampling, logits, self._slots, self._ends, state.tokens)
        sample(sampling, logits, self._slots, self._ends, self._tiles, self.tokens)
        bookkeeping(
            state,
            self._slots,
            self._cu_queries,
            self._starts,
            self._ends,
            self._tables.checked_stop_ids,
            self.tokens,
            self._finishes,
            sampling.seen,
        )
