"""What the other services ask of a detokenizer. One subscription, since the order of these messages matters."""

import msgspec
import structlog

from pagewire.services.detokenizer.inboxes import Inboxes
from pagewire.services.detokenizer.lookups import Lookups
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.streams import Streams
from pagewire.services.detokenizer.vocabulary import Vocabulary
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import REQUEST_ERRORS, BusError, Internal, WireVersionError
from pagewire.shared.messages import Decoder, Wire, encode
from pagewire.shared.messages.attach import Attach, Attached, AttachState
from pagewire.shared.messages.open import Abandon, Opened, OpenState, OpenStream

_log = structlog.get_logger()
_open = Decoder(OpenStream)
_attach = Decoder(Attach)
_abandon = Decoder(Abandon)


class Doorway:
    """Opens, attaches and abandons streams."""

    def __init__(
        self,
        bus: Bus,
        vocabulary: Vocabulary,
        inboxes: Inboxes,
        streams: Streams,
        registry: Registry,
        lookups: Lookups,
    ) -> None:
        self._inboxes = inboxes
        self._bus = bus
        self._vocabulary = vocabulary
        self._streams = streams
        self._registry = registry
        self._lookups = lookups
        self._verbs = {"open": self._on_open, "attach": self._on_attach, "abandon": self._on_abandon}

    def on_message(self, message: Message) -> None:
        """`pagewire.svc.detokenizer.<instance>.<verb>`."""
        verb = message.subject.rpartition(".")[2]
        try:
            self._verbs[verb](message)
        except (KeyError, WireVersionError, msgspec.DecodeError) as error:
            _log.error("message_unreadable", subject=message.subject, reason=str(error))

    def _on_open(self, message: Message) -> None:
        request = _open.decode(message.data)
        if not self._inboxes.accept(request.reply):
            return  # the tokenizer has refused it before
        if self._lookups.full:
            self._answer(message, Opened(OpenState.FULL))
        else:
            self._lookups.start(self._open(message, request))

    async def _open(self, message: Message, request: OpenStream) -> None:
        try:
            state = await self._streams.open(request, self._vocabulary, message.headers)
        except BusError as error:  # unanswered: the tokenizer tells its client that it cannot be served now
            _log.warning("stream_not_opened", request_id=request.request_id, reason=str(error))
        else:
            self._answer(message, Opened(state))

    def _on_attach(self, message: Message) -> None:
        attach = _attach.decode(message.data)
        stream = self._registry.find(attach.request_id)
        if stream is not None:
            self._answer(message, self._streams.attach(stream, attach))
        elif not self._lookups.full:  # unanswered, the item is delivered again
            self._lookups.start(self._attach_ended(message, attach))

    async def _attach_ended(self, message: Message, attach: Attach) -> None:
        try:
            stream = await self._registry.recall(attach.request_id)
        except BusError as error:  # unanswered, the item is delivered again
            _log.warning("record_not_read", request_id=attach.request_id, reason=str(error))
            return
        if stream is None:
            self._answer(message, Attached(AttachState.UNKNOWN, (), b""))
        else:
            self._answer(message, self._streams.attach(stream, attach))

    def _on_abandon(self, message: Message) -> None:
        abandon = _abandon.decode(message.data)
        stream = self._registry.find(abandon.request_id)
        if stream is not None:
            self._streams.abandon(stream, REQUEST_ERRORS.get(abandon.error, Internal)(abandon.message))
        if message.reply:
            self._bus.publish(message.reply, b"")

    def _answer(self, message: Message, answer: Wire) -> None:
        if message.reply:
            self._bus.publish(message.reply, encode(answer))
