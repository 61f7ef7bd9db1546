"""A device without a model, and short ways to write plans."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from pagewire.services.executor.adapter_loader import AdapterLoader
from pagewire.services.executor.devices.protocol import (
    AdapterSlots,
    Candidates,
    Capacity,
    Device,
    Edits,
    Int64,
    Logprobs,
    StepBatch,
)
from pagewire.services.executor.outputs.results import PlanRefused, StepResult
from pagewire.services.executor.steps.grammar_opener import GrammarOpener
from pagewire.services.executor.steps.plan_inbox import PlanInbox
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.services.executor.steps.step_loop import StepLoop
from pagewire.shared.errors import DeviceLost
from pagewire.shared.messages import pack
from pagewire.shared.messages.plan import AddSlot, Plan
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.messages.work import Sampling
from pagewire.shared.sampling_parameters import Record, record
from tests.support import waiting

CAPACITY = Capacity(num_blocks=32, block_size=4, max_num_seqs=4, max_model_len=40, vocab_size=50)
DRAFTING = replace(CAPACITY, max_drafted_rows=24)
"""Capacity of a device whose rows may have drafts."""
PATIENCE = waiting.PATIENCE


def token_at(seed: int, position: int, vocab_size: int = CAPACITY.vocab_size) -> int:
    """The token that every fake device picks."""
    return (seed * 7919 + position * 104729 + (seed ^ position) * 31) % vocab_size


def sampling(seed: int = 1, *, max_tokens: int = 8, stop_ids: Sequence[int] = ()) -> Sampling:
    return Sampling(max_tokens, record(temperature=1.0).tobytes(), pack(stop_ids), seed=seed)


def add(
    slot: int,
    sequence: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    limit: int | None = None,
    computed: int = 0,
    prompt_tokens: int | None = None,
    picks: Sampling | None = None,
    trace: str = "",
) -> AddSlot:
    """A sequence, by default with a limit of all that its blocks hold."""
    return AddSlot(
        slot=slot,
        sequence=sequence,
        tokens=pack(tokens),
        prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
        computed=computed,
        blocks=pack(blocks),
        limit=len(blocks) * CAPACITY.block_size if limit is None else limit,
        sampling=picks or sampling(sequence),
        prompt_index=0,
        choice_index=0,
        trace=trace,
    )


def plan(
    number: int,
    *added: AddSlot,
    term: int = 1,
    removed: Sequence[int] = (),
    blocks: Sequence[tuple[int, int]] = (),
    limits: Sequence[tuple[int, int]] = (),
    order: Sequence[int] = (),
    budget: int = 16,
    lease_until: int = 1000,
) -> Plan:
    return Plan(
        term=term,
        number=number,
        removed=pack(removed),
        added=added,
        blocks=pack([value for pair in blocks for value in pair]),
        limits=pack([value for pair in limits for value in pair]),
        order=pack(order),
        budget=budget,
        lease_until=lease_until,
    )


def running(*added: AddSlot) -> SlotTable:
    """A slot table to which a first plan has added these sequences."""
    table = SlotTable(CAPACITY)
    table.apply(plan(1, *added))
    return table


class FakeDevice:
    """Picks `token_at(key, position)` and insists on the device's side of the contract.

    If the capacity allows more than one token per row, a row has any number of them.

    With `gated`, each step ends with one `allow`.
    """

    adapters: AdapterSlots | None = None
    draft_model: Device | None = None

    def __init__(self, capacity: Capacity = CAPACITY, *, depth: int = 1, gated: bool = False) -> None:
        self.capacity = capacity
        self.depth = depth
        self.busy = 0.0
        self.progress = 0.0
        self.tables: dict[int, list[int]] = {}
        self.records: dict[int, Record] = {}
        self.stop_ids: dict[int, Sequence[int]] = {}
        self.edits: dict[int, Edits | None] = {}
        self.batches: list[StepBatch] = []
        self.copies: list[tuple[int, int]] = []
        self.pending: deque[FakePending] = deque()
        self.failing = False
        self.lost = ""
        self.on_lost_calls: list[Callable[[], None]] = []
        self.recovers = False
        self.closed = False
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0) if gated else None

    def on_lost(self, wake: Callable[[], None]) -> None:
        self.on_lost_calls.append(wake)

    def lose(self) -> None:
        """Makes the device lost; pending steps raise."""
        self.lost = "rank 1 has ended"
        for wake in self.on_lost_calls:
            wake()

    def allow(self, steps: int = 1) -> None:
        assert self.gate is not None
        self.gate.release(steps)

    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        assert slot not in self.tables
        self.edits[slot] = edits
        self.tables[slot] = list(blocks)
        self.records[slot], self.stop_ids[slot] = sampling, stop_ids

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            self.tables[slot].append(block)

    def remove(self, slot: int) -> None:
        del self.tables[slot], self.records[slot], self.stop_ids[slot]

    def rewind(self, slot: int, length: int) -> None:
        assert not self.pending
        assert slot in self.tables
        assert length >= 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.copies += zip(sources, targets, strict=True)

    def launch(self, batch: StepBatch) -> "FakePending":
        assert len(self.pending) < self.depth
        assert len(batch.token_ids) == batch.query_lens.sum()
        ends = batch.ends
        for slot, end in zip(
            batch.slots.tolist(), (batch.num_computed_tokens + batch.query_lens).tolist(), strict=True
        ):
            assert end <= len(self.tables[slot]) * self.capacity.block_size
        picked = [
            token_at(int(self.records[slot]["key"]), end, self.capacity.vocab_size)
            for slot, end in zip(batch.slots.tolist(), ends.tolist(), strict=True)
        ]
        self.batches.append(batch)
        if batch.num_drafts is not None or self.capacity.max_row_tokens > 1:
            self.pending.append(self._many(batch) if batch.num_drafts is None else self._verified(batch))
            return self.pending[-1]
        self.pending.append(FakePending(self, np.where(batch.samples, picked, -1).astype(np.int64)))
        asking = [
            (row, picked[row], count)
            for row, slot in enumerate(batch.slots.tolist())
            if (count := int(self.records[slot]["num_candidates"])) and batch.samples[row]
        ]
        if asking:
            self.pending[-1].candidates = Candidates(
                rows=np.array([row for row, _, _ in asking]),
                counts=np.array([count for _, _, count in asking]),
                ids=np.array([token + rank for _, token, count in asking for rank in range(count)]),
                logprobs=np.array([-rank for _, _, count in asking for rank in range(count)], np.float32),
            )
        self.entered.release()
        return self.pending[-1]

    def _many(self, batch: StepBatch) -> "FakePending":
        keys = [int(self.records[slot]["key"]) for slot in batch.slots.tolist()]
        most = self.capacity.max_row_tokens
        counts = [
            (key + len(self.batches)) % (most + 1) if samples else 0
            for key, samples in zip(keys, batch.samples.tolist(), strict=True)
        ]
        tokens = [
            token_at(key, end + i, self.capacity.vocab_size)
            for key, end, count in zip(keys, batch.ends.tolist(), counts, strict=True)
            for i in range(count)
        ]
        return FakePending(self, np.array(tokens, np.int64), np.array(counts, np.int64))

    def _verified(self, batch: StepBatch) -> "FakePending":
        assert batch.num_drafts is not None
        tokens, counts, last = [], [], -1
        for row, (slot, end, width, drafts) in enumerate(
            zip(
                *(column.tolist() for column in (batch.slots, batch.ends, batch.query_lens, batch.num_drafts)),
                strict=True,
            )
        ):
            last += width
            drafted = batch.token_ids[last + 1 - drafts : last + 1].tolist()
            assert batch.samples[row] or not drafts
            picked: list[int] = []
            while batch.samples[row] and (not picked or picked == drafted[: len(picked)]):
                picked.append(token_at(int(self.records[slot]["key"]), end + len(picked), self.capacity.vocab_size))
                if len(picked) > drafts:
                    break
            tokens += picked
            counts.append(len(picked))
        return FakePending(self, np.array(tokens, np.int64), np.array(counts, np.int64))

    def close(self) -> None:
        assert not self.pending or self.failing or self.lost
        self.closed = True


class FakePending:
    """A step of a `FakeDevice`."""

    def __init__(self, device: FakeDevice, tokens: Int64, token_counts: Int64 | None = None) -> None:
        self._device = device
        self._tokens = tokens
        self.token_counts = token_counts
        self.forced: Mapping[int, Sequence[int]] = {}
        self.candidates: Candidates | None = None
        self.logprobs: Logprobs | None = None
        self.prompt_logprobs: Logprobs | None = None

    def wait(self) -> Int64:
        device = self._device
        assert device.pending.popleft() is self, "steps are waited for once and in order"
        if device.gate is not None:
            assert device.gate.acquire(timeout=PATIENCE)
        if device.failing:
            raise RuntimeError("the device is on fire")
        if device.lost:
            raise DeviceLost("a sum has failed")
        device.busy += 0.5
        return self._tokens


class Run:
    """A loop on a thread, with a device that steps when it is told to."""

    def __init__(
        self,
        *,
        depth: int = 1,
        gated: bool = False,
        opener: GrammarOpener | None = None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        self.device = FakeDevice(depth=depth, gated=gated)
        self.inbox = PlanInbox()
        self.results: queue.Queue[StepResult | PlanRefused] = queue.Queue()
        self.loop = StepLoop(self.device, self.inbox, self.results.put, opener, adapters=adapters)
        self._thread = ThreadPoolExecutor(1)
        self.ended = self._thread.submit(self.loop.run)
        self.inbox.begin(1)

    def result(self) -> StepResult:
        result = self.results.get(timeout=PATIENCE)
        assert isinstance(result, StepResult)
        return result

    def output(self) -> StepOutput:
        return self.result().output

    def entered(self) -> None:
        """Waits until a step is running."""
        assert self.device.entered.acquire(timeout=PATIENCE)

    def finish(self) -> None:
        """Returns once the thread has handled everything and ended."""
        self.inbox.close()
        self.ended.exception(PATIENCE)
        self._thread.shutdown()
