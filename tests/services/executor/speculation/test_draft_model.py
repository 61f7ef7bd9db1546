"""A draft model computes each position of a text once, from the right tokens, and holds blocks while a text lasts."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from pagewire.services.executor.devices.protocol import StepBatch
from pagewire.services.executor.speculation import draft_model
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.drafter import DraftRow, NewSequence
from pagewire.shared.sampling_parameters import record
from tests.services.executor.fakes import CAPACITY, FakeDevice, FakePending, token_at

KEY = 7
SEQUENCE = NewSequence(record(key=KEY), known_tokens=1)


class Memory(FakeDevice):
    """Keeps the token of each position of its pool, and insists that earlier positions hold those of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, list[int]] = {}
        self._written: dict[tuple[int, int], int] = {}

    def launch(self, batch: StepBatch) -> FakePending:
        ids, size = iter(batch.token_ids.tolist()), self.capacity.block_size
        for slot, start, width in zip(
            batch.slots.tolist(), batch.num_computed_tokens.tolist(), batch.query_lens.tolist(), strict=True
        ):
            text = self.texts[slot]
            places = [(self.tables[slot][place // size], place % size) for place in range(start + width)]
            read = [self._written[place] for place in places[:start]]
            assert read[: len(text)] == text[:start]
            self._written |= {place: next(ids) for place in places[start:]}
        return super().launch(batch)


def following(text: list[int], count: int) -> list[int]:
    """The tokens that the fake device samples behind a text."""
    return [token_at(KEY, len(text) + place, CAPACITY.vocab_size) for place in range(count)]


def opened(device: FakeDevice, slots: int = 1) -> DraftModel:
    drafter = DraftModel(device, CAPACITY.vocab_size)
    for slot in range(slots):
        drafter.begin(slot, SEQUENCE)
    return drafter


def drafted(drafter: DraftModel, text: list[int], room: int = 3, slot: int = 0) -> list[int]:
    return drafter.draft([DraftRow(slot, np.array(text), room)])[0].tokens


def test_a_draft_model_drafts_its_own_samples_behind_the_text() -> None:
    assert drafted(opened(FakeDevice()), [1, 2, 3]) == following([1, 2, 3], 3)


@pytest.mark.parametrize("right", range(4))
def test_only_positions_of_wrong_drafts_are_computed_again(right: int) -> None:
    device = FakeDevice()
    drafter, text = opened(device), [1, 2, 3]
    text += [*drafted(drafter, text)[:right], 9]  # the model samples 9 itself
    device.batches.clear()
    assert drafted(drafter, text) == following(text, 3)
    first = device.batches[0]
    assert first.num_computed_tokens.tolist() == [3 + min(right, 2)], "the last drafted token is never computed"
    assert first.token_ids.tolist() == text[3 + min(right, 2) :]


def test_a_long_text_is_computed_in_parts_and_drafted_for_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "DRAFT_MODEL_TOKENS", 4)
    device = FakeDevice()
    drafter, text = opened(device, slots=2), [*range(1, 11)]
    rows = [DraftRow(0, np.array(text), 2), DraftRow(1, np.array([5]), 2)]
    drafts = [[draft.tokens for draft in drafter.draft(rows)] for _ in range(4)]
    assert [bool(long) for long, _ in drafts] == [False, False, False, True], "one position is the other row's"
    assert all(short == following([5], 2) for _, short in drafts), "the other row never waits"


def test_without_a_block_or_beyond_the_context_nothing_is_drafted() -> None:
    small = FakeDevice(replace(CAPACITY, num_blocks=2))
    drafter = opened(small, slots=2)
    size = CAPACITY.block_size
    assert drafted(drafter, [1] * (size + 1))
    assert drafted(drafter, [1] * (size + 1), slot=1) == []
    drafter.end(0, np.array([1]))
    assert drafted(drafter, [1] * (size + 1), slot=1), "the blocks of a text that has ended are free"
    short = opened(FakeDevice(replace(CAPACITY, max_model_len=4)))
    assert drafted(short, [1, 2, 3], room=2)
    assert drafted(short, [1, 2, 3, 4], room=2) == []


def test_tokens_that_one_of_the_models_does_not_know_end_a_draft() -> None:
    assert drafted(opened(FakeDevice(replace(CAPACITY, vocab_size=3))), [1, 2, 9]) == []
    few = DraftModel(FakeDevice(), vocab_size=1)
    few.begin(0, SEQUENCE)
    assert drafted(few, [0], room=30) == []


def test_every_position_that_is_read_was_computed_from_its_token() -> None:
    random = Random(3)
    device = Memory()
    drafter = opened(device, slots=4)
    texts = [[random.randrange(9) for _ in range(random.randint(1, 20))] for _ in range(4)]
    for _ in range(60):
        slots = [slot for slot in range(4) if random.random() < 0.7]
        rows = [DraftRow(slot, np.array(texts[slot]), random.randint(0, 4)) for slot in slots]
        device.texts = dict(enumerate(map(list, texts)))
        for slot, draft in zip(slots, drafter.draft(rows), strict=True):
            texts[slot] += [*draft.tokens[: random.randint(0, 4)], random.randrange(9)]
            if len(texts[slot]) > 30:
                drafter.end(slot, np.array(texts[slot]))
                drafter.begin(slot, SEQUENCE)
                texts[slot] = texts[slot][:3]
    assert device.batches
