"""The steps of every executor, in order, with what was lost on the way asked for again."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusError, WireVersionError
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.plan import Replay
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.step_reader import StepReader

EXECUTORS = 64
"""Executors that are read; the one with the oldest term is forgotten for one more."""
STALL = 1.0
"""Seconds without a message after which a replay has failed."""

_log = structlog.get_logger()
_step = Decoder(StepOutput)
_heartbeat = Decoder(Heartbeat)


class Steps:
    """Reads what the executors do."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, on_output: Callable[[StepOutput], None]) -> None:
        self._bus = bus
        self._tasks = tasks
        self._on_output = on_output
        self._readers: dict[str, StepReader] = {}
        self._healing: set[str] = set()

    @property
    def positions(self) -> dict[int, int]:
        """The last step read of each term."""
        return {reader.term: reader.last for reader in self._readers.values()}

    def on_step(self, message: Message) -> None:
        """A step of some executor."""
        executor = message.subject.rpartition(".")[2]
        try:
            output = _step.decode(message.data)
        except (WireVersionError, msgspec.DecodeError) as error:
            _log.error("step_unreadable", executor=executor, reason=str(error))
            return
        self._feed(executor, output)

    def _feed(self, executor: str, output: StepOutput) -> None:
        reader = self._readers.get(executor)
        if reader is None:
            reader = self._begin(executor)
        for ready in reader.feed(output):
            self._on_output(ready)
        if reader.missing is not None:
            self._heal(executor, reader)

    def _begin(self, executor: str) -> StepReader:
        if len(self._readers) >= EXECUTORS:
            del self._readers[min(self._readers, key=lambda name: self._readers[name].term)]
        reader = self._readers[executor] = StepReader()
        return reader

    def on_heartbeat(self, message: Message) -> None:
        """A heartbeat of some executor: it tells of a step that was lost with nothing behind it."""
        try:
            beat = _heartbeat.decode(message.data)
        except (WireVersionError, msgspec.DecodeError):
            return  # a peer that cannot be understood is not there
        reader = self._readers.get(beat.instance)
        if reader is None:
            return
        reader.note_run(beat.term, beat.step)
        if reader.missing is not None:
            self._heal(beat.instance, reader)

    def _heal(self, executor: str, reader: StepReader) -> None:
        if executor not in self._healing:
            self._healing.add(executor)
            self._tasks.create_task(self._replay(executor, reader))

    async def _replay(self, executor: str, reader: StepReader) -> None:
        """Asks for the missing steps. Those that the executor does not have any more are given up."""
        try:
            while (missing := reader.missing) is not None:
                request = encode(Replay(reader.term, *missing))
                async for message in self._bus.request_many(f"{subjects.REPLAY}.{executor}", request, stall=STALL):
                    for ready in reader.feed(_step.decode(message.data)):
                        self._on_output(ready)
                if reader.missing == missing:
                    given_up = reader.skip()
                    if not given_up:
                        return
                    _log.error("steps_lost", executor=executor, term=reader.term, first=missing[0], last=missing[1])
                    for ready in given_up:
                        self._on_output(ready)
        except (BusError, WireVersionError, msgspec.DecodeError) as error:
            # The next step or heartbeat tries again; without either, the scheduler finds the executor lost.
            _log.warning("replay_failed", executor=executor, reason=str(error))
        finally:
            self._healing.discard(executor)
