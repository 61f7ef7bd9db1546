"""A GPU as a device. The host enqueues steps and only waits for results, as late as possible."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import structlog
import torch
from typing_extensions import override

from pagewire.services.executor.devices.candidates import reduce_candidates
from pagewire.services.executor.devices.cuda.adapters import CudaAdapters
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend
from pagewire.services.executor.devices.cuda.attention.triton_backend import TritonBackend
from pagewire.services.executor.devices.cuda.drafted_tokens import DraftedTokens
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket, Buckets, OneShape
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.output_ring import (
    NOTHING,
    CheckTokens,
    OutputRing,
    PendingCopy,
    Report,
    Reports,
)
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.cuda.slot_tables import GpuSlots
from pagewire.services.executor.devices.cuda.staging import Int32
from pagewire.services.executor.devices.cuda.step import Forward, Sampler, StepMemory
from pagewire.services.executor.devices.cuda.step_columns import StepColumns
from pagewire.services.executor.devices.drafted_rows import DraftedRows
from pagewire.services.executor.devices.logit_filters import processed_logits
from pagewire.services.executor.devices.logprobs import LogprobsMode, prompt_slices, reduce_logprobs
from pagewire.services.executor.devices.masks import Masks, UInt32
from pagewire.services.executor.devices.protocol import NO_ROWS, Bool, Capacity, Device, Edits, Int64, StepBatch
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.services.executor.models.model import CausalLM
from pagewire.shared.sampling_parameters import RECORD, Record

DEPTH = 2
"""Maximum steps in flight: the host prepares one step while the device computes another."""
MASK_THREADS = 4
"""Masks that the host computes at a time, while the device runs a forward."""
_COPIES = 2 * DEPTH + 2
"""Number of staging buffers: a step rarely needs more than two."""

_log = structlog.get_logger()


class CudaDevice(Device):
    """A GPU that computes steps.

    The authoritative state of running sequences is in tables on the device. The host adds what the device cannot know:
    blocks, sampling parameters and prompts. Sampled tokens are read from the table and not from the batch, so the next
    step can be launched before the host knows them. Only if a row has a grammar, the host waits for the previous step
    once it has enqueued the forward, and finds out meanwhile which tokens are allowed next.

    A step with drafted tokens samples at all of their places at once, and the device keeps the tokens up to the first
    that is not the drafted one. The host knows how many only when it has the step's tokens: its slots are in no other
    step until then.

    If such a token ended the sequence, the row is dead and writes to the dummy block. If the slot has more than
    `CHECKED_STOP_IDS` stop ids, the device may miss the end and write to the sequence's own block, at the position
    after the last reported one. This is harmless even if the block is reused: the new sequence's writes are launched
    later, and a block with that position is not full, so no sequence shares it.
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
        backend: Callable[[KVPool, Capacity, Runtime], AttentionBackend] = TritonBackend,
        batch_invariant: bool = False,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        adapters: CudaAdapters | None = None,
        masks: Masks | None = None,
        check_tokens: CheckTokens | None = None,
        draft_model: "CudaDevice | None" = None,
    ) -> None:
        """`model` is the result of `with_kernels`. Most steps have up to `max_tokens` tokens. `backend` attends.
        `adapters` are attached to the model; None: there are none. `masks` are those of the grammars of slots; None:
        the device makes some. `check_tokens` checks the tokens of each step; None: nothing does. `draft_model` drafts;
        None: no model does.

        `batch_invariant`: the result for a sequence is bitwise independent of the batch, and no step has more than
        `max_tokens` tokens.
        """
        slots, places = capacity.max_num_seqs, capacity.max_num_seqs + capacity.max_step_drafts
        self.capacity = capacity
        self.adapters = self._updates = adapters
        self.draft_model = draft_model
        self._model = model
        self._pool = pool
        self._runtime = runtime
        self._tables = GpuSlots(capacity, runtime.device)
        self._columns = StepColumns(runtime, slots, _COPIES)
        self._memory = StepMemory(slots, places, capacity.vocab_size, runtime.device)
        self._outputs = OutputRing(runtime, DEPTH, places, check_tokens)
        self._backend = backend(pool, capacity, runtime)
        self._buckets: Buckets | OneShape = Buckets(slots, max_tokens, places, mixed=self._backend.captures_mixed)
        if batch_invariant:
            self._buckets = OneShape(slots, max_tokens, places)
        self._forwards: dict[Bucket, tuple[Forward, Callable[[], None]]] = {}
        self._samplers: dict[int, tuple[Sampler, Callable[[], None]]] = {}
        self._held: Int64 = np.zeros(slots, np.int64)  # number of leading tokens that are on the device
        self._entries: Int64 = np.zeros(slots, np.int64)  # of the block table
        self._changes: list[tuple[Int64, Int32]] = []
        self._counted: set[int] = set()  # slots of which changes have counts of tokens
        self._mode = mode
        self._records: Record = np.zeros(slots, RECORD)
        self._edited: Bool = np.zeros(slots, np.bool_)
        self._masks = masks or Masks(capacity, MASK_THREADS)
        self._unseen: PendingCopy | None = None
        """The last step with rows that have a grammar, whose tokens the grammars may not know yet."""

    @property
    @override
    def busy(self) -> float:
        return self._outputs.busy + (0.0 if self.draft_model is None else self.draft_model.busy)

    def capture(self) -> None:
        """Captures both parts of a step in every size. Kernels of larger steps are launched one by one."""
        began, buckets, sizes = time.monotonic(), self._buckets.captured, self._buckets.sampled
        nothing, place = np.empty(0, np.int64), self._tables.places("tokens", np.zeros(1, np.int64))
        self._columns.send(nothing, nothing, self._tables.memory, place, np.zeros(1, np.int32))  # compiles the update
        forwards = [self._new_forward(bucket, captured=True) for bucket in buckets]
        for forward in forwards:
            forward.plan(NO_ROWS)
        samplers = [self._sampler(places)[0] for places in sizes]
        graphs = self._runtime.capture([*(forward.run for forward in forwards), *(sampler.run for sampler in samplers)])
        runs, more = graphs[: len(forwards)], graphs[len(forwards) :]
        self._forwards = dict(zip(buckets, zip(forwards, runs, strict=True), strict=True))
        self._samplers = dict(zip(sizes, zip(samplers, more, strict=True), strict=True))
        for bucket in buckets:
            _log.debug("graph_captured", rows=bucket.rows, tokens=bucket.tokens)
        _log.info("graphs_captured", graphs=len(graphs), seconds=round(time.monotonic() - began, 1))

    @override
    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        self._held[slot], self._entries[slot] = 0, len(blocks) // len(self.capacity.windows)
        self._records[slot], self._edited[slot] = sampling, edits is not None
        self._masks.add(slot, None if edits is None else edits.grammar)
        if edits is not None and edits.penalized:
            if slot in self._counted:  # by a sequence that was removed before any launch
                self._changes = [self._tables.outside("seen", slot, change) for change in self._changes]
            self._counted.add(slot)
        self._changes += self._tables.added(slot, blocks, sampling, stop_ids, edits)
        if edits is not None and len(edits.bad_words):
            # A cached prefix is computed by no step, but a bad word may begin in it if it has output.
            self._changes.append(self._tables.row("tokens", slot, edits.tokens.astype(np.int32)))

    @override
    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        entries = np.empty(len(slots), np.int64)
        for i, slot in enumerate(slots):
            entries[i] = self._entries[slot]
            self._entries[slot] += 1
        self._changes.append(self._tables.entries(np.array(slots, np.int64), entries, blocks))

    @override
    def remove(self, slot: int) -> None:
        """Does nothing: the next `add` overwrites the slot."""

    @override
    def rewind(self, slot: int, length: int) -> None:
        self._held[slot] = min(self._held[slot], length)

    @override
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        numbers = self._on_device(np.array([*sources, *targets], np.int64))
        self._pool.copy(numbers[: len(sources)], numbers[len(sources) :])

    @override
    def launch(self, batch: StepBatch) -> PendingCopy:
        """Launches a step. The batch's token id is ignored where any earlier step sampled the token, but for rewound
        ones."""
        self._add_new_tokens(batch)
        places, values = _last_writes(self._changes)
        self._changes.clear()
        self._counted.clear()
        began = self._runtime.mark()
        self._columns.send(batch.slots, batch.query_lens, self._tables.memory, places, values, batch.num_drafts)
        bucket = self._buckets.choose(len(batch.slots), len(batch.token_ids))
        forward, run_forward = self._forward(bucket)
        forward.plan(batch)
        if self._updates is not None:
            self._updates.begin(batch, bucket.tokens)
        run_forward()
        rows = None if batch.num_drafts is None else DraftedRows(batch)
        masked = np.flatnonzero(batch.samples & self._masks.active[batch.slots])
        grammars: dict[int, SequenceGrammar] = {}
        forced: dict[int, list[int]] = {}
        if len(masked) and rows is not None:
            self._send_draft_masks(rows)
        elif len(masked):
            grammars, forced = self._send_masks(batch.slots, masked)
        count = len(batch.slots) + (0 if rows is None else int(rows.num_drafts.sum()))
        sampler, run_sampler = self._sampler(self._buckets.places(count))
        run_sampler()
        reports = self._reports(forward, sampler, batch)
        drafted = None if rows is None else DraftedTokens(rows, self._masks)
        pending = self._outputs.send(sampler.tokens[:count], began, reports, forced, drafted)
        if len(masked):
            pending.tell(grammars)
            self._unseen = pending
        return pending

    def _send_masks(self, slots: Int64, rows: Int64) -> tuple[dict[int, SequenceGrammar], dict[int, list[int]]]:
        """Enqueues what the grammars of the `rows` of a step with these `slots` allow next, after the tokens of the
        steps in flight.

        Returns by row the grammars that must follow the token that the row samples, and what a grammar forces behind
        it. Where it forces tokens, the row samples the first of them, as its mask allows no other.
        """
        if self._unseen is not None:
            self._unseen.tokens()
        self._masks.fill(slots[rows])
        forced = {int(rows[index]): tokens for index, tokens in self._masks.forced(slots[rows]).items()}
        self._allow(rows, self._masks.table[slots[rows]])
        grammars = {row: self._masks.of(slots[row]) for row in rows.tolist() if row not in forced}
        follow = {row: grammar for row, grammar in grammars.items() if grammar is not None}
        return follow, {row: tokens[1:] for row, tokens in forced.items() if tokens[1:]}

    def _send_draft_masks(self, rows: DraftedRows) -> None:
        """Enqueues what the grammars of the rows of a step with drafts allow at each place."""
        structured = np.flatnonzero(self._masks.active[rows.slots])
        places = rows.indices[np.isin(rows.owners, structured)]
        drafts = [rows.drafts(row) for row in structured.tolist()]
        self._allow(places, self._masks.along(rows.slots[structured], drafts))

    def _allow(self, places: Int64, masks: UInt32) -> None:
        """Enqueues the `masks` [M, ceil(vocabulary / 32)] of the tokens allowed at `places` [M]."""
        pinned = self._runtime.pinned(*masks.shape)
        pinned.numpy()[:] = masks.view(np.int32)
        self._memory.allow(self._on_device(places).long(), pinned.to(self._runtime.device, non_blocking=True))

    @override
    def close(self) -> None:
        self._forwards.clear()
        self._samplers.clear()
        self._masks.close()
        if self.draft_model is not None:
            self.draft_model.close()
        del self._model, self._pool, self._backend, self._memory
        self.adapters = self._updates = None

    @torch.inference_mode()
    def _reports(self, forward: Forward, sampler: Sampler, batch: StepBatch) -> Reports:
        """Enqueues what the step reports. These kernels are in no graph: few steps need them."""
        records = self._records[batch.slots]
        if not (records["num_logprobs"].any() or records["num_candidates"].any() or batch.next_ids is not None):
            return NOTHING
        rows = DraftedRows(batch)
        return Reports(
            self._sampled_reports(forward, sampler, rows),
            self._prompt_reports(forward, batch),
            self._candidate_reports(sampler, rows),
        )

    def _candidate_reports(self, sampler: Sampler, rows: DraftedRows) -> list[Report]:
        """Enqueues the candidates of the rows that report some, by their edited logits. They have no drafts."""
        counts: Int64 = self._records["num_candidates"][rows.slots]
        some = np.flatnonzero(counts)
        if not len(some):
            return []
        places, counts = rows.indices[rows.first[some]], counts[some]
        logits = sampler.logits.index_select(0, self._on_device(places))
        reduced = reduce_candidates(logits, int(counts.max()))
        return [Report(rows.rows[some], places, rows.ends[some], counts, reduced)]

    def _sampled_reports(self, forward: Forward, sampler: Sampler, rows: DraftedRows) -> list[Report]:
        """Enqueues what is reported of the sampled tokens, at all places of each row."""
        slots = rows.slots[rows.owners]
        some = np.flatnonzero(self._records["num_logprobs"][slots])
        if not len(some):
            return []
        slots, positions, places, mode = slots[some], rows.positions[some], rows.indices[some], self._mode
        records = self._records[slots]
        index = self._on_device(places)
        edited = bool(self._edited[slots].any() or (positions < records["min_length"]).any())
        if edited and not mode.processed:
            logits = self._model.logits(forward.hidden.index_select(0, self._on_device(rows.places[some])))
        else:
            logits = sampler.logits.index_select(0, index)
        if mode.processed:
            logits = processed_logits(logits, records)
        counts: Int64 = records["num_logprobs"]
        tokens = sampler.tokens.index_select(0, index).long()
        reduced = reduce_logprobs(logits, tokens, int(counts.max()), normalized=mode.normalized)
        return [Report(rows.rows[rows.owners[some]], places, positions, counts, reduced)]

    def _prompt_reports(self, forward: Forward, batch: StepBatch) -> list[Report]:
        """Enqueues what is reported of prompts."""
        reports = []
        for places, ids, rows, positions, counts in prompt_slices(
            batch, self._records["num_prompt_logprobs"], self.capacity.vocab_size
        ):
            logits = self._model.logits(forward.hidden.index_select(0, self._on_device(places)))
            reduced = reduce_logprobs(logits, self._on_device(ids).long(), int(counts.max()))
            reports.append(Report(rows, places, positions, counts, reduced))
        return reports

    def _on_device(self, numbers: Int64) -> torch.Tensor:
        """Returns numbers of 32 bits on the device, without waiting for it."""
        pinned = self._runtime.pinned(len(numbers))
        pinned.numpy()[:] = numbers
        return pinned.to(self._runtime.device, non_blocking=True)

    def _forward(self, bucket: Bucket) -> tuple[Forward, Callable[[], None]]:
        """Returns the first part of a step, and what runs it: its graph, or its kernels one by one."""
        if bucket in self._forwards:
            return self._forwards[bucket]
        forward = self._new_forward(bucket, captured=False)
        return forward, forward.run

    def _new_forward(self, bucket: Bucket, *, captured: bool) -> Forward:
        return Forward(self._model, self._backend, self._tables, self._columns, self._memory, bucket, captured=captured)

    def _sampler(self, places: int) -> tuple[Sampler, Callable[[], None]]:
        """Returns the second part of a step, and what runs it: its graph, or its kernels one by one."""
        if places in self._samplers:
            return self._samplers[places]
        sampler = Sampler(self._model, self._tables, self._columns, self._memory, places)
        return sampler, sampler.run

    def _add_new_tokens(self, batch: StepBatch) -> None:
        """Adds to the changes the tokens that the device lacks, and the state of their rows."""
        slots, positions = batch.slots, batch.positions
        lengths = batch.num_computed_tokens + batch.query_lens
        held = self._held[slots]
        new = positions >= np.repeat(held, batch.query_lens)
        owners = np.repeat(slots, batch.query_lens)[new]
        # Also rows that sample none and have nothing new: forced tokens follow the one that they have.
        rows = held + batch.samples <= lengths
        changed, first, tables = slots[rows], slots[held == 0], self._tables
        known = np.where(batch.samples, lengths, lengths + 1)[rows]  # one more than it computes: the row samples none
        self._changes += [
            (tables.places("tokens", owners, positions[new]), batch.token_ids[new].astype(np.int32)),
            (tables.places("known", changed), known.astype(np.int32)),
            (tables.places("computed", changed), batch.num_computed_tokens[rows].astype(np.int32)),
            # Only with its first tokens: a sequence that has ended on the device stays dead.
            (tables.places("alive", first), np.ones(len(first), np.int32)),
        ]
        self._held[slots] = np.maximum(held, batch.ends + batch.samples)


def _last_writes(changes: Sequence[tuple[Int64, Int32]]) -> tuple[Int64, Int32]:
    """Returns all changes as one; of several changes to a place only the last."""
    places = np.concatenate([places for places, _ in changes])[::-1]
    values = np.concatenate([values for _, values in changes])[::-1]
    unique, first = np.unique(places, return_index=True)
    return unique, values[first]
