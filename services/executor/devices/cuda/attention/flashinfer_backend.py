"""Attention by FlashInfer, where it is installed.

FlashInfer plans a step on the host, from the lengths of its rows, and finds the keys of a row by a list of its blocks.
The host knows the lengths when it launches a step; the lists are made on the device, from the block tables.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.kernels.triton.attention.page_indices import page_indices
from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import refused
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend, BucketAttention
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.runtime import Moment, Runtime
from pagewire.services.executor.devices.protocol import NO_ROWS, Capacity, StepBatch

SCRATCH = 128 << 20
"""Bytes for partial results, as FlashInfer recommends."""
KERNELS = "fa2"
"""FlashInfer's name of its kernels that every GPU runs, and whose plan has one shape for all steps of a graph."""
Kind = tuple[int, Attention]
"""A group of layers, and the constants of a layer: what a plan depends on beside the rows."""


class Rows(NamedTuple):
    """The rows of a step as FlashInfer's host functions read them: int32, in pinned memory of the host."""

    queries: Tensor
    """[R + 1] index of each row's first token."""
    starts: Tensor
    """[R + 1] index of each row's first block."""
    last: Tensor
    """[R] positions in the last block."""
    lengths: Tensor
    """[R] positions in all of them."""


def rows_of(batch: StepBatch, bucket: Bucket, block_size: int, runtime: Runtime) -> Rows:
    """Returns the rows of a batch, and those of the padding that a bucket adds to it, which see nothing but padding."""
    tokens, rows = bucket.tokens - len(batch.token_ids), bucket.rows - len(batch.slots)
    rows = min(tokens, rows)
    padding = tokens // max(rows, 1) + (np.arange(rows) < tokens % max(rows, 1))
    lengths = np.concatenate((batch.num_computed_tokens + batch.query_lens, padding))
    blocks = -(-lengths // block_size)
    count = len(lengths)
    memory = runtime.pinned(4, count + 1)
    columns = memory.numpy()
    np.cumsum(np.concatenate((batch.query_lens, padding)), dtype=np.int32, out=columns[0, 1:])
    np.cumsum(blocks, dtype=np.int32, out=columns[1, 1:])
    columns[2, :count] = lengths - (blocks - 1) * block_size
    columns[3, :count] = lengths
    return Rows(memory[0], memory[1], memory[2, :count], memory[3, :count])


class Shared:
    """The memory and the arguments that the steps of all shapes share.

    Attributes:
        wrapper: FlashInfer's class.
        kinds: the kinds of layers, each with the arguments of its plan.
        indices: int32 per group of layers, the blocks of the current step's rows.
        scratch: memory for partial results. As steps run one after another, one piece is enough.
    """

    def __init__(self, pool: KVPool, capacity: Capacity, runtime: Runtime) -> None:
        self.pool, self.runtime, self.block_size = pool, runtime, capacity.block_size
        self.wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self.kinds: dict[Kind, dict[str, Any]] = {
            (group, layer): self._arguments(layer) for group, layer in zip(pool.groups.groups, pool.layers, strict=True)
        }
        entries = capacity.max_num_seqs * -(-capacity.max_model_len // capacity.block_size)
        self.indices = [self.zeros(entries) for _ in pool.groups.windows]
        self.scratch = self.zeros(SCRATCH, torch.uint8)

    def zeros(self, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Returns memory of the device."""
        return torch.zeros(size, dtype=dtype, device=self.runtime.device)

    def _arguments(self, layer: Attention) -> dict[str, Any]:
        return {
            "num_qo_heads": layer.heads,
            "num_kv_heads": layer.kv_heads,
            "head_dim_qk": layer.head_size,
            "page_size": self.block_size,
            "causal": True,
            "sm_scale": layer.scale,
            "window_left": layer.window - 1,  # without its own position, and -1 without a window
            "logits_soft_cap": layer.soft_cap,
            "q_data_type": self.pool.dtype,
            "kv_data_type": self.pool.cached,
        }


class Wrappers:
    """FlashInfer's wrappers, one per kind of layer, which are planned together. Only their last plan can run.

    A wrapper writes its plan into a pinned buffer of its own and enqueues the copy to the device. Nothing in FlashInfer
    keeps the next plan from overwriting that buffer before it is copied, so here it waits for the copies of the last
    one. They come before the kernels of their step, behind those of the step before: when the device has one step left
    to run, all plans are copied, and the host does not wait. On the device the order of the stream is enough: a plan
    overwrites what the previous step has read.

    Attributes:
        starts: int32 [R + 1] on the device, index of each row's first block.
    """

    starts: Tensor

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._rows: Rows | None = None
        self._copied: Moment | None = None
        self._wrappers: dict[Kind, Any] = {kind: self._made(kind) for kind in shared.kinds}

    def plan(self, rows: Rows) -> None:
        """Plans a step of these rows, and enqueues the copies of the plan."""
        if self._copied is not None:
            self._copied.wait()
        self._rows = rows  # until it is copied
        self._send(rows.starts)
        for kind, wrapper in self._wrappers.items():
            wrapper.plan(*self._positional(kind, rows), **self._shared.kinds[kind], seq_lens=rows.lengths)
        self._copied = self._shared.runtime.mark()

    def run(self, kind: Kind, query: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Enqueues the attention of a layer, as it was planned. Its kernels begin when the previous one has ended."""
        self._wrappers[kind].run(query, cache, out=out, enable_pdl=False)

    def _positional(self, kind: Kind, rows: Rows) -> tuple[Tensor, ...]:
        indices = self._shared.indices[kind[0]][: int(rows.starts[-1])]
        return rows.queries, rows.starts, indices, rows.last

    def _made(self, _kind: Kind) -> Any:
        return self._shared.wrapper(self._shared.scratch, "HND", backend=KERNELS)

    def _send(self, starts: Tensor) -> None:
        self.starts = starts.to(self._shared.runtime.device, non_blocking=True)


class CapturedWrappers(Wrappers):
    """The wrappers of a bucket whose forward is captured: all its plans have the same shape and the same memory."""

    def __init__(self, shared: Shared, bucket: Bucket) -> None:
        rows = bucket.rows
        self._queries, self.starts, self._last = shared.zeros(rows + 1), shared.zeros(rows + 1), shared.zeros(rows)
        self._padding = rows_of(NO_ROWS, bucket, shared.block_size, shared.runtime)
        super().__init__(shared)

    def _made(self, kind: Kind) -> Any:
        shared = self._shared
        wrapper = shared.wrapper(
            shared.scratch,
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=self._queries,
            paged_kv_indptr_buf=self.starts,
            paged_kv_indices_buf=shared.indices[kind[0]],
            paged_kv_last_page_len_buf=self._last,
            backend=KERNELS,
        )
        # By default 8 MiB for the plan, here and on the host, for each bucket and kind of layer.
        partial, plan = wrapper.workspace_size(
            *self._positional(kind, self._padding), **shared.kinds[kind], seq_lens=self._padding.lengths
        )
        if partial > len(shared.scratch):
            shared.scratch = shared.zeros(partial, torch.uint8)
        wrapper.reset_workspace_buffer(shared.scratch, shared.zeros(plan, torch.uint8))
        return wrapper

    def _send(self, starts: Tensor) -> None:
        """Does nothing: in a graph the plan itself copies to `starts`."""


class FlashInferAttention(BucketAttention):
    """Attention by FlashInfer's wrappers of one bucket."""

    def __init__(self, shared: Shared, batches: Sequence[Batch], bucket: Bucket, wrappers: Wrappers) -> None:
        self._shared, self._batches, self._bucket, self._wrappers = shared, batches, bucket, wrappers
        self._out = shared.pool.attended(bucket.tokens)

    @override
    def plan(self, batch: StepBatch) -> None:
        self._wrappers.plan(rows_of(batch, self._bucket, self._shared.block_size, self._shared.runtime))

    @override
    def begin(self) -> None:
        """Lists the blocks of the rows. A dead row, of which the host may not know yet, has the dummy block only."""
        shared, starts = self._shared, self._wrappers.starts
        groups = zip(self._batches, shared.pool.groups.windows, shared.indices, strict=True)
        for batch, window, indices in groups:
            page_indices(batch, starts, window, shared.pool.dummy, shared.block_size, indices)

    @override
    def __call__(self, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Enqueues the attention of a layer, as it was planned.

        Raises:
            ConfigurationError: there are sinks, which FlashInfer's kernels would ignore.
        """
        if sinks is not None:
            raise refused("attention sinks")
        pool = self._shared.pool
        attention = pool.layers[layer]
        out = self._out[attention.heads, attention.value_head_size]
        self._wrappers.run((pool.groups.groups[layer], attention), query, pool.caches[layer], out)
        return out


class FlashInferBackend(AttentionBackend):
    """FlashInfer's kernels, with what their plans share."""

    captures_mixed = False
    """In a graph FlashInfer splits the contexts of all rows, also of prompts, whose partial results are large."""

    def __init__(self, pool: KVPool, capacity: Capacity, runtime: Runtime) -> None:
        self.pool = pool
        self._shared = Shared(pool, capacity, runtime)
        self._uncaptured = Wrappers(self._shared)

    @override
    def attend(self, batches: Sequence[Batch], bucket: Bucket, *, captured: bool) -> FlashInferAttention:
        wrappers = CapturedWrappers(self._shared, bucket) if captured else self._uncaptured
        return FlashInferAttention(self._shared, batches, bucket, wrappers)
