"""The detokenizer: turns the tokens of steps into text, and is the only one that speaks to clients."""

import asyncio

import structlog
from tokenizers import Tokenizer

from pagewire.services.detokenizer.detokenize import Detokenize
from pagewire.services.detokenizer.doorway import Doorway
from pagewire.services.detokenizer.ending import Ending
from pagewire.services.detokenizer.finisher import Finisher
from pagewire.services.detokenizer.inboxes import Inboxes
from pagewire.services.detokenizer.lookups import Lookups
from pagewire.services.detokenizer.mailbox import Outbox
from pagewire.services.detokenizer.presence import Presence
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.steps import Steps
from pagewire.services.detokenizer.streams import Streams
from pagewire.services.detokenizer.verbs import Verbs
from pagewire.services.detokenizer.vocabulary import Vocabulary
from pagewire.services.tokenizer.load import load_tokenizer
from pagewire.shared import model_folder, subjects
from pagewire.shared.bus import Subscription
from pagewire.shared.context import Context
from pagewire.shared.messages.heartbeat import Heartbeat

KEEP_ALIVE = 0.8
"""Seconds between two signs of life to clients that wait for their first token: at least one a second is promised."""
CLOSE_WITHIN = 5.0
"""Seconds that the clients of open streams have to hear that the service stops."""
QUEUE = "detokenizer"
"""Queue group of what any instance can answer."""

_log = structlog.get_logger()


class Detokenizer:
    """Owns text, frames, keep-alives, deadlines and cancels of the requests that were opened here."""

    def __init__(self, context: Context) -> None:
        bus = context.bus
        self._context = context
        self._ready = False
        self._tasks = asyncio.TaskGroup()
        self._inboxes = Inboxes()
        self._lookups = Lookups(self._tasks)
        self._registry = Registry(bus.store)
        self._outbox = Outbox(bus)
        self._presence = Presence(bus)
        finisher = Finisher(bus, self._tasks)
        self._ending = Ending(bus, self._tasks, self._registry, self._outbox)
        self._streams = Streams(context.instance, self._registry, self._outbox, self._presence, finisher, self._ending)
        self._steps = Steps(bus, self._tasks, self._streams.apply)

    def heartbeat(self) -> Heartbeat:
        """Ready while it takes streams. `term` and `step` are those of the newest term that it reads."""
        reads = self._steps.positions
        term, step = max(reads.items(), default=(0, 0))
        load = {
            "streams": float(len(self._registry)),
            "frames": float(self._outbox.frames),
            "tokens": float(self._streams.tokens),
            "dropped_replies": float(self._inboxes.dropped),
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
            subscriptions = await self._listen(tokenizer)
            self._be_ready(True)
            _log.info("serving")
            try:
                await self._keep_alive()
            finally:
                self._be_ready(False)
                for subscription in subscriptions:
                    await subscription.unsubscribe()
                self._streams.close()
                await self._ending.settle(CLOSE_WITHIN)
                self._outbox.close()

    async def _listen(self, tokenizer: Tokenizer) -> list[Subscription]:
        """Subscribes to everything, steps first: no row of an attached sequence may be missed."""
        bus, instance = self._context.bus, self._context.instance
        model = subjects.model_token(model_folder.served_name(self._context.settings))
        streams, registry, lookups = self._streams, self._registry, self._lookups
        doorway = Doorway(bus, Vocabulary(tokenizer), self._inboxes, streams, registry, lookups)
        verbs = Verbs(bus, self._inboxes, streams, registry, lookups)
        detokenize = Detokenize(bus, tokenizer, self._inboxes, lookups)
        return [
            await bus.subscribe(f"{subjects.STEPS}.*", self._steps.on_step),
            await bus.subscribe(f"{subjects.HEARTBEAT}.executor.*", self._steps.on_heartbeat),
            await self._presence.listen(),
            await bus.subscribe(f"{subjects.DETOKENIZER}.{instance}.*", doorway.on_message),
            await bus.subscribe(f"{subjects.CANCEL}.{instance}.*", verbs.on_cancel),
            await bus.subscribe(f"{subjects.CANCEL}.*", verbs.on_cancel_anywhere),
            await bus.subscribe(f"{subjects.RESUME}.{instance}.*", verbs.on_resume),
            await bus.subscribe(f"{subjects.DETOKENIZE}.{model}", detokenize.on_request, queue=QUEUE),
        ]

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE)
            self._streams.look_for_readers()
            self._streams.keep_alive()

    def _be_ready(self, ready: bool) -> None:
        self._ready = ready
        self._context.announce()
