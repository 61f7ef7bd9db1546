"""A device without a model: steps take the time that a roofline says, and tokens follow from sequence and position."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.services.executor.devices.protocol import Candidates, Capacity, Int64, StepBatch
from pagewire.services.executor.devices.roofline import Roofline
from pagewire.shared.sampling import RECORD, Record

UInt64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def choices(keys: UInt64, positions: Int64, count: int) -> Int64:
    """Numbers in [0, count) for tokens at `positions` [N] of sequences with `keys` [N]: splitmix64 of both."""
    bits = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        bits = (bits ^ (bits >> shift)) * multiplier
    bits ^= bits >> _SHIFTS[2]
    return (bits % np.uint64(count)).astype(np.int64)


class DeviceClock:
    """Real time as a device counts it: a step starts at the later of the previous one's end and its launch.

    Attributes:
        busy: seconds in which steps ran; only those that were waited for.
        end: when the last step ends, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self.end = 0.0

    def launch(self, seconds: float) -> float:
        """Books a step of this length, and returns when it ends."""
        self.end = max(self.end, time.monotonic()) + seconds
        return self.end


@dataclass(frozen=True, slots=True)
class Booked:
    """A `Pending` whose end is known."""

    tokens: Int64
    clock: DeviceClock
    seconds: float
    """How long it takes."""
    end: float
    """On the device's clock."""
    candidates: Candidates | None = None

    def wait(self) -> Int64:
        """See `Pending.wait`."""
        left = self.end - time.monotonic()
        if left > 0:
            time.sleep(left)  # the simulated work itself: nothing is waited for
        self.clock.busy += self.seconds
        return self.tokens


class SimDevice:
    """A `Device`. The model's own end of text is never sampled; a stop id that a request brings may be.

    There is no KV cache, so a row behind the end of its sequence harms nobody: it takes its time, as on a GPU.
    """

    depth = 2
    recovers = True

    def __init__(self, capacity: Capacity, roofline: Roofline | None, eos_ids: Iterable[int] = ()) -> None:
        """`roofline` None: steps take no time at all.

        Raises:
            ValueError: the vocabulary has nothing but `eos_ids`.
        """
        self.capacity = capacity
        self._clock = DeviceClock()
        self._roofline = roofline
        self._tokens: Int64 = np.setdiff1d(np.arange(capacity.vocab_size), list(eos_ids))
        if not len(self._tokens):
            raise ValueError("every token of the vocabulary ends the text")
        self._records: Record = np.zeros(capacity.max_num_seqs, RECORD)
        self._stop_ids: list[frozenset[int]] = [frozenset()] * capacity.max_num_seqs

    @property
    def busy(self) -> float:
        """See `Device.busy`: by the device clock."""
        return self._clock.busy

    def add(self, slot: int, blocks: Sequence[int], sampling: Record, stop_ids: Sequence[int] = ()) -> None:
        """See `Device.add`."""
        self._records[slot], self._stop_ids[slot] = sampling, frozenset(stop_ids)

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Nothing to do: there is no KV cache."""

    def remove(self, slot: int) -> None:
        """Nothing to do: what the slot held is overwritten when it is taken again."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Nothing to do: there is no KV cache."""

    def launch(self, batch: StepBatch) -> Booked:
        """See `Device.launch`."""
        tokens = np.full(len(batch.slots), -1, np.int64)
        rows = np.flatnonzero(batch.samples)
        slots, positions = batch.slots[rows], batch.ends[rows]
        records = self._records[slots]
        picked = choices(records["key"], positions, len(self._tokens))
        for row in np.flatnonzero(positions < records["min_length"]).tolist():
            picked[row] = self._allowed(int(picked[row]), self._stop_ids[slots[row]])
        tokens[rows] = self._tokens[picked]
        wanted = records["num_candidates"]
        candidates = self._simulated(rows, wanted, picked) if wanted.any() else None
        columns = batch.num_computed_tokens, batch.query_lens, batch.samples
        seconds = self._roofline.seconds(*columns) if self._roofline else 0.0
        return Booked(tokens, self._clock, seconds, self._clock.launch(seconds), candidates)

    def close(self) -> None:
        """Nothing to do."""

    def _simulated(self, rows: Int64, wanted: Int64, picked: Int64) -> Candidates:
        """Simulated candidates: the token that is picked and those behind it, each half as likely as the one before."""
        asking = np.flatnonzero(wanted)
        counts = np.minimum(wanted[asking], len(self._tokens))
        ranks = np.concatenate([np.arange(count) for count in counts])
        ids = self._tokens[(np.repeat(picked[asking], counts) + ranks) % len(self._tokens)]
        return Candidates(rows[asking], counts, ids, (-np.log(2.0) * (ranks + 1)).astype(np.float32))

    def _allowed(self, index: int, banned: frozenset[int]) -> int:
        """The first choice from `index` on that is not banned; `index` itself if all are."""
        count = len(self._tokens)
        candidates = ((index + i) % count for i in range(count))
        return next((i for i in candidates if int(self._tokens[i]) not in banned), index)
