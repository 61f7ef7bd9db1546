"""The models that other tokenizers on the same broker serve: requests for them are passed on."""

from collections.abc import Callable

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import (
    BusUnavailable,
    MessageTooLarge,
    ModelNotFound,
    PayloadTooLarge,
    RequestError,
    Unavailable,
)
from pagewire.shared.messages.client import ModelInfo
from pagewire.shared.process.peers import Peers

ORIGINAL = "Pagewire-Subject"
"""Header of a request that is passed on: the subject to which the client has sent it."""


class OtherModels:
    """Knows them from the heartbeats of the other tokenizers.

    All tokenizers share one queue group, so that a request for any model reaches one of them, and one for no model gets
    an answer, too.
    """

    def __init__(self, bus: Bus, peers: Peers, own: str) -> None:
        """`own`: name of the model that this tokenizer serves."""
        self._bus = bus
        self._peers = peers
        self._own = own
        self._met: set[str] = set()
        """Tokens of the models that have been served since this process began."""

    def infos(self) -> list[ModelInfo]:
        """Returns descriptions of the models, one per name."""
        infos = {info.name: info for beat in self._peers.others("tokenizer") for info in beat.models}
        self._met.update(map(subjects.model_token, infos))
        return list(infos.values())

    def pass_on(self, message: Message, token: str) -> RequestError | None:
        """Passes a request for the model `token` on; returns why that is not possible."""
        infos = self.infos()
        info = next((info for info in infos if subjects.model_token(info.name) == token), None)
        if info is not None:
            token = subjects.model_token(info.parent or info.name)  # its tokenizers know the adapters of a model
        if info is not None or self._peers.has_other_version("tokenizer"):  # which may serve it: nobody here can tell
            verb = message.subject.split(".")[-2]
            headers = {**message.headers, ORIGINAL: message.subject}
            subject = f"{subjects.FORWARD}.{verb}.{token}"
            try:
                self._bus.publish(subject, message.data, reply=message.reply, headers=headers)
            except MessageTooLarge:
                return PayloadTooLarge("the request does not fit into a message with one more header: send less")
            except BusUnavailable:
                return Unavailable("the broker does not take the request now: send it again later", 1000)
            return None
        if token in self._met:
            return Unavailable(f"no tokenizer of {token} answers now: send the request again later", 1000)
        names = ", ".join([self._own, *(info.name for info in infos)])
        return ModelNotFound(f"no model {token} is served: choose one of {names}")


def passed_on(handler: Callable[[Message], None]) -> Callable[[Message], None]:
    """Returns a handler of requests that other tokenizers pass on: it gets them as their clients have sent them."""

    def handle(message: Message) -> None:
        headers = dict(message.headers)
        subject = headers.pop(ORIGINAL, message.subject)
        handler(Message(subject, message.data, message.reply, headers))

    return handle
