"""Random plans against a loop with one, two and three steps in flight: every sequence gets the tokens of a plain model.

Everything runs on one thread: a scheduler of random habits answers wherever the loop asks its inbox. The device knows
nothing of stop ids, and remembers which sequence wrote each KV position, so that a slot or block that is used again too
early shows as a context that belongs to somebody else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.devices.protocol import StepBatch
from pagewire.services.executor.outputs.results import PlanRefused, StepResult
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.drafter import Drafter
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.steps.plan_inbox import NewPlans, PlanInbox
from pagewire.services.executor.steps.step_loop import StepLoop
from pagewire.shared.messages import unpack
from pagewire.shared.messages.plan import AddSlot, Plan
from pagewire.shared.messages.step import NO_TOKEN, Finish, StepOutput
from tests.services.executor.fakes import CAPACITY, DRAFTING, FakeDevice, FakePending, add, plan, sampling, token_at
from tests.support.drafters import drafting, guessing

BLOCK = CAPACITY.block_size
UNKNOWN = -1
"""Stands for a token that a step in flight may still sample."""


@dataclass
class Text:
    """A sequence, as the scheduler knows it."""

    number: int
    prompt: list[int]
    most: int
    stop_ids: list[int]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    finish: Finish = Finish.NONE
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    leaving: int | None = None
    """Number of the plan that removed it alive."""
    over: bool = False

    @property
    def key(self) -> int:
        return sequence_key(self.number, 0, 0)

    @property
    def whole(self) -> list[int]:
        """The tokens of a device that runs one sequence, one token at a time."""
        tokens: list[int] = []
        while len(tokens) < self.most and not (tokens and tokens[-1] in self.stop_ids):
            tokens.append(token_at(self.key, len(self.prompt) + len(tokens)))
        return tokens

    def added(self, limit: int) -> AddSlot:
        assert self.slot is not None
        return add(
            self.slot,
            self.number,
            self.tokens,
            self.blocks,
            limit=limit,
            prompt_tokens=len(self.prompt),
            picks=sampling(self.number, max_tokens=self.most, stop_ids=self.stop_ids),
        )


class Memory(FakeDevice):
    """Writes and reads KV positions in order of launch. With `forces`, some sampled tokens have others behind them.

    Drafted tokens are written, too: those that are wrong must be written again before anything reads them.
    """

    def __init__(self, depth: int, texts: list[Text], most: int, *, forces: bool) -> None:
        super().__init__(replace(CAPACITY, max_row_tokens=most), depth=depth)
        self._forces = forces
        self._texts = {text.key: text for text in texts}
        self._written: dict[tuple[int, int], tuple[int, int, int]] = {}

    def launch(self, batch: StepBatch) -> FakePending:
        ids = iter(batch.token_ids.tolist())
        for slot, start, width in zip(
            batch.slots.tolist(), batch.num_computed_tokens.tolist(), batch.query_lens.tolist(), strict=True
        ):
            key, table = int(self.records[slot]["key"]), self.tables[slot]
            text = self._texts[key]
            known = text.tokens  # the loop knows no fewer
            right = [*text.prompt, *text.whole]
            for position in range(start):
                written = self._written[table[position // BLOCK], position % BLOCK]
                assert written[:2] == (key, position)
                assert position >= len(right) or written[2] in (right[position], UNKNOWN)
            for position in range(start, start + width):
                token = next(ids)
                self._written[table[position // BLOCK], position % BLOCK] = (
                    key,
                    position,
                    token if self.depth == 1 else UNKNOWN,
                )
                assert position >= len(known) or token == known[position]
        pending = super().launch(batch)
        if self._forces:
            pending.forced = {row: self._behind(batch, row) for row in np.flatnonzero(batch.samples).tolist()}
        return pending

    def _behind(self, batch: StepBatch, row: int) -> list[int]:
        """The forced tokens behind the token that a row samples, never the last token of the text."""
        key, place = int(self.records[int(batch.slots[row])]["key"]), int(batch.ends[row]) + 1
        text = self._texts[key]
        left = len(text.prompt) + len(text.whole) - 1 - place
        count = min(max(left, 0), (key + len(self.batches)) % 4)
        return [token_at(key, place + i) for i in range(count)]


class Scheduler(PlanInbox):
    """Stands where the inbox is, and does everything that a scheduler may do."""

    def __init__(self, random: Random, texts: list[Text]) -> None:
        super().__init__()
        self.emitted: list[StepResult] = []
        self._random = random
        self._texts = {text.number: text for text in texts}
        self._slots = list(range(CAPACITY.max_num_seqs))
        self._blocks = list(range(CAPACITY.num_blocks))
        self._read = 0
        self._applied: list[Plan] = []
        self._sent: list[Plan] = []
        self.runs = 0
        self.drafted = 0

    def emit(self, result: StepResult | PlanRefused) -> None:
        assert isinstance(result, StepResult), result
        self.emitted.append(result)

    def take(self, *, wait: bool) -> NewPlans | None:
        unread = len(self.emitted) - self._read
        for _ in range(unread if wait else self._random.randint(0, unread)):
            self._on_step(self.emitted[self._read])
            self._read += 1
        if wait and all(text.over for text in self._texts.values()):
            return None
        plans = [self._plan(eager=wait)] if wait else []
        while self._random.random() < 0.3:
            plans.append(self._plan(eager=False))
        return NewPlans(1, plans)

    def _on_step(self, ran: StepResult) -> None:
        output = ran.output
        self._applied += ran.plans
        assert (output.term, output.step, output.plan) == (1, self._read, len(self._applied))
        assert self._applied == self._sent[: len(self._applied)]
        assert output.sequences or ran.plans, "an output without rows that answers nothing"
        self.runs += bool(output.sequences)
        assert self.runs <= max([0, *(each.lease_until for each in self._applied)])
        for number, start, count, tokens, finish in rows(output):
            self._on_row(self._texts[number], start, count, tokens, finish, several=bool(output.token_counts))
        drafts = iter(unpack(output.drafts))
        for number, drafted, accepted in zip(drafts, drafts, drafts, strict=True):
            assert 0 <= accepted <= drafted
            self._texts[number].computed += accepted
            self.drafted += drafted
        for text in self._texts.values():
            if text.leaving is not None and text.leaving <= output.plan:
                self._free(text)

    def _on_row(self, text: Text, start: int, count: int, tokens: list[int], finish: int, *, several: bool) -> None:
        assert not text.finish, "a row behind the end"
        assert text.slot is not None, "a row of a sequence that is not there"
        assert start == text.computed
        complete = start + count == len(text.tokens)
        assert not tokens or complete
        assert several or len(tokens) == complete
        text.computed = start + count - (complete and not tokens)
        text.tokens += tokens
        generated, whole = text.tokens[len(text.prompt) :], text.whole
        assert generated == whole[: len(generated)]
        last = Finish.STOP if whole[-1] in text.stop_ids else Finish.LENGTH
        assert finish == (last if generated == whole else Finish.NONE)
        text.finish = Finish(finish)
        if finish:
            text.over = True

    def _free(self, text: Text) -> None:
        assert text.slot is not None
        self._slots.append(text.slot)
        self._blocks += text.blocks
        text.slot, text.leaving, text.blocks, text.computed = None, None, [], 0

    def _plan(self, *, eager: bool) -> Plan:
        """An eager one lets something run."""
        random, number = self._random, len(self._sent) + 1
        assert number < 2000, "nothing ends"
        removed: list[int] = []
        for text in self._texts.values():
            if text.slot is None or text.leaving is not None:
                continue
            if text.finish:
                removed.append(text.slot)
                self._free(text)
            elif not eager and random.random() < 0.1:
                removed.append(text.slot)
                text.leaving = number
                text.over = random.random() < 0.5  # cancelled, or preempted
        added = [self._admit(text, eager) for text in self._texts.values() if self._waits(text) and self._slots]
        names = {each.slot for each in added}
        running = [t for t in self._texts.values() if t.slot is not None and t.leaving is None and t.slot not in names]
        blocks, limits = [], []
        for text in running:
            assert text.slot is not None
            blocks += [(text.slot, block) for block in self._give(text, eager)]
            limits.append((text.slot, len(text.blocks) * BLOCK))
        order = [text.slot for text in running if text.slot is not None]
        random.shuffle(order)
        lease = max([self.runs + random.randint(int(eager), 4), *(each.lease_until for each in self._sent)])
        self._sent.append(
            plan(
                number,
                *added,
                removed=removed,
                blocks=blocks,
                limits=limits,
                order=order,
                budget=random.randint(4, 12),
                lease_until=lease,
            )
        )
        return self._sent[-1]

    def _waits(self, text: Text) -> bool:
        return not text.over and text.slot is None

    def _admit(self, text: Text, eager: bool) -> AddSlot:
        text.slot = self._slots.pop(self._random.randrange(len(self._slots)))
        text.tokens = text.tokens or list(text.prompt)
        self._give(text, eager)
        return text.added(len(text.blocks) * BLOCK)

    def _give(self, text: Text, eager: bool) -> list[int]:
        """All blocks that it can ever need, or only some of them."""
        missing = -(-(len(text.prompt) + text.most) // BLOCK) - len(text.blocks)
        count = missing if eager else self._random.randint(0, missing)
        blocks = [self._blocks.pop(self._random.randrange(len(self._blocks))) for _ in range(count)]
        text.blocks += blocks
        return blocks


def rows(output: StepOutput) -> Iterator[tuple[int, int, int, list[int], int]]:
    first, more = output.split_tokens()
    columns = (unpack(column) for column in (output.sequences, output.starts, output.counts))
    for sequence, start, count, token, finish in zip(*columns, first, output.finishes, strict=True):
        tokens = [] if token == NO_TOKEN else [token, *more.get(sequence, ())]
        yield sequence, start, count, tokens, finish


texts = st.lists(
    st.builds(
        Text,
        number=st.just(0),
        prompt=st.lists(st.integers(0, 49), min_size=1, max_size=12),
        most=st.integers(1, 12),
        stop_ids=st.lists(st.integers(0, 49), max_size=20),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize(
    ("depth", "most", "forces", "drafts"),
    [
        (1, 1, False, "none"),
        (2, 1, False, "none"),
        (3, 1, False, "none"),
        (2, 3, False, "none"),
        (1, 1, True, "none"),
        (2, 1, True, "none"),
        (1, 1, False, "guesses"),
        (2, 1, False, "guesses"),
        (1, 1, False, "model"),
    ],
)
@settings(max_examples=60, deadline=None)
@given(texts=texts, seed=st.integers(0, 2**32))
def test_every_sequence_gets_its_tokens_however_deep_the_queue(
    depth: int, most: int, forces: bool, drafts: str, texts: list[Text], seed: int
) -> None:
    for number, text in enumerate(texts, 1):
        text.number = number
    scheduler, device = Scheduler(Random(seed), texts), Memory(depth, texts, most, forces=forces)
    small = FakeDevice(replace(CAPACITY, num_blocks=12, max_model_len=30))  # too few blocks for all, and too short
    drafter: Drafter = guessing([[*text.prompt, *text.whole] for text in texts])
    if drafts == "model":
        drafter = DraftModel(small, CAPACITY.vocab_size)
    with drafting(drafter):
        speculator = None if drafts == "none" else Speculator(drafter, 4, DRAFTING)
        loop = StepLoop(device, scheduler, scheduler.emit, speculator=speculator)
        loop.run()
    assert all(text.finish or text.over for text in texts)
    assert not device.pending
    assert small.tables.keys() <= device.tables.keys(), "the draft model has the sequences that are left"
    assert scheduler.drafted == loop.counters.drafted
    assert loop.counters.sampled == sum(
        token != NO_TOKEN for ran in scheduler.emitted for token in unpack(ran.output.tokens)
    )
    if depth == 1:
        assert loop.counters.rows == sum(len(ran.output.finishes) for ran in scheduler.emitted), "a dead row"
