"""A step of one bucket: everything from the columns that describe the rows to the sampled ids.

The forward is separate from the sampling, because the host may have to say meanwhile which tokens are allowed.
"""

from dataclasses import replace

import torch
import triton

from pagewire.kernels.attention_layer import Batch
from pagewire.kernels.bookkeeping import bookkeeping
from pagewire.kernels.edit_logits import edit_logits
from pagewire.kernels.sampler import TILE, sample
from pagewire.kernels.step_inputs import StepInputs, step_inputs
from pagewire.services.executor.devices.cuda.attention import KVPool, TritonAttention
from pagewire.services.executor.devices.cuda.buckets import Bucket
from pagewire.services.executor.devices.cuda.columns import StepColumns
from pagewire.services.executor.devices.cuda.tables import SlotTables
from pagewire.services.executor.models.model import CausalLM


class Step:
    """A step of R rows and T tokens, padding included. Every run uses the same memory.

    Attributes:
        tokens: int32 [R], the sampled ids after a run; -1 where a row sampled none.
        hidden: [T, D], the hidden states after the forward, until the next run of any step.
        logits: float32 [R, V], the logits of the last token of each row, edited once they are sampled, until then.
    """

    hidden: torch.Tensor

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        tables: SlotTables,
        columns: StepColumns,
        logits: torch.Tensor,
        bucket: Bucket,
    ) -> None:
        """All steps share `logits` float32 [at least R, V]: together theirs would take gigabytes."""
        rows, device = bucket.rows, tables.memory.device

        def column(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.tokens, self.logits = column(rows), logits[:rows]
        self._model, self._pool, self._tables = model, pool, tables
        self._slots, self._cu_queries = columns.slots[:rows], columns.cu_queries[: rows + 1]
        self._inputs = StepInputs(
            ids=column(bucket.tokens),
            positions=column(bucket.tokens),
            places=column(bucket.tokens, torch.int64),
            num_computed_tokens=column(rows),
            ends=column(rows),
            lengths=column(rows),
        )
        # The inputs of each group of layers differ in the places of keys and values.
        others = [column(bucket.tokens, torch.int64) for _ in tables.block_tables[1:]]
        self._groups = [self._inputs, *(replace(self._inputs, places=places) for places in others)]
        batches = [Batch(self._slots, self._inputs.lengths, self._cu_queries, table) for table in tables.block_tables]
        self._attend = TritonAttention(pool, batches, self._groups, decode=bucket.decode, split=bucket.split)
        self._tiles = torch.empty(rows, 2, triton.cdiv(model.spec.vocab_size, TILE), device=device)
        self._finishes = column(rows, torch.uint8)

    def run(self) -> None:
        """Enqueues the step's kernels."""
        self.forward()
        self.sample()

    @torch.inference_mode()
    def forward(self) -> None:
        """Enqueues the kernels from the columns to the logits."""
        state, inputs = self._tables.state, self._inputs
        block_size = self._pool.caches[0][0].shape[2]
        for table, group in zip(self._tables.block_tables, self._groups, strict=True):
            own = replace(state, block_tables=table)
            step_inputs(own, self._slots, self._cu_queries, self._pool.dummy, block_size, group)
        self._attend.plan()
        self.hidden = self._model(inputs.ids, inputs.positions, self._attend)
        last = (self._cu_queries[1:] - 1).clamp_min(0)
        self._model.logits(self.hidden.index_select(0, last), self.logits)

    @torch.inference_mode()
    def sample(self) -> None:
        """Enqueues the kernels that sample from the logits of the forward."""
        state, sampling, inputs, logits = self._tables.state, self._tables.sampling, self._inputs, self.logits
        edit_logits(sampling, logits, self._slots, inputs.ends, state.tokens)
        sample(sampling, logits, self._slots, inputs.ends, self._tiles, self.tokens)
        bookkeeping(
            state,
            self._slots,
            self._cu_queries,
            inputs.num_computed_tokens,
            inputs.ends,
            self._tables.checked_stop_ids,
            self.tokens,
            self._finishes,
            sampling.seen,
        )
