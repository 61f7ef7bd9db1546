"""Drafts tokens for the rows of a step, as many as are likely to pay."""

import time
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from pagewire.services.executor.devices.protocol import Capacity, Float64, Int64
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.services.executor.speculation.acceptance import Acceptance
from pagewire.services.executor.speculation.draft_budget import LEAST_GAIN, choose
from pagewire.services.executor.speculation.draft_model import MATCH_LENGTH
from pagewire.services.executor.speculation.drafter import Draft, Drafter, DraftRow, NewSequence
from pagewire.services.executor.speculation.step_cost import MAX_POSITIONS, StepCost
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample

LEAST_SURVIVAL = 0.15
"""Chance below which a token is not drafted, however little a position seems to cost."""
HOST_SECONDS = 0.0005
"""Time in which a device that runs ahead has no work before a step with drafts, beside that of finding these. It is an
assumption."""
UNKNOWN = -1
"""Stands for a drafted token that nobody needs yet."""
PACE = 0.05
"""Share by which the time of a search follows the last one."""
LIKELY_TOKENS, MOST_SURVIVAL = 8, 0.9
"""Texts are searched only where so many drafted tokens would pay if this share of them were right; so many of each row
where the device computes meanwhile."""


class _Sequence(NamedTuple):
    """Limits of the drafts for a slot's sequence."""

    stop_ids: frozenset[int]
    grammar: SequenceGrammar | None


class Speculator:
    """Drafts for each sequence, and learns which drafts are right and what positions cost.

    Attributes:
        cost: time of steps by their positions.
        drafted: number of drafted tokens that were verified.
        accepted: number of tokens among them that were right.
        drafts: number of drafts that were verified.
        accepted_at: [most] the number `accepted`, by the place of the token in its draft.
    """

    def __init__(self, drafter: Drafter, most: int, capacity: Capacity, *, ahead: bool = False) -> None:
        """`most` tokens are drafted for a row at a time, on a device of this capacity. `ahead`: the device computes
        while drafts are searched, and waits only where a step gets some."""
        self.cost = StepCost()
        self.drafted = self.accepted = self.drafts = 0
        self.accepted_at = [0] * most
        self._drafter = drafter
        self._most = most
        self._capacity = capacity
        self._ahead = ahead
        self._takes_time = drafter.seconds(1, 1) is not None
        self._search = 0.0  # seconds of searching the text of a row
        self._acceptance = Acceptance(capacity.max_num_seqs)
        self._sequences: dict[int, _Sequence] = {}
        self._match_lengths: dict[int, int] = {}  # of the last draft of a slot

    def begin(
        self, slot: int, sequence: NewSequence, stop_ids: Collection[int], grammar: SequenceGrammar | None
    ) -> None:
        """Drafts for the sequence of a slot from now on."""
        self._sequences[slot] = _Sequence(frozenset(stop_ids), grammar)
        self._acceptance.begin(slot)
        self._drafter.begin(slot, sequence)

    def end(self, slot: int, text: Int64) -> None:
        """Drafts no more for a slot, whose sequence has the tokens `text` [N] now."""
        if self._sequences.pop(slot, None) is not None:
            self._drafter.end(slot, text)

    def draft_rows(
        self, slots: Int64, known: Int64, room: Int64, tokens: Int64, positions: int, *, in_flight: bool = False
    ) -> Sequence[Sequence[int]]:
        """Returns the tokens to verify behind each of a step's rows [R] that sample, in a step of so many `positions`.

        The texts of the `slots` [R] are the first `known` [R] tokens of their rows of `tokens` [slots, N]; up to `room`
        [R] tokens may be drafted. `in_flight`: the texts lack tokens, and the drafts only say whether some are likely
        later. A drafter that takes time is not asked then, and all that it is likely to draft is `UNKNOWN`.
        """
        drafts: list[Sequence[int]] = [()] * len(slots)
        if not len(slots) or not self.pays(len(slots), positions):
            return drafts
        began = time.thread_time()
        if self._drafter.max_length is not None:
            room = np.minimum(room, self._drafter.max_length - known)
        rows = [row for row, slot in enumerate(slots.tolist()) if room[row] > 0 and slot in self._sequences]
        texts = [DraftRow(int(slots[row]), tokens[slots[row], : known[row]], int(room[row])) for row in rows]
        if not texts:
            return drafts
        if self._takes_time and in_flight:
            unknown = [UNKNOWN] * self._depth(texts, len(slots), positions)
            return [unknown if row in rows else () for row in range(len(slots))]
        for row, drafted in zip(rows, self.draft(texts, len(slots), positions), strict=True):
            drafts[row] = drafted
        if not self._takes_time:
            self._search += PACE * ((time.thread_time() - began) / len(slots) - self._search)
        return drafts

    def draft(self, rows: Sequence[DraftRow], sampling: int, positions: int) -> list[list[int]]:
        """Returns the tokens to verify behind each row, beside `sampling` rows that sample and `positions` in all."""
        most = self._depth(rows, sampling, positions)
        if not most:
            return [[] for _ in rows]
        guesses = self._drafter.draft([row._replace(room=min(row.room, most)) for row in rows])
        drafts = [self._cut(row.slot, guess) for row, guess in zip(rows, guesses, strict=True)]
        survivals = [self._likely(row.slot, draft) for row, draft in zip(rows, drafts, strict=True)]
        counts = [0] * len(rows)
        if any(survivals):
            count = min(sum(map(len, survivals)), self._room(positions))
            counts = choose(survivals, sampling, self._seconds(sampling, positions, count))
        for row, draft, count in zip(rows, drafts, counts, strict=True):
            self._match_lengths[row.slot] = draft.match_length
            if draft.tokens and not count:
                self._acceptance.fade(row.slot, draft.match_length)
        return [draft.tokens[:count] for draft, count in zip(drafts, counts, strict=True)]

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        """Learns that `accepted` of the `drafted` tokens of a slot were right."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1
        self._acceptance.observe(slot, self._match_lengths[slot], drafted, accepted)

    def samples(self) -> Iterator[Sample]:
        """Yields the figures of the drafts."""
        yield table.DRAFTS.sample(self.drafts)
        yield table.DRAFTED.sample(self.drafted)
        yield from table.ACCEPTED.samples((str(place), count) for place, count in enumerate(self.accepted_at))

    def pays(self, sampling: int, positions: int) -> bool:
        """Returns whether drafts as likely to be right as any would be worth their positions."""
        if sampling > self._capacity.max_drafted_rows or self._room(positions) < 1:
            return False
        likely = min(LIKELY_TOKENS * sampling, self._room(positions)) if self._ahead else LIKELY_TOKENS
        seconds = self._seconds(sampling, positions, likely)
        return bool((sampling + likely * MOST_SURVIVAL) * seconds[0] > sampling * seconds[-1])

    def _room(self, positions: int) -> int:
        """Returns how many drafted tokens a step of so many other positions can verify."""
        rows, step = self._capacity.max_step_drafts, self._capacity.max_drafted_step
        return min(rows or MAX_POSITIONS, step - positions if step else MAX_POSITIONS)

    def _seconds(self, sampling: int, positions: int, count: int) -> Float64:
        """Returns the time of the step with no drafted tokens, one, and so on up to `count`, but for its prompts: these
        take their time anyway, and a step that is long for their sake does not make drafts cheap."""
        seconds = self.cost.seconds(positions, count)
        times: Float64 = self.cost.seconds(min(sampling, positions), 0) + seconds - seconds[0]
        if self._ahead:
            times[1:] += HOST_SECONDS + self._search * sampling
        return times

    def _depth(self, rows: Sequence[DraftRow], sampling: int, positions: int) -> int:
        """Returns how many tokens to draft for a row: as many as may be, or, where drafts take time, as many as are
        likely to make the most tokens per second."""
        most = max(min(row.room, self._most) for row in rows)
        drafting = self._drafter.seconds(len(rows), most)
        if drafting is None:
            return most
        likely = [self._acceptance.survivals(row.slot, MATCH_LENGTH, [1.0] * most) for row in rows]
        tokens = sampling + np.concatenate(([0.0], np.sum(likely, axis=0).cumsum()))
        verifying = self._seconds(sampling, positions, most * len(rows))[:: len(rows)]
        rates = tokens / (verifying + drafting)
        depth = int(rates.argmax())
        if rates[depth] >= LEAST_GAIN * rates[0]:
            return depth
        for row in rows:
            self._acceptance.fade(row.slot, MATCH_LENGTH)
        return 0

    def _cut(self, slot: int, draft: Draft) -> Draft:
        """Returns a draft without what follows the first token that a stop id or the grammar rules out."""
        sequence = self._sequences[slot]
        tokens = list(takewhile(lambda token: token not in sequence.stop_ids, draft.tokens))
        if tokens and sequence.grammar is not None:
            tokens = tokens[: sequence.grammar.count_allowed(tokens)]
        return Draft(tokens, draft.shares[: len(tokens)], draft.match_length)

    def _likely(self, slot: int, draft: Draft) -> list[float]:
        survivals = self._acceptance.survivals(slot, draft.match_length, draft.shares)
        return list(takewhile(lambda chance: chance >= LEAST_SURVIVAL, survivals))
