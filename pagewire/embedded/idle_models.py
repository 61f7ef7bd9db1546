"""Unloads models that nobody uses, and loads them again for the next request.

Only the executors of a model end: they hold most of the memory that it needs. The other services take requests and
store them, and a stored request starts the executors again, so that none is lost in between.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import RESERVED, UNLOADED, Heartbeat
from pagewire.shared.process.peers import Peers

INTERVAL = 0.5
"""Seconds between two checks of a model's heartbeats, which services send as often."""
SERVICES = ("tokenizer", "scheduler", "executor")
"""The services whose heartbeats say whether a model is used."""

_log = structlog.get_logger()


class State(Enum):
    """State of a model's executors."""

    LOADED = auto()
    """They run, or the supervisor restarts them."""
    UNLOADED = auto()
    """They have ended, or end when nothing runs any more."""
    LOADING = auto()
    """They have been started, and the model is not ready yet."""


class Usage:
    """Decides, from the heartbeats of a model's services, when its executors end and when they start again."""

    def __init__(self, limit: float, now: float) -> None:
        """`limit`: seconds without a request after which the model is unloaded; `now`: time of a monotonic clock."""
        self.state = State.LOADED
        self._limit = limit
        self._used_at = now
        self._steps: dict[str, float] = {}
        """Steps that each executor has run."""

    def observe(self, beats: Iterable[Heartbeat], now: float) -> State:
        """Returns the state from now on. `beats`: the last heartbeats of the model's live services.

        Time without a request counts while the model is ready.
        """
        beats = list(beats)
        waits = any(beat.load.get("queued", 0) for beat in beats if beat.service in ("tokenizer", "scheduler"))
        steps = {beat.instance: beat.load.get("steps", 0) for beat in beats if beat.service == "executor"}
        runs = any(beat.load.get("requests", 0) for beat in beats if beat.service == "scheduler")
        ready = any(beat.ready for beat in beats if beat.service == "scheduler")  # it has an executor
        if waits or runs or not ready or any(count != self._steps.get(name, 0) for name, count in steps.items()):
            self._used_at = now
        self._steps = steps
        match self.state:
            case State.LOADED if now - self._used_at > self._limit:
                self.state = State.UNLOADED
            case State.UNLOADED if waits:
                self.state = State.LOADING
            case State.LOADING if ready:
                self.state, self._used_at = State.LOADED, now
        return self.state


class IdleModel:
    """Follows one model; while it is unloaded, sends the heartbeat of its executors in their place."""

    def __init__(self, bus: Bus, model: str, limit: float, stop: Callable[[], None], start: Callable[[], None]) -> None:
        """Does nothing yet.

        Args:
            bus: a connection with the rights of the supervisor.
            model: token of the model in subjects.
            limit: seconds without a request after which the model is unloaded.
            stop: drains the executors, and does not start them again.
            start: starts the executors.
        """
        self._bus = bus
        self._model = model
        self._limit = limit
        self._stop = stop
        self._start = start
        self._peers = Peers(bus, model)
        self.reserved = 0.0
        """Bytes that the executors will take again, which have ended; 0 while they run."""

    async def run(self) -> None:
        """Unloads and loads the model until cancelled."""
        for service in SERVICES:
            await self._peers.listen(service)
        usage, stand_in = Usage(self._limit, time.monotonic()), ""
        while True:
            await asyncio.sleep(INTERVAL)
            before, now = usage.state, time.monotonic()
            beats = [beat for service in SERVICES for beat in self._peers.alive(service)]
            match before, usage.observe((beat for beat in beats if beat.instance != stand_in), now):
                case State.LOADED, State.UNLOADED:
                    _log.info("model_unloaded", model=self._model, idle_for=self._limit)
                    self.reserved = sum(beat.load.get(RESERVED, 0.0) for beat in beats)
                    stand_in = subjects.new_instance()
                    self._send(stand_in)
                    self._stop()
                case State.UNLOADED, State.LOADING:
                    _log.info("model_loading", model=self._model)
                    self._start()
                case State.LOADING, State.LOADED:
                    self._publish(stand_in, b"")
                    self.reserved = 0.0
            if usage.state is not State.LOADED:
                self._send(stand_in)

    def _send(self, stand_in: str) -> None:
        load = {UNLOADED: 1.0}
        beat = Heartbeat("executor", stand_in, ready=False, term=0, plan=0, step=0, load=load, model=self._model)
        self._publish(stand_in, encode(beat))

    def _publish(self, stand_in: str, data: bytes) -> None:
        try:
            self._bus.publish(f"{subjects.HEARTBEAT}.executor.{stand_in}", data)
        except BusError as error:
            _log.warning("heartbeat_not_sent", model=self._model, reason=str(error))
