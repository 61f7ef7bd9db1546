"""Which models are served, and where requests for them go."""

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import (
    InvalidRequest,
    ModelNotFound,
    NoResponders,
    RequestError,
    RequestTimeout,
    Unavailable,
)
from pagewire.shared.messages.client import ModelInfo, ModelList

_ANSWER_WITHIN = 2.0
_models = msgspec.json.Decoder(ModelList)


class Directory:
    """Asks the tokenizers which models they serve; remembers the one that a request without a name means."""

    def __init__(self, bus: Bus, default: str = "") -> None:
        self._bus = bus
        self._default = default
        self.answered: set[str] = set()
        """The models of which a request has been answered here: when nobody listens, one that restarts will."""

    async def models(self) -> list[ModelInfo]:
        """The models that are served.

        Raises:
            Unavailable: nobody answers.
        """
        try:
            reply = await self._bus.request(subjects.MODELS, b"{}", timeout=_ANSWER_WITHIN)
        except (NoResponders, RequestTimeout) as error:
            raise Unavailable("no tokenizer answers: is the stack running? `pagewire status` shows it") from error
        return _models.decode(reply.data).models

    async def resolve(self, model: str) -> str:
        """The name that a request means: its own, else the client's, else the only model that is served.

        Raises:
            InvalidRequest: it names none and there are several.
            Unavailable: nobody answers.
        """
        if not (model or self._default):
            served = await self.models()
            if len(served) != 1:
                names = ", ".join(info.name for info in served)
                raise InvalidRequest(f"name a model: this stack serves {names}")
            self._default = served[0].name
        return model or self._default

    async def absence(self, model: str) -> RequestError:
        """Why nobody answers for `model`: it is not served, or nobody is there at all."""
        try:
            served = [info.name for info in await self.models()]
        except Unavailable as error:
            return error
        if model in served:
            return Unavailable(f"no tokenizer of {model} answers at this moment")
        return ModelNotFound(f"no model {model} is served here; there is {', '.join(served)}")
