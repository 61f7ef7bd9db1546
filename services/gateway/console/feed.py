"""The event stream of the console: services, latest steps and requests, collected only while a page is open."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from pagewire.services.gateway.answers.sse import sse
from pagewire.services.gateway.console.history import History
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.routes.request_log import LoggedRequest, RequestLog
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.recent_requests import RecentRequests
from pagewire.shared.messages.recent_steps import RecentSteps

INTERVAL = 0.25
"""Seconds between two events."""
SERVICES_EVERY = 4
"""Events between two that describe all services, unless one of them changes its state."""
MAX_REQUESTS = 50
"""Requests in one event; further changes are in the next ones."""
MAX_WAITING = 8
"""Events that wait for a slow page; one more replaces the oldest."""
MAX_ENDED = 32
"""Ended processes that are remembered."""

_encode = msgspec.json.Encoder().encode
_steps = Decoder(RecentSteps)
_requests = Decoder(RecentRequests)


class Feed:
    """Collects figures for all open pages. Without a page, it counts ended processes and samples every five seconds."""

    def __init__(self, bus: Bus, health: Health, requests: RequestLog) -> None:
        self._bus = bus
        self._health = health
        self._requests = requests
        self._history = History(health, requests)
        self._ended: deque[tuple[float, str, str]] = deque(maxlen=MAX_ENDED)
        """Time, service and instance of processes that have ended."""
        self._pages: set[asyncio.Queue[bytes]] = set()
        self._has_pages = asyncio.Event()
        self._new_steps: list[list[Any]] = []
        self._last_steps: dict[str, int] = {}
        """By executor: number of the latest step."""
        self._sent_states: object = None

    async def run(self) -> None:
        """Collects until cancelled."""
        ended = await self._health.follow_ended(self._note_ended)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._history.run())
                tasks.create_task(self._collect())
        finally:
            await ended.unsubscribe()

    async def events(self, tenant: str | None) -> AsyncIterator[bytes]:
        """Yields server-sent events until the gateway drains.

        Args:
            tenant: sees its own requests and the states of services alone; None: an operator, who sees everything.
        """
        changes, states = 0, self._states()
        with self._page() as page:
            first: dict[str, Any] = {"now": time.time(), "services": self._services(tenant)}
            if tenant is None:
                first |= {"ended": list(self._ended), "history": list(self._history.samples)}
            yield sse(_encode(first))
            while not self._health.draining:
                event = await page.get()
                if tenant is None:
                    yield event
                elif states != (states := self._states()):
                    yield sse(_encode({"services": self._services(tenant)}))
                requests = sorted(self._requests.changed(changes, tenant), key=lambda request: request.change)
                if requests := requests[:MAX_REQUESTS]:
                    changes = requests[-1].change
                    yield sse(_encode({"requests": [row(request) for request in requests]}))

    @contextmanager
    def _page(self) -> Iterator[asyncio.Queue[bytes]]:
        page: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._pages.add(page)
        self._has_pages.set()
        try:
            yield page
        finally:
            self._pages.remove(page)
            if not self._pages:
                self._has_pages.clear()

    async def _collect(self) -> None:
        """Sends an event to every page, and asks for the latest steps and requests, while there is a page."""
        count = 0
        with self._bus.inbox(self._on_steps) as steps, self._bus.inbox(self._on_requests) as requests:
            while True:
                await self._has_pages.wait()
                await asyncio.sleep(INTERVAL)
                with suppress(BusUnavailable):  # the next event says so
                    self._bus.publish(subjects.RECENT_STEPS, b"", reply=steps)
                    if count % SERVICES_EVERY == 0:
                        self._bus.publish(subjects.RECENT_REQUESTS, b"", reply=requests)
                if count % SERVICES_EVERY == 0:
                    self._requests.refresh()
                self._send(sse(_encode(self._event(count))))
                count += 1

    def _event(self, count: int) -> dict[str, Any]:
        event: dict[str, Any] = {"now": time.time()}
        states = self._states()
        if states != self._sent_states or count % SERVICES_EVERY == 0:
            self._sent_states = states
            event |= {"services": self._services(None), "ended": list(self._ended)}
        if self._new_steps:
            event["steps"], self._new_steps = self._new_steps, []
        if sample := self._history.take_new():
            event["sample"] = sample
        return event

    def _send(self, event: bytes) -> None:
        for page in self._pages:
            if page.full():
                page.get_nowait()
            page.put_nowait(event)

    def _states(self) -> list[tuple[str, str, bool, bool]]:
        return [(beat.service, beat.instance, beat.ready, beat.draining) for beat in self._health.alive()]

    def _services(self, tenant: str | None) -> list[dict[str, Any]]:
        """Returns the live instances; a tenant does not see how loaded they are."""
        return [describe(beat, with_load=tenant is None) for beat in self._health.alive()]

    def _note_ended(self, service: str, instance: str) -> None:
        self._ended.append((time.time(), service, instance))

    def _on_steps(self, message: Message) -> None:
        recent = _steps.try_decode(message.data)
        if recent is None or not recent.steps:
            return
        last = self._last_steps.get(recent.executor, 0)
        self._new_steps += [[recent.executor[:4], *step] for step in recent.steps if step.number > last]
        self._last_steps[recent.executor] = recent.steps[-1].number

    def _on_requests(self, message: Message) -> None:
        recent = _requests.try_decode(message.data)
        if recent is not None:
            self._requests.note_others(recent)


def describe(beat: Heartbeat, *, with_load: bool) -> dict[str, Any]:
    """Returns what a page shows of an instance."""
    fields: dict[str, Any] = {
        "service": beat.service,
        "instance": beat.instance,
        "ready": beat.ready,
        "draining": beat.draining,
    }
    if with_load:
        load = {name: float(f"{value:.4g}") if value % 1 else int(value) for name, value in beat.load.items()}
        fields |= {"model": beat.model, "term": beat.term, "step": beat.step, "load": load}
    return fields


def row(request: LoggedRequest) -> dict[str, Any]:
    """Returns what a page shows of a request: figures and times, no text."""
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "path": request.path,
        "model": request.model,
        "status": request.status,
        "began": round(request.began, 4),
        "first": round(request.first_token, 4),
        "ended": round(request.ended, 4),
        "prompt": request.prompt_tokens,
        "cached": request.cached_tokens,
        "tokens": request.tokens,
    }
