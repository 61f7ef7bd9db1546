"""Drafters for tests: one knows the texts, one is always wrong, one guesses at random."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from unittest.mock import patch

import numpy as np

from pagewire.services.executor.devices.protocol import Device, Float64
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.drafter import Draft, Drafter, DraftRow
from pagewire.services.executor.speculation.speculator import Speculator
from pagewire.services.executor.speculation.step_cost import StepCost
from pagewire.services.executor.steps import step_thread
from pagewire.shared.settings.config import Settings

VOCABULARY = 512


class Scripted(Drafter):
    """Drafts what a function says."""

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        self._guess = guess

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        guesses = [self.guess(row.text.tolist(), row.room) for row in rows]
        return [Draft(tokens, [1.0] * len(tokens), 32) for tokens in guesses]

    def guess(self, text: list[int], most: int) -> list[int]:
        """Returns the tokens that may follow a text, at most so many."""
        return self._guess(text, most)[:most]


def knowing(texts: list[list[int]]) -> Scripted:
    """Drafts the rest of the texts, prompt and output, of which one begins as the sequence does."""

    def guess(text: list[int], most: int) -> list[int]:
        return next((each[len(text) : len(text) + most] for each in texts if each[: len(text)] == text), [])

    return Scripted(guess)


def wrong(texts: list[list[int]]) -> Scripted:
    """Drafts tokens that do not follow."""
    right = knowing(texts)

    def guess(text: list[int], most: int) -> list[int]:
        return [(token + 1) % VOCABULARY for token in right.guess(text, most)]

    return Scripted(guess)


def guessing(texts: list[list[int]], share: float = 0.7) -> Scripted:
    """Drafts right and wrong tokens, by chance, and any number of them."""
    random, right = Random(5), knowing(texts)

    def guess(text: list[int], most: int) -> list[int]:
        tokens = right.guess(text, random.randint(0, most))
        return [token if random.random() < share else random.randrange(VOCABULARY) for token in tokens]

    return Scripted(guess)


@contextmanager
def drafting(drafter: Drafter | None, most: int = 6) -> Iterator[list[Speculator]]:
    """Executors that are opened meanwhile draft so, however little it pays; yields their speculators.

    None: with the draft model of their settings."""
    opened: list[Speculator] = []

    def open_(_: Settings, device: Device) -> Speculator:
        capacity = device.capacity
        chosen = drafter
        if chosen is None:
            assert device.draft_model is not None
            chosen = DraftModel(device.draft_model, capacity.vocab_size)
        opened.append(Speculator(chosen, min(most, capacity.max_drafts), replace(capacity, max_drafted_rows=1000)))
        return opened[-1]

    def flat(_: StepCost, first: int, count: int) -> Float64:
        return np.ones(count + 1)

    def nothing(*_: object) -> None:
        """Learns nothing: all drafts seem to be right."""

    with (
        patch.object(step_thread, "open_speculator", open_),
        patch.object(StepCost, "seconds", flat),
        patch.object(DraftModel, "seconds", lambda _self, _rows, most: np.zeros(most + 1)),
        patch("pagewire.services.executor.speculation.acceptance.Acceptance.observe", nothing),
    ):
        yield opened
