"""The calls of rank 0's device, which the other ranks repeat: pickled, over the socket of each with rank 0."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from typing_extensions import override

from pagewire.services.executor.devices.cuda.device import MASK_THREADS
from pagewire.services.executor.devices.masks import Masks
from pagewire.services.executor.devices.protocol import Capacity, Edits, Int64
from pagewire.services.executor.devices.ranks.startup import Connection
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.shared.errors import DeviceLost

MASKS = "masks"
"""Name of the message between the forward and the sampling of a step whose rows have grammars."""


class DeviceCalls:
    """Rank 0's end. Calls are sent with the next step, since none has an effect before."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._ends = [connection.end for connection in connections]
        self._unsent = b""

    def add(self, name: str, *arguments: Any) -> None:
        """Adds a call of the device's method `name`."""
        self._unsent += pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL)

    def send(self, name: str, *arguments: Any) -> None:
        """Sends a call after all that were added.

        Raises:
            DeviceLost: a rank has ended.
        """
        self.add(name, *arguments)
        calls, self._unsent = self._unsent, b""
        for end in self._ends:
            try:
                end.sendall(calls)
            except OSError as error:
                raise DeviceLost("a rank takes no more calls") from error


def next_call(calls: BinaryIO) -> tuple[str, tuple[Any, ...]]:
    """Waits for the next call of rank 0; returns the name of the method and its arguments.

    Raises:
        EOFError: there is none: rank 0 has ended the ranks.
    """
    name, arguments = pickle.load(calls)  # noqa: S301  # from rank 0, which has started this process
    return name, arguments


class LeadingMasks(Masks):
    """The masks of rank 0, which the other ranks get before they sample."""

    def __init__(self, capacity: Capacity, calls: DeviceCalls) -> None:
        super().__init__(capacity, MASK_THREADS)
        self._calls = calls

    @override
    def fill(self, slots: Int64, *, drafted: bool = False) -> None:
        super().fill(slots, drafted=drafted)
        self._calls.send(MASKS, self.table[slots])


class FollowingMasks(Masks):
    """The masks of another rank, which has no grammars."""

    def __init__(self, capacity: Capacity, calls: BinaryIO) -> None:
        super().__init__(capacity)
        self._calls = calls

    @override
    def add(self, slot: int, grammar: SequenceGrammar | None) -> None:
        super().add(slot, grammar)
        self._grammars[slot] = None  # what stands for it would collect tokens for ever

    @override
    def of(self, slot: int) -> None:
        return None

    @override
    def fill(self, slots: Int64, *, drafted: bool = False) -> None:
        name, (masks,) = next_call(self._calls)
        assert name == MASKS
        self.table[slots] = masks

    @override
    def forced(self, slots: Int64) -> dict[int, list[int]]:
        return {}


def _no_matcher(output: Sequence[int], *, fresh: bool) -> None:
    """Opens nothing: rank 0 has the matchers."""


_OF_RANK_0 = SequenceGrammar([], 0, (), 0, _no_matcher, lambda: None, forces=False)
"""Stands for a grammar that rank 0 has: other ranks only know that there is one."""


def without_grammar(edits: Edits | None) -> tuple[Edits | None, bool]:
    """Returns edits that can be sent, and whether they had a grammar."""
    if edits is None or edits.grammar is None:
        return edits, False
    return replace(edits, grammar=None), True


def with_grammar(edits: Edits | None, *, structured: bool) -> Edits | None:
    """Returns the result of `without_grammar` as a rank without grammars adds it."""
    if edits is None or not structured:
        return edits
    return replace(edits, grammar=_OF_RANK_0)
