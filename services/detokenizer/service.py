"""The detokenizer: turns the tokens of steps into text, and sends clients everything but refusals."""

import asyncio

import structlog
from tokenizers import Tokenizer

from pagewire.services.detokenizer.finalizer import AbortNotifier, Finalizer
from pagewire.services.detokenizer.frame_sender import DisconnectMonitor, FrameSender
from pagewire.services.detokenizer.handlers import BoundedTaskGroup, ClientHandlers, ServiceHandlers
from pagewire.services.detokenizer.record_writer import RecordWriter
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.step_feed import StepFeed
from pagewire.services.detokenizer.streams import Streams
from pagewire.shared import model_folder, subjects
from pagewire.shared.bus import Subscription
from pagewire.shared.context import Context
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.peers import Peers
from pagewire.shared.replies import Replier
from pagewire.shared.tokenizer import load_tokenizer
from pagewire.shared.vocabulary import Vocabulary

KEEP_ALIVE_INTERVAL = 0.8
"""Seconds between two keep-alives to clients that wait for their first token: at least one a second is promised."""
CLOSE_TIMEOUT = 5.0
"""Seconds in which the clients of open streams are told that the service stops."""

_log = structlog.get_logger()


class Detokenizer:
    """Owns text, frames, keep-alives, deadlines and cancels of the requests that were opened here."""

    def __init__(self, context: Context) -> None:
        bus = context.bus
        self._context = context
        self._ready = False
        self._tasks = asyncio.TaskGroup()
        self._replier = Replier(bus)
        self._registry = Registry(bus.store)
        self._sender = FrameSender(bus)
        self._monitor = DisconnectMonitor(bus)
        self._records = RecordWriter(bus, self._tasks)
        self._finalizer = Finalizer(bus, self._tasks, self._registry, self._sender, self._records)
        notifier = AbortNotifier(bus, self._tasks)
        self._streams = Streams(
            context.instance, self._registry, self._sender, self._monitor, notifier, self._finalizer
        )
        self._schedulers = Peers(bus, on_ended=self._streams.on_scheduler_ended)
        self._steps = StepFeed(bus, self._tasks, self._streams.apply)

    def heartbeat(self) -> Heartbeat:
        """Returns the state; ready while streams can be opened. `term` and `step` are of the newest term read."""
        reads = self._steps.positions
        term, step = max(reads.items(), default=(0, 0))
        load: dict[str, float] = {
            "streams": len(self._registry),
            "frames": self._sender.frames,
            "tokens": self._streams.tokens,
            "dropped_replies": self._replier.dropped,
            "records_failed": self._records.failed,
            "records_lost": self._records.lost,
            "records_waiting": self._records.waiting,
        }
        return Heartbeat("detokenizer", self._context.instance, self._ready, term, 0, step, load, reads)

    async def run(self) -> None:
        """Serves until cancelled; then open streams end with an error.

        Raises:
            ConfigurationError: the model folder cannot be used.
        """
        folder = model_folder.resolve(self._context.settings.model)
        tokenizer = (await asyncio.to_thread(load_tokenizer, folder)).backend_tokenizer
        async with self._tasks:
            subscriptions = await self._subscribe(tokenizer)
            self._set_ready(True)
            _log.info("serving")
            try:
                await self._keep_alive()
            finally:
                self._set_ready(False)
                for subscription in subscriptions:
                    await subscription.unsubscribe()
                self._streams.abort_all()
                await self._finalizer.drain(CLOSE_TIMEOUT)
                self._sender.close()

    async def _subscribe(self, tokenizer: Tokenizer) -> list[Subscription]:
        """Subscribes to everything, to steps first: no row of an attached sequence may be missed."""
        bus, instance, tasks = self._context.bus, self._context.instance, BoundedTaskGroup(self._tasks)
        common = self._streams, self._registry, self._replier, tasks
        vocabulary = Vocabulary(tokenizer)
        self._sender.spell = vocabulary.spell
        model = subjects.model_token(model_folder.served_name(self._context.settings))
        return [
            *await self._steps.subscribe(),
            await self._monitor.listen(),
            await self._schedulers.listen("scheduler"),
            *await ServiceHandlers(bus, vocabulary, *common).subscribe(instance),
            *await ClientHandlers(bus, tokenizer, *common).subscribe(instance, model),
        ]

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_INTERVAL)
            self._streams.check_disconnects()
            self._streams.keep_alive()

    def _set_ready(self, ready: bool) -> None:
        self._ready = ready
        self._context.announce()
