"""A device without a model: a roofline gives the time of steps, and tokens are a hash of sequence and position."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from pagewire.services.executor.devices.protocol import (
    Candidates,
    Capacity,
    Device,
    Edits,
    Int64,
    Logprobs,
    StepBatch,
    rows_and_places,
)
from pagewire.services.executor.devices.sim.roofline import Roofline
from pagewire.shared.sampling_parameters import RECORD, Record

UInt64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def choices(keys: UInt64, positions: Int64, count: int) -> Int64:
    """Returns a number in [0, count) for each position [N] of a sequence with that key [N], by splitmix64 of both."""
    bits = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        bits = (bits ^ (bits >> shift)) * multiplier
    bits ^= bits >> _SHIFTS[2]
    return (bits % np.uint64(count)).astype(np.int64)


class DeviceClock:
    """Schedules steps in real time: a step starts at its launch, or at the end of the previous step if that is later.

    Attributes:
        busy: seconds of all steps that were waited for.
        end: end of the last step, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self.end = 0.0

    def launch(self, seconds: float) -> float:
        """Schedules a step of this length and returns its end."""
        self.end = max(self.end, time.monotonic()) + seconds
        return self.end


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A `PendingStep` that ends at a known time."""

    tokens: Int64
    clock: DeviceClock
    seconds: float
    """Length of the step."""
    end: float
    """End of the step, on the monotonic clock."""
    candidates: Candidates | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    token_counts: Int64 | None = None
    forced: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def wait(self) -> Int64:
        """Sleeps until the step's end, and returns the tokens."""
        left = self.end - time.monotonic()
        if left > 0:
            time.sleep(left)  # stands for the computation
        self.clock.busy += self.seconds
        return self.tokens


class SimDevice(Device):
    """A simulated device. It never samples the model's end-of-text ids, but may sample a request's own stop ids.

    A row that is launched after the end of its sequence takes time, as on a GPU. If the capacity allows more than one
    token per row, a row that samples has any number of them, drawn like the tokens, which are the same in all cases.
    """

    depth = 2
    recovers = True

    def __init__(self, capacity: Capacity, roofline: Roofline | None, eos_ids: Iterable[int] = ()) -> None:
        """`roofline` gives the time of a step; None: steps take no time.

        Raises:
            ValueError: every token of the vocabulary is in `eos_ids`.
        """
        self.capacity = capacity
        self._clock = DeviceClock()
        self._roofline = roofline
        self._tokens: Int64 = np.setdiff1d(np.arange(capacity.vocab_size), list(eos_ids))
        if not len(self._tokens):
            raise ValueError("every token of the vocabulary ends the text")
        self._launches = 0
        self._records: Record = np.zeros(capacity.max_num_seqs, RECORD)
        self._stop_ids: list[frozenset[int]] = [frozenset()] * capacity.max_num_seqs

    @property
    @override
    def busy(self) -> float:
        return self._clock.busy

    @override
    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        """Puts a sequence into a free slot. Edits have no effect: there are no logits."""
        self._records[slot], self._stop_ids[slot] = sampling, frozenset(stop_ids)

    @override
    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Does nothing: there is no KV cache."""

    @override
    def remove(self, slot: int) -> None:
        """Does nothing: the next `add` overwrites the slot."""

    @override
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Does nothing: there is no KV cache."""

    @override
    def launch(self, batch: StepBatch) -> SimulatedStep:
        rows = np.flatnonzero(batch.samples)
        token_counts, positions = None, batch.ends[rows]
        if self.capacity.max_row_tokens > 1:
            token_counts = self._counts(batch)
            owners, places = rows_and_places(token_counts[rows])
            rows, positions = rows[owners], positions[owners] + places
        slots, records = batch.slots[rows], self._records
        picked = choices(records["key"][slots], positions, len(self._tokens))
        for row in np.flatnonzero(positions < records["min_length"][slots]).tolist():
            picked[row] = self._allowed(int(picked[row]), self._stop_ids[slots[row]])
        chosen = self._tokens[picked]
        counts = records["num_candidates"][slots]
        candidates = self._simulated(rows, counts, picked) if np.count_nonzero(counts) else None
        entries = records["num_logprobs"][slots]
        logprobs = self._logprobs(rows, positions, entries, chosen, picked) if np.count_nonzero(entries) else None
        prompt = None
        if batch.next_ids is not None:
            places = np.flatnonzero(batch.next_ids >= 0)
            owners = np.repeat(np.arange(len(batch.slots)), batch.query_lens)[places]
            entries, ids = self._records["num_prompt_logprobs"][batch.slots[owners]], batch.next_ids[places]
            prompt = self._logprobs(owners, batch.positions[places] + 1, entries, ids, ids)
        columns = batch.num_computed_tokens, batch.query_lens, batch.samples
        seconds = self._roofline.seconds(*columns) if self._roofline else 0.0
        if token_counts is None:
            tokens = np.full(len(batch.slots), -1, np.int64)
            tokens[rows] = chosen
        else:
            tokens = chosen
        end = self._clock.launch(seconds)
        return SimulatedStep(tokens, self._clock, seconds, end, candidates, logprobs, prompt, token_counts)

    def close(self) -> None:
        """Does nothing."""

    def _counts(self, batch: StepBatch) -> Int64:
        """Returns how many tokens each row samples [R]. Rows that report candidates have one, and never fewer."""
        records, self._launches = self._records[batch.slots], self._launches + 1
        keys = records["key"] + np.uint64(self._launches)  # so that a row without a token has one at some time
        drawn = choices(keys, batch.ends, self.capacity.max_row_tokens + 1)
        return np.where(records["num_candidates"] > 0, 1, drawn) * batch.samples

    def _simulated(self, rows: Int64, num_candidates: Int64, picked: Int64) -> Candidates:
        """Returns simulated candidates: the picked token and the next ones, each half as likely as the previous one."""
        selected = np.flatnonzero(num_candidates)
        counts = np.minimum(num_candidates[selected], len(self._tokens))
        ranks = np.concatenate([np.arange(count) for count in counts])
        ids = self._tokens[(np.repeat(picked[selected], counts) + ranks) % len(self._tokens)]
        return Candidates(rows[selected], counts, ids, (-np.log(2.0) * (ranks + 1)).astype(np.float32))

    def _logprobs(self, rows: Int64, positions: Int64, wanted: Int64, tokens: Int64, picked: Int64) -> Logprobs | None:
        """Returns simulated log-probabilities: the token comes first, and each next one is half as likely."""
        some = np.flatnonzero(wanted)
        if not len(some):
            return None
        counts = np.minimum(wanted[some], len(self._tokens) + 1)
        ranks = np.concatenate([np.maximum(np.arange(count) - 1, 0) for count in counts])
        ids = self._tokens[(np.repeat(picked[some], counts) + ranks) % len(self._tokens)]
        ids[ranks == 0] = np.repeat(tokens[some], counts)[ranks == 0]
        values = (-np.log(2.0) * (ranks + 1)).astype(np.float32)
        return Logprobs(rows[some], positions[some], counts, ids, values, np.ones(len(some), np.int64))

    def _allowed(self, index: int, banned: frozenset[int]) -> int:
        """Returns the first choice from `index` on that is not banned; `index` itself if all are banned."""
        count = len(self._tokens)
        candidates = ((index + i) % count for i in range(count))
        return next((i for i in candidates if int(self._tokens[i]) not in banned), index)
