"""The CPU as a device: eager PyTorch, one step at a time, with a backend for attention and sampling."""

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pagewire.services.executor.devices.candidates import top_candidates
from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.drafted_rows import DraftedRows
from pagewire.services.executor.devices.logit_filters import processed_logits
from pagewire.services.executor.devices.logprobs import (
    LogprobsMode,
    join_logprobs,
    prompt_slices,
    unpack_logprobs,
)
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
from pagewire.services.executor.models.model import AttentionFn, CausalLM
from pagewire.shared.sampling_parameters import Record


class Backend(Protocol):
    """Attention and sampling of a CPU step."""

    layers: list[tuple[Tensor, Tensor]]
    """The KV pool: keys and values of each layer, which layers of several groups share. The first dimension is blocks,
    the backend chooses the others."""

    def attention(self, batch: StepBatch, slots: CpuSlots) -> AttentionFn:
        """Returns the attention of one step."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies blocks of the pool, as `Device.copy` describes it."""
        shared = {id(pool): pool for pool in chain.from_iterable(self.layers)}
        for pool in shared.values():
            pool[list(targets)] = pool[list(sources)]

    def edit(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> None:
        """Edits the float32 logits [R, V] of the tokens at `positions` [R] of the slots `rows` [R] in place."""

    def sample(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> Int64:
        """Samples the tokens [R] at `positions` [R] of the slots `rows` [R] from float32 logits [R, V]."""

    def reduce_logprobs(self, logits: Tensor, tokens: Tensor, num_logprobs: int, *, normalized: bool = True) -> Tensor:
        """Returns the report on `tokens`, as `devices.logprobs.reduce_logprobs` does."""


def multiplies_bf16(cpuinfo: Path) -> bool:
    """Returns whether the CPU has instructions for products in bf16, by the flags in `cpuinfo`, which is Linux's
    /proc/cpuinfo. Without them, float32 is faster in PyTorch, and more exact."""
    try:
        flags = set(cpuinfo.read_text().split())
    except OSError:
        return False
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


class Done(msgspec.Struct, frozen=True):
    """A `PendingStep` of a step that has ended. A msgspec struct, which is fast to create."""

    tokens: Int64
    candidates: Candidates | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    token_counts: Int64 | None = None
    forced: Mapping[int, Sequence[int]] = {}

    def wait(self) -> Int64:
        """Returns the tokens at once."""
        return self.tokens


class CpuDevice(Device):
    """A device that computes on the caller's thread, so that a second step in flight would gain nothing."""

    depth = 1
    recovers = True

    def __init__(
        self,
        model: CausalLM,
        capacity: Capacity,
        backend: Backend,
        cores: Cores,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        adapters: AdapterSlots | None = None,
        draft_model: "CpuDevice | None" = None,
        slots: CpuSlots | None = None,
    ) -> None:
        """`adapters` are those that `backend` knows. `slots` are empty; None: the device makes its own."""
        self.adapters = adapters
        self.draft_model = draft_model
        self.capacity = capacity
        self._busy = 0.0
        self._model = model
        self._slots = slots or CpuSlots(capacity)
        self._backend = backend
        self._cores = cores
        self._mode = mode

    @property
    @override
    def busy(self) -> float:
        return self._busy + (0.0 if self.draft_model is None else self.draft_model.busy)

    @property
    @override
    def progress(self) -> float:
        return self._model.progress

    @override
    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        self._slots.add(slot, blocks, sampling, stop_ids, edits)

    @override
    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._slots.extend(slots, blocks)

    @override
    def remove(self, slot: int) -> None:
        """Does nothing: the next `add` overwrites the slot."""

    @override
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._backend.copy(sources, targets)

    @override
    def launch(self, batch: StepBatch) -> Done:
        """Computes a step, which has ended when this method returns."""
        began = time.perf_counter()
        self._cores.adjust(began)
        slots, positions, ends = batch.slots, batch.positions, batch.ends
        masks = self._slots.masks.start(slots[batch.samples])
        attend = self._backend.attention(batch, self._slots)
        # Called directly, without the hooks of nn.Module: there are none, and the check takes time.
        hidden = self._model.forward(torch.from_numpy(batch.token_ids), torch.from_numpy(positions), attend)
        prompt = self._prompt_logprobs(batch, hidden)
        if batch.num_drafts is not None:
            if masks is not None:
                masks.result()
            done = self._verify(DraftedRows(batch), hidden, prompt, structured=masks is not None)
            self._busy += time.perf_counter() - began
            return done
        rows = batch.samples.nonzero()[0]
        if len(rows) < len(batch.token_ids):
            hidden = hidden[torch.from_numpy(batch.query_lens.cumsum()[rows] - 1)]
        if masks is not None:
            masks.result()
        if len(rows) == len(slots):
            tokens, candidates, logprobs = self._pick(hidden, rows, slots, ends)
        else:
            tokens, candidates, logprobs = np.full(len(slots), -1, np.int64), None, None
            if len(rows):
                tokens[rows], candidates, logprobs = self._pick(hidden, rows, slots[rows], ends[rows])
        forced: dict[int, list[int]] = {}
        if masks is not None:
            forced = {int(rows[index]): ids for index, ids in self._slots.masks.forced(slots[rows]).items()}
        self._busy += time.perf_counter() - began
        return Done(tokens, candidates, logprobs, prompt, forced=forced)

    def _verify(self, drafted: DraftedRows, hidden: Tensor, prompt: Logprobs | None, *, structured: bool) -> Done:
        """Samples the tokens of rows with drafts, one place after the other as long as they are the drafted ones, from
        the hidden states [T, D] of the step. `structured`: some of the rows have a grammar."""
        rows, slots = drafted.rows, drafted.slots
        hidden = hidden[torch.from_numpy(drafted.places)]
        if self._slots.greedy(slots[drafted.owners], drafted.positions):
            tokens = self._model.argmax(hidden)
            if tokens is not None:
                tokens, counts = drafted.columns(drafted.accepted(tokens))
                return Done(tokens, None, None, prompt, counts)
        logits = self._model.logits(hidden)
        texts: list[list[int]] = [[] for _ in rows]
        some, place, parts, candidates = np.arange(len(rows)), 0, [], None
        while len(some):
            picked = self._sample(
                logits[torch.from_numpy(drafted.first[some] + place)],
                rows[some],
                slots[some],
                drafted.ends[some] + place,
            )
            tokens, reported, logprobs = picked
            for row, token in zip(some.tolist(), tokens.tolist(), strict=True):
                texts[row].append(token)
            candidates = candidates or reported  # of rows without drafts
            parts += [logprobs] if logprobs is not None else []
            some, place = drafted.agree(some, place, tokens), place + 1
            if structured and len(some):
                self._slots.masks.fill(slots[some])
        for row, tokens_behind in self._slots.masks.forced(slots).items() if structured else ():
            texts[row] += tokens_behind
        tokens, counts = drafted.columns(texts)
        return Done(tokens, candidates, join_logprobs(parts), prompt, counts)

    def _prompt_logprobs(self, batch: StepBatch, hidden: Tensor) -> Logprobs | None:
        parts = []
        for places, ids, rows, positions, counts in prompt_slices(
            batch, self._slots.records["num_prompt_logprobs"], self.capacity.vocab_size
        ):
            logits = self._model.logits(hidden[torch.from_numpy(places)])
            reduced = self._backend.reduce_logprobs(logits, torch.from_numpy(ids), int(counts.max()))
            parts.append(unpack_logprobs(reduced.numpy(), rows, positions, counts))
        return join_logprobs(parts)

    def _pick(
        self, hidden: Tensor, rows: Int64, slots: Int64, positions: Int64
    ) -> tuple[Int64, Candidates | None, Logprobs | None]:
        """Samples the tokens at `positions` [R] of `slots` [R], in the step's `rows` [R], from hidden states [R, D]."""
        if self._slots.greedy(slots, positions) and (tokens := self._model.argmax(hidden)) is not None:
            return tokens, None, None
        return self._sample(self._model.logits(hidden), rows, slots, positions)

    def _sample(
        self, logits: Tensor, rows: Int64, slots: Int64, positions: Int64
    ) -> tuple[Int64, Candidates | None, Logprobs | None]:
        """Does what `_pick` does, by logits [R, V], which it edits."""
        edited = self._slots.any_edits(slots, positions)
        reporting = self._slots.num_logprobs[slots].nonzero()[0]
        reported = logits
        if len(reporting) and not self._mode.processed and (edited or len(reporting) < len(rows)):
            reported = logits[torch.from_numpy(reporting)]
        if edited:
            self._backend.edit(logits, self._slots, slots, positions)
        if len(reporting) and self._mode.processed:
            reported = processed_logits(logits[torch.from_numpy(reporting)], self._slots.records[slots[reporting]])
        counts = self._slots.num_candidates[slots]
        candidates = top_candidates(logits, rows, counts) if counts.any() else None
        tokens = self._backend.sample(logits, self._slots, slots, positions)
        if edited:
            self._slots.append(slots, positions, tokens)
        if not len(reporting):
            return tokens, candidates, None
        return tokens, candidates, self._logprobs(reported, tokens, rows, slots, positions, reporting)

    def _logprobs(
        self, logits: Tensor, tokens: Int64, rows: Int64, slots: Int64, positions: Int64, reporting: Int64
    ) -> Logprobs | None:
        """Returns the report on the `tokens` [R] with the indices `reporting` [M], whose logits are [M, V]."""
        sampled = (tokens[reporting] >= 0).nonzero()[0]
        if not len(sampled):
            return None
        reported = reporting[sampled]
        counts = self._slots.num_logprobs[slots[reported]]
        if len(sampled) < len(reporting):
            logits = logits[torch.from_numpy(sampled)]
        chosen, most = torch.from_numpy(tokens[reported]), int(counts.max())
        reduced = self._backend.reduce_logprobs(logits, chosen, most, normalized=self._mode.normalized)
        return unpack_logprobs(reduced.numpy(), rows[reported], positions[reported], counts)

    @override
    def close(self) -> None:
        if self.draft_model is not None:
            self.draft_model.close()
        self._cores.close()
        del self._model, self._backend
        self._slots.masks.close()
