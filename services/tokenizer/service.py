"""The tokenizer service: takes requests from clients, refuses what cannot be served, hands the rest over."""

import asyncio

import structlog

from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.inflight import InFlight
from pagewire.services.tokenizer.model import Model
from pagewire.services.tokenizer.replicas import Replicas
from pagewire.services.tokenizer.verbs import Verbs
from pagewire.shared import subjects
from pagewire.shared.context import Context
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.peers import Peers

QUEUE = "tokenizer"
"""Queue group: each request goes to one tokenizer."""
DRAIN_WITHIN = 5.0
"""Seconds that requests in progress have to be handed over when the service stops."""

_log = structlog.get_logger()


class Tokenizer:
    """One tokenizer process. Why a request is refused is the only thing that it ever tells a generating client."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._in_flight = InFlight()
        self._peers = Peers(context.bus, heard=self._on_peer)
        self._verbs: Verbs | None = None
        """Set while requests are taken."""
        self._announced = False
        """Whether the last heartbeat said that it is ready."""

    def heartbeat(self) -> Heartbeat:
        """Ready while its model is loaded and a detokenizer is there to hand requests to."""
        load = {"in_flight": float(len(self._in_flight))}
        if self._verbs is not None:
            load |= {"requests": float(self._verbs.requests), "dropped": float(self._verbs.dropped)}
        self._announced = self._ready()
        return Heartbeat("tokenizer", self._context.instance, self._announced, term=0, plan=0, step=0, load=load)

    async def run(self) -> None:
        """Serves until cancelled.

        Raises:
            ConfigurationError: the model folder or a setting cannot be used.
        """
        model = await asyncio.to_thread(Model.load, self._context.settings)
        async with ChatRenderer(model.chat) as renderer:
            await self._serve(model, renderer)

    async def _serve(self, model: Model, renderer: ChatRenderer) -> None:
        bus = self._context.bus
        replicas = Replicas(bus, model.token)
        verbs = Verbs(self._context, self._peers, replicas, model, renderer, self._in_flight)
        await self._peers.listen("detokenizer")
        await replicas.listen()
        subscriptions = [
            await bus.subscribe(f"{subjects.GENERATE}.*", verbs.on_generate, queue=QUEUE),
            await bus.subscribe(f"{subjects.TOKENIZE}.*", verbs.on_tokenize, queue=QUEUE),
            await bus.subscribe(subjects.MODELS, verbs.on_models, queue=QUEUE),
        ]
        self._verbs = verbs
        self._context.announce()
        _log.info("serving", model=model.name, revision=model.revision, max_model_len=model.max_model_len)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._verbs = None
            self._context.announce()
            for subscription in subscriptions:
                await subscription.unsubscribe()
            await self._in_flight.drain(DRAIN_WITHIN)
            model.encoder.close()

    def _ready(self) -> bool:
        return self._verbs is not None and any(beat.ready for beat in self._peers.alive("detokenizer"))

    def _on_peer(self) -> None:
        """A detokenizer that comes or goes changes what this one can do: that is said without waiting for a beat."""
        if self._ready() != self._announced:
            self._context.announce()
