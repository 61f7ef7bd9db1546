"""The directory of the models that are served."""

import asyncio
import time
from contextlib import suppress

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import (
    BusError,
    InvalidRequest,
    ModelNotFound,
    NoResponders,
    RequestError,
    RequestTimeout,
    Unavailable,
)
from pagewire.shared.messages.client import ModelInfo, ModelList

TIMEOUTS = (2.0, 5.0, 8.0)
"""Seconds that a tokenizer has for an answer, in each attempt: one that ends loses the question, and one on a busy
machine waits for a core."""
FRESH_FOR = 3.0
"""Seconds for which the models that were served answer which one is the only one."""
LIST_TIMEOUT = 1.0
"""Seconds that a request waits for the list, where an older one names the only model."""
_SILENCE = "no tokenizer answers: is the stack running? `pagewire status` shows it"
_models = msgspec.json.Decoder(ModelList)


class Directory:
    """Asks the tokenizers which models they serve, and knows the only one for requests that name none."""

    def __init__(self, bus: Bus, default: str = "", tenant: str = "") -> None:
        self.tenant = tenant
        """The tenant that sends the requests; empty for clients that are no tenants."""
        self.served = set[str]()
        """Subject tokens of models whose tokenizer was there: one without responders may be restarting."""
        self.adapted = set[str]()
        """Subject tokens of models for which adapters can be loaded: without responders, their executors may be
        restarting."""
        self._bus = bus
        self._default = default
        self._names: tuple[str, ...] = ()
        """Own names of the models that were served when they were last listed; empty: they never were."""
        self._listed_at = 0.0
        self._listing = asyncio.Lock()

    def for_tenant(self, bus: Bus, tenant: str) -> "Directory":
        """Returns the directory of a tenant, whose requests go over `bus`.

        It shares both sets of models, and begins with the names that are known here.
        """
        directory = Directory(bus, self._default, tenant)
        directory.served, directory.adapted = self.served, self.adapted
        directory._names, directory._listed_at = self._names, self._listed_at
        return directory

    def subject(self, request: str) -> str:
        """Returns the subject of a request, which depends on the tenant."""
        return subjects.for_tenant(request, self.tenant)

    async def ask(self, request: str, body: bytes) -> Message:
        """Returns the answer of a tokenizer to a question, which is sent again if none comes.

        Raises:
            NoResponders: no tokenizer takes it.
            Unavailable: no tokenizer answers.
        """
        for timeout in TIMEOUTS:
            with suppress(RequestTimeout):
                return await self._bus.request(self.subject(request), body, timeout=timeout)
        raise Unavailable(_SILENCE)

    async def models(self) -> list[ModelInfo]:
        """Returns the models that are served.

        Raises:
            Unavailable: no tokenizer answers.
        """
        try:
            reply = await self.ask(subjects.MODELS, b"{}")
        except NoResponders as error:
            raise Unavailable(_SILENCE) from error
        models = _models.decode(reply.data).models
        roots = dict.fromkeys(info.own_name for info in models)
        self.served |= {subjects.model_token(name) for name in roots.keys() | {info.name for info in models}}
        self.adapted |= {subjects.model_token(info.name) for info in models if info.adaptable}
        self._names, self._listed_at = tuple(roots), time.monotonic()
        return models

    async def resolve(self, model: str) -> str:
        """Returns the model of a request: `model`, else the client's default, else the only model that is served.

        Raises:
            InvalidRequest: no model is named and several are served.
            Unavailable: no tokenizer answers.
        """
        if name := model or self._default:
            return name
        if not self._names:
            await self.models()
        elif self._is_stale:
            async with self._listing:
                if self._is_stale:
                    with suppress(BusError, Unavailable, TimeoutError):  # the tokenizer or the broker may be restarting
                        async with asyncio.timeout(LIST_TIMEOUT):
                            await self.models()
                    self._listed_at = time.monotonic()
        if len(self._names) != 1:
            raise InvalidRequest(f"name a model: this stack serves {', '.join(self._names)}")
        return self._names[0]

    async def base_of(self, model: str) -> str:
        """Returns the own name of a model, or of the one that an adapter changes; a name that is not served stays."""
        try:
            return next((info.own_name for info in await self.models() if info.name == model), model)
        except Unavailable:
            return model

    async def serves_adapters(self, model: str) -> bool:
        """Returns whether adapters can be loaded for a model."""
        token = subjects.model_token(model)
        if token not in self.adapted:
            with suppress(Unavailable):
                await self.models()
        return token in self.adapted

    async def absence(self, model: str) -> RequestError:
        """Returns the error for a request for `model` without responders."""
        try:
            served = [info.name for info in await self.models()]
        except Unavailable as error:
            return error
        if model in served:
            return Unavailable(f"no tokenizer of {model} answers now: try again later")
        return ModelNotFound(f"no model {model} is served: choose one of {', '.join(served)}")

    @property
    def _is_stale(self) -> bool:
        return time.monotonic() - self._listed_at > FRESH_FOR
