"""The directory of the models that are served."""

from contextlib import suppress

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import (
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
_SILENCE = "no tokenizer answers: is the stack running? `pagewire status` shows it"
_models = msgspec.json.Decoder(ModelList)


class Directory:
    """Asks the tokenizers which models they serve, and remembers the only one."""

    def __init__(self, bus: Bus, default: str = "", tenant: str = "") -> None:
        self.tenant = tenant
        """The tenant that sends the requests; empty for clients that are no tenants."""
        self.served = set[str]()
        """Models whose tokenizer was there: one without responders may be restarting."""
        self.adapted = set[str]()
        """Models for which adapters can be loaded: without responders, their executors may be restarting."""
        self._bus = bus
        self._default = default
        self._only = ""
        """The only model that was served at the last look; empty: there were several, or none has been taken."""

    def for_tenant(self, bus: Bus, tenant: str) -> "Directory":
        """Returns the directory of a tenant, whose requests go over `bus`.

        It shares both sets of models, and begins with the only one that is known here.
        """
        directory = Directory(bus, self._default, tenant)
        directory.served, directory.adapted, directory._only = self.served, self.adapted, self._only
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
        roots = {info.own_name for info in models}
        self.served |= roots | {info.name for info in models}
        self.adapted |= {info.name for info in models if info.adaptable}
        self._only = roots.pop() if len(roots) == 1 else ""
        return models

    async def resolve(self, model: str) -> str:
        """Returns the model of a request: `model`, else the client's default, else the only model that is served.

        Raises:
            InvalidRequest: no model is named and several are served.
            Unavailable: no tokenizer answers.
        """
        if not (model or self._default or self._only):
            names = dict.fromkeys(info.own_name for info in await self.models())
            if not self._only:
                raise InvalidRequest(f"name a model: this stack serves {', '.join(names)}")
        return model or self._default or self._only

    async def base_of(self, model: str) -> str:
        """Returns the own name of a model, or of the one that an adapter changes; a name that is not served stays."""
        try:
            return next((info.own_name for info in await self.models() if info.name == model), model)
        except Unavailable:
            return model

    async def serves_adapters(self, model: str) -> bool:
        """Returns whether adapters can be loaded for a model."""
        if model not in self.adapted:
            with suppress(Unavailable):
                await self.models()
        return model in self.adapted

    async def absence(self, model: str) -> RequestError:
        """Returns the error for a request for `model` without responders."""
        try:
            served = [info.name for info in await self.models()]
        except Unavailable as error:
            return error
        if model in served:
            return Unavailable(f"no tokenizer of {model} answers now: try again later")
        return ModelNotFound(f"no model {model} is served: choose one of {', '.join(served)}")
