"""The requests that load and remove adapters. Executors share them."""

import asyncio
from functools import partial

import structlog

from pagewire.services.executor.adapters.registrar import Registrar
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.client_protocol.client_requests import decode_request, encoding_of
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.errors import BusError, Internal, Overloaded, RequestError, Unavailable
from pagewire.shared.messages.adapters import LoadAdapterRequest, UnloadAdapterRequest

MAX_WAITING = 64
"""Requests that wait for the one that is served; others are refused."""
RETRY_AFTER_MS = 1000
QUEUE = "executor"
"""Queue group of all executors: each request goes to one of them."""
_log = structlog.get_logger()


class AdapterRequests:
    """Queue of requests to load or remove adapters, served one at a time."""

    def __init__(self, bus: Bus, model: str, registrar: Registrar) -> None:
        """`model` is the model's token in subjects."""
        self._bus = bus
        self._model = model
        self._registrar = registrar
        self._replier = Replier(bus)
        self._waiting: asyncio.Queue[tuple[str, Message]] = asyncio.Queue(MAX_WAITING)

    async def subscribe(self) -> list[Subscription]:
        """Subscribes to the requests for the model."""
        return [
            await self._bus.subscribe(
                f"{subjects.ADAPTERS}.{verb}.{self._model}", partial(self._take, verb), queue=QUEUE
            )
            for verb in ("load", "unload")
        ]

    async def run(self) -> None:
        """Serves until cancelled."""
        while True:
            verb, message = await self._waiting.get()
            try:
                await self._serve(verb, message)
            except RequestError as error:
                self._replier.refuse(message, error)
            except BusError as error:
                _log.warning("adapter_not_stored", reason=str(error))
                lost = Unavailable("the broker does not store the adapter now: send the request again", RETRY_AFTER_MS)
                self._replier.refuse(message, lost)
            except Exception as error:  # noqa: BLE001 - steps go on, whatever was wrong with these files
                _log.error("adapter_change_failed", verb=verb, exc_info=error)
                self._replier.refuse(message, Internal(f"the executor could not {verb} the adapter: its log says why"))

    def _take(self, verb: str, message: Message) -> None:
        if not self._replier.accepts(message.reply):
            return
        try:
            self._waiting.put_nowait((verb, message))
        except asyncio.QueueFull:
            busy = Overloaded("too many adapters are being loaded: send the request again later", RETRY_AFTER_MS)
            self._replier.refuse(message, busy)

    async def _serve(self, verb: str, message: Message) -> None:
        encoding = encoding_of(message.headers)
        if verb == "load":
            reply = await self._registrar.load(decode_request(message.data, LoadAdapterRequest, encoding))
        else:
            reply = await self._registrar.unload(decode_request(message.data, UnloadAdapterRequest, encoding))
        self._replier.send(message, reply)
