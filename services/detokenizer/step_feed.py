"""The steps of every executor, in order and without a gap.

An executor owns its steps and keeps the last of them in a ring. This process keeps copies of the newest ones, and an
adopted stream gets from them the tokens that its scheduler did not know yet. A gap is closed by a replay from the ring.
Tokens of steps that have left the ring are rebuilt from the scheduler of each request (`Streams._ask_again`).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.errors import BusError
from pagewire.shared.messages import UNREADABLE, Decoder, encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Replay
from pagewire.shared.messages.step import RING_STEPS, StepOutput
from pagewire.shared.step_reader import StepReader

MAX_EXECUTORS = 64
"""Executors that are read at once; one more replaces the executor with the oldest term."""
STALL = 1.0
"""Seconds without a message after which a replay has failed."""
HISTORY = 256
"""Steps of each executor that are kept for streams that are adopted in the middle of their sequences."""
_log = structlog.get_logger()
_step = Decoder(StepOutput)
_heartbeat = Decoder(Heartbeat)
Outputs = Callable[[list[StepOutput] | None], None]
"""Function that takes outputs in order; None: some of them are lost."""


@dataclass(slots=True)
class _Executor:
    """One executor as this process reads it."""

    reader: StepReader = field(default_factory=StepReader)
    """Puts the outputs in order and knows which are missing."""
    history: deque[StepOutput] = field(default_factory=deque)
    """Last outputs of the term, without a gap."""
    waiting: list[tuple[int, int, Outputs]] = field(default_factory=list)
    """Term and step after which a function takes the outputs, which `history` does not have."""

    def add(self, output: StepOutput) -> None:
        """Adds the next output to the history."""
        history = self.history
        if history and (history[-1].term, history[-1].step + 1) != (output.term, output.step):
            history.clear()
        history.append(output)
        if len(history) > HISTORY:
            history.popleft()

    def add_older(self, outputs: list[StepOutput]) -> None:
        """Adds outputs in front of the history, as far as they follow each other."""
        for output in reversed(outputs):
            if self.history and (output.term, output.step + 1) == (self.history[0].term, self.history[0].step):
                self.history.appendleft(output)

    def since(self, term: int, step: int) -> list[StepOutput] | None:
        """Returns the outputs of `term` after `step`; None if some may be missing."""
        if not self.history or self.history[0].term != term or self.history[0].step > step + 1:
            return None
        return [output for output in self.history if output.step > step]


class StepFeed:
    """Reads the steps of every executor, and asks for replays of missing ones.

    Attributes:
        gaps: times so far that steps were missing.
        repairs: gaps so far that a replay has closed.
    """

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, on_output: Callable[[StepOutput], None]) -> None:
        """`on_output` is called with each output, in the order of each executor's steps."""
        self._bus = bus
        self._tasks = tasks
        self._on_output = on_output
        self._executors: dict[str, _Executor] = {}
        self._replaying: set[str] = set()
        self.gaps = 0
        self.repairs = 0

    @property
    def positions(self) -> dict[int, int]:
        """The last step read of each term."""
        readers = (executor.reader for executor in self._executors.values())
        return {reader.term: reader.last for reader in readers if reader.term >= 0}

    def catch_up(self, executor: str, term: int, step: int, take: Outputs) -> None:
        """Calls `take` with all outputs of a term that were read after `step`: at once if they are in memory, otherwise
        when the executor has sent them again, once for all that wait."""
        state = self._executors.get(executor) or self._add_executor(executor)
        outputs = state.since(term, step)
        if outputs is not None:
            take(outputs)
            return
        state.waiting.append((term, step, take))
        if len(state.waiting) == 1:
            self._tasks.create_task(self._fetch(executor, state))

    async def subscribe(self) -> list[Subscription]:
        """Subscribes to steps and to the heartbeats of executors."""
        return [
            await self._bus.subscribe(f"{subjects.STEPS}.*", self._on_step),
            await self._bus.subscribe(f"{subjects.HEARTBEAT}.executor.*", self._on_heartbeat),
        ]

    def _on_step(self, message: Message) -> None:
        output = _step.read(message)
        if output is None:
            return
        executor = message.subject.rpartition(".")[2]
        state = self._executors.get(executor) or self._add_executor(executor)
        self._feed(state, output)
        if state.reader.missing is not None:
            self._start_replay(executor, state)

    def _feed(self, state: _Executor, output: StepOutput) -> None:
        """Takes an output, and delivers all that are in order now."""
        self._deliver(state, state.reader.feed(output))

    def _deliver(self, state: _Executor, outputs: list[StepOutput]) -> None:
        for output in outputs:
            state.add(output)
            self._on_output(output)

    def _add_executor(self, name: str) -> _Executor:
        if len(self._executors) >= MAX_EXECUTORS:
            del self._executors[min(self._executors, key=lambda name: self._executors[name].reader.term)]
        state = self._executors[name] = _Executor()
        return state

    def _on_heartbeat(self, message: Message) -> None:
        """Notices that the last step before a pause was lost: no later step reveals the gap."""
        beat = _heartbeat.try_decode(message.data)
        state = self._executors.get(beat.instance) if beat is not None else None
        if beat is None or state is None:
            return
        state.reader.note_run(beat.term, beat.step)
        if state.reader.missing is not None:
            self._start_replay(beat.instance, state)

    async def _fetch(self, executor: str, state: _Executor) -> None:
        """Asks an executor for the outputs that `catch_up` waits for. Outputs that are not in its ring are lost."""
        term = max(term for term, _, _ in state.waiting)
        first = min(step for other, step, _ in state.waiting if other == term) + 1
        fetched: list[StepOutput] = []
        answered = False
        try:
            request = encode(Replay(term, first, first + RING_STEPS))
            async for message in self._bus.request_many(f"{subjects.REPLAY}.{executor}", request, stall=STALL):
                output = _step.decode(message.data)
                if not fetched or output.step == fetched[-1].step + 1:
                    fetched.append(output)
                self._feed(state, output)
            answered = True
        except (BusError, *UNREADABLE) as error:
            _log.warning("replay_failed", executor=executor, reason=str(error))
        state.add_older(fetched)
        waiting, state.waiting = state.waiting, []
        for other, step, take in waiting:
            outputs = state.since(other, step)
            if outputs is None and answered and not (state.history and state.history[0].term == other):
                outputs = []  # the term has no later step so far, and the next ones will be read
            take(outputs)

    def _start_replay(self, executor: str, state: _Executor) -> None:
        if executor not in self._replaying:
            self._replaying.add(executor)
            self.gaps += 1
            self._tasks.create_task(self._replay(executor, state))

    async def _replay(self, executor: str, state: _Executor) -> None:
        """Asks for the missing steps until none are missing. Steps that are not in the executor's ring are skipped."""
        reader, lost = state.reader, False
        try:
            while (missing := reader.missing) is not None:
                request = encode(Replay(reader.term, *missing))
                async for message in self._bus.request_many(f"{subjects.REPLAY}.{executor}", request, stall=STALL):
                    self._feed(state, _step.decode(message.data))
                if reader.missing == missing:
                    skipped_to = reader.skip()
                    if not skipped_to:
                        return
                    _log.error("steps_lost", executor=executor, term=reader.term, first=missing[0], last=missing[1])
                    self._deliver(state, skipped_to)
                    lost = True
            self.repairs += not lost
        except (BusError, *UNREADABLE) as error:
            # The next step or heartbeat tries again; without either, the scheduler declares the executor lost.
            _log.warning("replay_failed", executor=executor, reason=str(error))
        finally:
            self._replaying.discard(executor)
