"""The detokenizer: turns the tokens of steps into text, and sends clients everything but the tokenizer's refusals."""

import asyncio
from collections.abc import Iterator

import structlog
from tokenizers import Tokenizer

from pagewire.services.detokenizer.abort_notifier import AbortNotifier
from pagewire.services.detokenizer.adopter import Adopter
from pagewire.services.detokenizer.bounded_tasks import BoundedTaskGroup
from pagewire.services.detokenizer.client_handlers import ClientHandlers
from pagewire.services.detokenizer.fence import RENEW_EVERY, Fence, Frozen, fenced
from pagewire.services.detokenizer.finalizer import Finalizer
from pagewire.services.detokenizer.frames.disconnect_monitor import DisconnectMonitor
from pagewire.services.detokenizer.frames.frame_sender import FrameSender
from pagewire.services.detokenizer.leaving_clients import LeavingClients
from pagewire.services.detokenizer.metrics import StreamMetrics
from pagewire.services.detokenizer.recent_requests import RecentRequestsResponder
from pagewire.services.detokenizer.record_writer import RecordWriter
from pagewire.services.detokenizer.service_handlers import ServiceHandlers
from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.step_feed import StepFeed
from pagewire.services.detokenizer.streams import Streams
from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from pagewire.shared import subjects
from pagewire.shared.bus import Subscription
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.messages.heartbeat import AWAITS_SUCCESSOR, UNSENT, Heartbeat
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.models import model_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.polling import poll

KEEP_ALIVE_INTERVAL = 0.8
"""Seconds between two keep-alives to clients that wait for their first token: at least one a second is promised."""
CLOSE_TIMEOUT = 5.0
"""Seconds in which streams that are over are ended before the service stops."""

_log = structlog.get_logger()


class Detokenizer:
    """One detokenizer process."""

    def __init__(self, context: Context) -> None:
        self._fence = Fence()
        self._bus = bus = fenced(context.bus, self._fence)
        self._context = context
        self._tasks = asyncio.TaskGroup()
        self._replier = Replier(bus)
        self._registry = Registry(bus.store)
        self._sender = FrameSender(bus)
        self._monitor = DisconnectMonitor(bus)
        self._records = RecordWriter(bus, self._tasks)
        self._metrics = metrics = StreamMetrics()
        self._finalizer = Finalizer(bus, self._tasks, self._registry, self._sender, self._records, metrics)
        notifier = AbortNotifier(bus, self._tasks)
        self._steps = StepFeed(bus, self._tasks, self._apply)
        self._peers = Peers(bus, context.model)
        self._streams = Streams(
            context.instance,
            self._registry,
            self._sender,
            notifier,
            self._finalizer,
            self._steps,
            metrics,
            self._peers,
            bus.store.now,
        )
        self._leaving = LeavingClients(self._registry, self._monitor, self._streams)
        self._sender.abort = self._streams.abort
        self._awaits_successor = False
        self._adopter = Adopter(bus, self._peers, context.instance, self._registry, self._streams)

    def heartbeat(self) -> Heartbeat:
        """Returns the state; ready while streams can be opened. `term` and `step` are of the newest term read."""
        reads = self._steps.positions
        term, step = max(reads.items(), default=(0, 0))
        load: dict[str, float] = {
            "streams": len(self._registry),
            "frames": self._sender.frames,
            UNSENT: self._sender.waiting,
            "tokens": self._metrics.tokens,
            "dropped_replies": self._replier.dropped,
            "records_failed": self._records.failed,
            "records_lost": self._records.lost,
            "records_waiting": self._records.waiting,
            AWAITS_SUCCESSOR: float(self._awaits_successor),
        }
        ready = self._adopter.ready and not self._fence.closed
        return Heartbeat("detokenizer", self._context.instance, ready, term, 0, step, load, reads)

    def metrics(self) -> Iterator[Sample]:
        """Yields the figures of streams, steps and records."""
        yield table.STREAMS.sample(len(self._registry))
        yield from self._metrics.samples()
        yield from self._replier.metrics()
        yield table.GAPS.sample(self._steps.gaps)
        yield table.REPAIRS.sample(self._steps.repairs)
        yield table.RECORDS_FAILED.sample(self._records.failed)
        yield table.RECORDS_LOST.sample(self._records.lost)
        yield table.RECORDS_WAITING.sample(self._records.waiting)

    async def run(self) -> None:
        """Serves until cancelled. Another detokenizer adopts the streams that are still open then.

        Raises:
            ConfigurationError: the model folder cannot be used.
            Frozen: the process stood still for so long that others go on with its streams.
        """
        folder = model_folder.tokenizer_folder(self._context.settings)
        adoptions = await self._adopter.listen()  # early: silence counts from here on
        tokenizer = (await asyncio.to_thread(load_tokenizer, folder)).backend
        try:
            await self._serve(tokenizer, adoptions)
        except* Frozen:
            raise Frozen from None

    async def _serve(self, tokenizer: Tokenizer, adoptions: list[Subscription]) -> None:
        vocabulary = Vocabulary(tokenizer)
        names = list(map(subjects.model_token, model_folder.served_names(self._context.settings)))
        async with self._tasks:
            renewing = self._tasks.create_task(self._renew_fence())
            subscriptions = [*adoptions, *await self._subscribe(tokenizer, vocabulary, names)]
            self._set_ready(True)
            adopting = self._tasks.create_task(self._adopter.run(names[0], vocabulary))
            _log.info("serving")
            try:
                await self._keep_alive()
            finally:
                self._set_ready(False)
                adopting.cancel()
                for subscription in subscriptions:
                    await subscription.unsubscribe()
                await self._finalizer.drain(CLOSE_TIMEOUT)
                self._sender.close()
                self._streams.close()
                renewing.cancel()

    async def drain(self) -> None:
        """Serves on until other detokenizers have adopted all streams. If a successor is to come, this one takes new
        streams until another one is ready."""
        self._adopter.draining = True
        self._awaits_successor = self._context.follows() is Drain.SUCCESSOR
        self._context.announce()
        if self._awaits_successor:
            await poll(lambda: self._adopter.has_peer)
            self._awaits_successor = False
            self._context.announce()
        await self._registry.wait_empty()
        await self._finalizer.drain(CLOSE_TIMEOUT)
        await self._bus.flush()

    async def _subscribe(self, tokenizer: Tokenizer, vocabulary: Vocabulary, names: list[str]) -> list[Subscription]:
        """Subscribes to steps first, so that no row of an attached sequence is missed, and then to all else."""
        bus, instance, tasks = self._bus, self._context.instance, BoundedTaskGroup(self._tasks)
        common = self._streams, self._registry, self._replier, tasks, self._adopter
        self._sender.spell = vocabulary.spell
        recent = RecentRequestsResponder(bus, self._registry, model_folder.served_names(self._context.settings)[0])
        return [
            *await self._steps.subscribe(),
            await self._monitor.listen(),
            await bus.subscribe(subjects.RECENT_REQUESTS, recent.answer),
            await self._peers.listen("scheduler", on_ended=self._streams.on_scheduler_ended),
            *await ServiceHandlers(bus, vocabulary, *common).subscribe(instance),
            *await ClientHandlers(bus, tokenizer, *common, self._leaving).subscribe(instance, names),
        ]

    def _apply(self, output: StepOutput) -> None:
        self._streams.apply(output)

    async def _renew_fence(self) -> None:
        while True:
            self._fence.renew()
            await asyncio.sleep(RENEW_EVERY)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_INTERVAL)
            self._leaving.check()
            self._streams.keep_alive()

    def _set_ready(self, ready: bool) -> None:
        self._adopter.ready = ready
        self._context.announce()
