"""An executor that is behind: plans reach it late and in bursts, steps end after the next have begun, messages are
lost and sent again."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pagewire.shared.messages.plan import Plan
from pagewire.shared.messages.step import StepOutput
from tests.support.executor import ModelExecutor, Slot

M = TypeVar("M")


@dataclass
class Wire(Generic[M]):
    """Carries numbered messages. Its reader gets each once and in order: it asks again for missed ones."""

    sent: list[M] = field(default_factory=list)
    on_the_way: deque[int] = field(default_factory=deque)
    read: int = 0

    def send(self, message: M) -> None:
        self.on_the_way.append(len(self.sent))
        self.sent.append(message)

    def lose(self) -> None:
        if self.on_the_way:
            self.on_the_way.pop()

    def repeat(self) -> None:
        if self.sent:
            self.on_the_way.append(len(self.sent) // 2)

    def receive(self) -> list[M]:
        """Returns the messages that one delivery makes readable: none if repeated, several behind a gap."""
        return self._up_to(self.on_the_way.popleft() + 1) if self.on_the_way else []

    def catch_up(self) -> list[M]:
        """Returns the messages that a heartbeat makes readable: all."""
        self.on_the_way.clear()
        return self._up_to(len(self.sent))

    def _up_to(self, end: int) -> list[M]:
        begin, self.read = self.read, max(self.read, end)
        return self.sent[begin:end]


@dataclass(slots=True)
class LaggingExecutor(ModelExecutor):
    """Begins up to `depth` steps before the first of them has ended."""

    depth: int = 0
    plans_in: Wire[Plan] = field(default_factory=Wire)
    steps_out: Wire[StepOutput] = field(default_factory=Wire)
    written: dict[int, list[tuple[int, set[int]]]] = field(default_factory=dict)
    """Per step, the blocks that each sequence wrote."""

    def begin_step(self) -> bool:
        """Takes in the plans that are here and begins a step; ends the oldest first if too many are in flight."""
        while len(self.outputs) > self.depth:
            self.end_step()
        return self.run()

    def end_step(self) -> None:
        if self.outputs:
            self.steps_out.send(self.outputs.popleft())

    def _step(self, rows: list[tuple[Slot, int]]) -> None:
        self.written[self.step] = [
            (
                slot.sequence,
                {b for p in range(slot.computed, slot.computed + width) for b in self.blocks_at(slot, p)},
            )
            for slot, width in rows
        ]
        ModelExecutor._step(self, rows)
