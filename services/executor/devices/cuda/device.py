"""A GPU as a device. The host enqueues steps; it waits for their results only, and late."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import structlog

from pagewire.services.executor.devices.cuda.attention import KVPool
from pagewire.services.executor.devices.cuda.buckets import Bucket, Buckets, OneShape
from pagewire.services.executor.devices.cuda.columns import StepColumns
from pagewire.services.executor.devices.cuda.outputs import OutputRing, Pending
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.cuda.staging import Int32
from pagewire.services.executor.devices.cuda.step import Step
from pagewire.services.executor.devices.cuda.tables import SlotTables
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.models.model import CausalLM
from pagewire.shared.sampling import Record

DEPTH = 2
"""Steps in flight: the host works for one while the device computes another."""
_COPIES = 2 * DEPTH + 2
"""Staging buffers: a step rarely takes more than two."""

_log = structlog.get_logger()


class CudaDevice:
    """A `Device`.

    Tables on the device are the truth about running sequences. The host adds what it alone knows: blocks, sampling
    parameters, prompts. A token that was sampled here is read from the table, never from a batch, so the step behind it
    can be launched before the host knows it.

    If that token ended the sequence, the row is dead, and writes to a block that nobody reads. A slot with more than
    `ENDING` stop ids may have to write on in its own block, at the position behind those that are reported. Both are
    harmless even if the blocks have a new owner when the host learns of the end: whatever the owner writes is launched
    later, and a block with that position is not full, so that nobody shares it.
    """

    depth = DEPTH
    recovers = False

    def __init__(
        self,
        model: CausalLM,
        capacity: Capacity,
        pool: KVPool,
        runtime: Runtime,
        max_tokens: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`model` is `with_kernels`; steps have usually up to `max_tokens` tokens, and never more if `batch_invariant`.

        What `batch_invariant` makes of a sequence is the same to the bit, whatever runs beside it.
        """
        slots = capacity.max_num_seqs
        self.capacity = capacity
        self._model = model
        self._pool = pool
        self._runtime = runtime
        self._tables = SlotTables(capacity, runtime.device)
        self._columns = StepColumns(runtime, slots, _COPIES)
        self._outputs = OutputRing(runtime, DEPTH, slots)
        self._buckets: Buckets | OneShape = Buckets(slots, max_tokens)
        if batch_invariant:
            self._buckets = OneShape(slots, max_tokens)
        self._captured: dict[Bucket, tuple[Step, Callable[[], None]]] = {}
        self._held: Int64 = np.zeros(slots, np.int64)  # leading tokens that the device does not need from the host
        self._blocks: Int64 = np.zeros(slots, np.int64)
        self._changes: list[tuple[Int64, Int32]] = []

    @property
    def busy(self) -> float:
        """See `Device.busy`: by the device's clock."""
        return self._outputs.busy

    def capture(self) -> None:
        """Captures a graph of every bucket. Until then, and for larger steps, kernels are launched one by one."""
        began, buckets = time.monotonic(), self._buckets.captured
        for done, bucket in enumerate(buckets, 1):
            step = self._step(bucket)
            self._captured[bucket] = step, self._runtime.capture(step.run)
            _log.debug("graph_captured", rows=bucket.rows, tokens=bucket.tokens, done=done, of=len(buckets))
        _log.info("graphs_captured", graphs=len(buckets), seconds=round(time.monotonic() - began, 1))

    def add(self, slot: int, blocks: Sequence[int], sampling: Record, stop_ids: Sequence[int] = ()) -> None:
        """See `Device.add`."""
        self._held[slot], self._blocks[slot] = 0, len(blocks)
        self._changes += self._tables.added(slot, blocks, sampling, stop_ids)

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Device.extend`."""
        columns = np.empty(len(slots), np.int64)
        for i, slot in enumerate(slots):
            columns[i] = self._blocks[slot]
            self._blocks[slot] += 1
        places = self._tables.places("block_tables", np.array(slots, np.int64), columns)
        self._changes.append((places, np.array(blocks, np.int32)))

    def remove(self, slot: int) -> None:
        """Nothing to do: what the slot held is overwritten when it is taken again."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Device.copy`."""
        self._pool.copy(sources, targets)

    def launch(self, batch: StepBatch) -> Pending:
        """See `Device.launch`. The batch's token ids may be anything wherever an earlier step sampled the token."""
        self._bring_tokens(batch)
        places, values = _last_writes(self._changes)
        self._changes.clear()
        began = self._runtime.mark()
        self._columns.send(batch.slots, batch.query_lens, self._tables.memory, places, values)
        bucket = self._buckets.choose(len(batch.slots), len(batch.token_ids))
        if bucket in self._captured:
            step, replay = self._captured[bucket]
            replay()
        else:
            step = self._step(bucket)
            step.run()
        return self._outputs.send(step.tokens[: len(batch.slots)], began)

    def close(self) -> None:
        """Drops the model, the graphs and the KV pool."""
        self._captured.clear()
        del self._model, self._pool

    def _step(self, bucket: Bucket) -> Step:
        return Step(self._model, self._pool, self._tables, self._columns, bucket)

    def _bring_tokens(self, batch: StepBatch) -> None:
        """Tokens that the device lacks, with where their rows stand."""
        slots, ends, positions = batch.slots, batch.ends, batch.positions
        held = self._held[slots]
        new = positions >= np.repeat(held, batch.query_lens)
        owners = np.repeat(slots, batch.query_lens)[new]
        rows = held < ends
        changed, tables = slots[rows], self._tables
        known = np.where(batch.samples, ends, ends + 1)[rows]  # one more than it computes: then it samples none
        self._changes += [
            (tables.places("tokens", owners, positions[new]), batch.token_ids[new].astype(np.int32)),
            (tables.places("known", changed), known.astype(np.int32)),
            (tables.places("computed", changed), batch.num_computed_tokens[rows].astype(np.int32)),
            (tables.places("alive", changed), np.ones(len(changed), np.int32)),
        ]
        self._held[slots] = np.maximum(held, ends + batch.samples)


def _last_writes(changes: Sequence[tuple[Int64, Int32]]) -> tuple[Int64, Int32]:
    """All changes as one, the last of those that name the same place."""
    places = np.concatenate([places for places, _ in changes])[::-1]
    values = np.concatenate([values for _, values in changes])[::-1]
    unique, first = np.unique(places, return_index=True)
    return unique, values[first]
