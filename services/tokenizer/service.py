"""The tokenizer: takes requests from clients, refuses those that cannot be served, and dispatches the others."""

import asyncio
import os
import shutil
from collections.abc import Iterator

import msgspec
import structlog

from pagewire.services.tokenizer.adapters import ServedAdapters
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.dispatch.admission import Admission
from pagewire.services.tokenizer.dispatch.replica_router import ReplicaRouter
from pagewire.services.tokenizer.dispatch.store_monitor import StoreMonitor
from pagewire.services.tokenizer.handlers import Handlers
from pagewire.services.tokenizer.request_tasks import RequestTasks
from pagewire.services.tokenizer.served_model import Model
from pagewire.shared.messages.heartbeat import STORE_REFUSES, Heartbeat
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.process.linux_process import BROKER_FOLDER
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.polling import poll
from pagewire.shared.settings.config import seconds

DRAIN_TIMEOUT = 5.0
"""Seconds in which the requests in progress are dispatched when the service stops."""

_log = structlog.get_logger()


class Tokenizer:
    """One tokenizer process. It answers a generate request only to refuse it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tasks = RequestTasks()
        self._peers = Peers(context.bus, context.model)
        self._monitor = StoreMonitor(context.bus.store, on_change=self._announce_change)
        self._adapters = ServedAdapters(possible=True)
        self._handlers: Handlers | None = None
        """Subscriptions; None while no requests are taken."""
        self._announced = False
        """Whether the last heartbeat was ready."""

    def heartbeat(self) -> Heartbeat:
        """Returns the state: ready while a detokenizer can open streams and the store takes work."""
        load: dict[str, float] = {"in_flight": len(self._tasks), STORE_REFUSES: float(bool(self._monitor.refusal))}
        if self._handlers is not None:
            load |= self._handlers.load
        self._announced = self._ready()
        beat = Heartbeat(
            "tokenizer",
            self._context.instance,
            self._announced,
            term=0,
            plan=0,
            step=0,
            load=load,
            problem=_problem(self._monitor.refusal),
        )
        return beat if self._handlers is None else msgspec.structs.replace(beat, models=self._handlers.infos)

    def metrics(self) -> Iterator[Sample]:
        """Yields the metrics of requests and of the store."""
        yield table.IN_FLIGHT.sample(len(self._tasks))
        yield table.STORE_REFUSES.sample(float(bool(self._monitor.refusal)))
        if folder := os.environ.get(BROKER_FOLDER):
            yield table.DISK_LEFT.sample(shutil.disk_usage(folder).free)
        if self._handlers is not None:
            yield from self._handlers.metrics()

    async def drain(self) -> None:
        """Leaves the queue group once another tokenizer is ready, and dispatches the requests that have arrived.

        If the whole stack stops, no other one comes: the tokenizer refuses new requests until it is ended.
        """
        if self._handlers is None:
            return
        match self._context.follows():
            case Drain.STOP:
                self._handlers.stop()
                await asyncio.Event().wait()
            case Drain.SUCCESSOR:
                await self._successor()
        await self._handlers.unsubscribe()
        await self._tasks.wait()

    async def run(self) -> None:
        """Serves until cancelled.

        Raises:
            ConfigurationError: the model folder or a setting cannot be used.
        """
        async with ChatRenderer() as renderer:
            model = await asyncio.to_thread(Model.load, self._context.settings)
            renderer.use(model.chat)
            await self._serve(model.with_rules(await renderer.rules()), renderer)

    async def _serve(self, model: Model, renderer: ChatRenderer) -> None:
        bus, max_wait = self._context.bus, self._context.settings.max_queue_wait
        self._adapters = model.adapters
        router = ReplicaRouter(bus, self._peers, model.token)
        limit = None if max_wait is None else seconds(max_wait)
        admission = Admission(bus, model.token, self._peers, self._tasks.__len__, limit)
        handlers = Handlers(self._context, self._peers, router, self._monitor, admission, model, renderer, self._tasks)
        await self._peers.listen("detokenizer", self._announce_change)
        await self._peers.listen("tokenizer", self._announce_change)
        await router.listen()
        await admission.listen()
        await handlers.subscribe()
        self._handlers = handlers
        self._context.announce()
        _log.info("serving", model=model.name, revision=model.revision, max_model_len=model.max_model_len)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._monitor.run())
                if not model.adapters.known:
                    tasks.create_task(model.adapters.follow(bus, model.token, self._context.announce))
        finally:
            self._handlers = None
            self._context.announce()
            await handlers.unsubscribe()
            await self._tasks.drain(DRAIN_TIMEOUT)
            model.encoder.close()
            model.grammars.close()

    def _ready(self) -> bool:
        opens = any(beat.ready for beat in self._peers.alive("detokenizer"))
        return self._handlers is not None and self._adapters.known and opens and not self._monitor.refusal

    async def _successor(self) -> None:
        """Waits until another tokenizer is ready."""
        own = self._context.instance
        await poll(lambda: any(beat.ready and beat.instance != own for beat in self._peers.alive("tokenizer")))

    def _announce_change(self) -> None:
        """Sends a heartbeat at once if a detokenizer or the store has changed whether this tokenizer is ready."""
        if self._ready() != self._announced:
            self._context.announce()


def _problem(refusal: str) -> str:
    """Returns the `Heartbeat.problem` of a store that takes no work for the reason `refusal`; empty without one."""
    if not refusal:
        return ""
    return f"the store takes no work ({refusal}): look at the disk and the limits of the NATS server"
