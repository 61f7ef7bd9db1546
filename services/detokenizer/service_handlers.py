"""Opens, attaches and aborts streams for tokenizers and schedulers."""

import structlog

from pagewire.services.detokenizer.adopter import Adopter
from pagewire.services.detokenizer.bounded_tasks import BoundedTaskGroup
from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.streams import Streams
from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.errors import REQUEST_ERRORS, BusError, Internal
from pagewire.shared.messages import Decoder, Wire, encode, unpack
from pagewire.shared.messages.attach import Attach, Attached, AttachState
from pagewire.shared.messages.open import AbortStream, Opened, OpenState, OpenStream, StoredWork

_log = structlog.get_logger()
_open = Decoder(OpenStream)
_attach = Decoder(Attach)
_abort = Decoder(AbortStream)
_stored = Decoder(StoredWork)


class ServiceHandlers:
    """Opens, attaches and aborts streams for tokenizers and schedulers."""

    def __init__(
        self,
        bus: Bus,
        vocabulary: Vocabulary,
        streams: Streams,
        registry: Registry,
        replier: Replier,
        tasks: BoundedTaskGroup,
        adopter: Adopter,
    ) -> None:
        self._bus = bus
        self._adopter = adopter
        self._vocabulary = vocabulary
        self._streams = streams
        self._registry = registry
        self._replier = replier
        self._tasks = tasks
        self._verbs = {
            "open": self._on_open,
            "stored": self._on_stored,
            "attach": self._on_attach,
            "abort": self._on_abort,
            "ping": self._on_ping,
        }

    async def subscribe(self, instance: str) -> list[Subscription]:
        """Subscribes to all verbs at once, since the order of these messages matters."""
        return [await self._bus.subscribe(f"{subjects.DETOKENIZER}.{instance}.*", self._on_message)]

    def _on_message(self, message: Message) -> None:
        """`pagewire.svc.detokenizer.<instance>.<verb>`."""
        handler = self._verbs.get(message.subject.rpartition(".")[2])
        if handler is None:
            _log.error("message_unreadable", subject=message.subject, reason="unknown verb")
        else:
            handler(message)

    def _on_open(self, message: Message) -> None:
        request = _open.read(message)
        if request is None:
            return
        tenant, _ = subjects.owner_and_text(request.request_id)
        if not self._replier.accepts(request.reply, tenant):  # the tokenizer has refused such a reply before
            return
        if not self._tasks.start(self._open(message, request)):
            self._answer(message, Opened(OpenState.FULL))

    async def _open(self, message: Message, request: OpenStream) -> None:
        try:
            state = await self._streams.open(request, self._vocabulary, message.headers)
        except BusError as error:
            _log.warning("stream_not_opened", request_id=request.request_id, reason=str(error))
            state = OpenState.UNAVAILABLE
        self._answer(message, Opened(state))

    def _on_stored(self, message: Message) -> None:
        stored = _stored.read(message)
        if stored is None:
            return
        stream = self._registry.find(stored.request_id)
        if stream is not None:
            self._streams.note_stored(stream, stored.number)
        if message.reply:
            self._bus.publish(message.reply, b"")

    def _on_attach(self, message: Message) -> None:
        attach = _attach.read(message)
        if attach is None:
            return
        stream = self._registry.find(attach.request_id)
        if attach.opening:
            self._tasks.start(self._adopt(message, attach))  # without an answer, the scheduler asks again
        elif stream is not None:
            self._answer(message, self._streams.attach(stream, attach))
        else:
            self._tasks.start(self._attach_ended(message, attach))  # without an answer, the scheduler asks again

    async def _adopt(self, message: Message, attach: Attach) -> None:
        """Adopts the stream of another detokenizer, unless it is here, and attaches it."""
        opening = _open.try_decode(attach.opening)
        if opening is None:
            _log.error("opening_unreadable", request_id=attach.request_id)
            return
        try:
            stream = await self._streams.adopt(opening, self._vocabulary, message.headers, unpack(attach.sent))
        except BusError as error:
            _log.warning("stream_not_adopted", request_id=attach.request_id, reason=str(error))
            return
        if stream.digest != opening.digest:  # the id has been given to another request since
            self._answer(message, Attached(AttachState.ENDED, (), b""))
            self._streams.end_work(attach.ack)
            return
        answer = self._streams.attach(stream, attach)
        if answer.state == AttachState.OPEN:
            self._adopter.announce([stream])
        self._answer(message, answer)

    async def _attach_ended(self, message: Message, attach: Attach) -> None:
        try:
            stream = await self._registry.recall(attach.request_id)
        except BusError as error:  # without an answer, the scheduler asks again
            _log.warning("record_not_read", request_id=attach.request_id, reason=str(error))
            return
        if stream is None:
            self._answer(message, Attached(AttachState.UNKNOWN, (), b""))
        else:
            self._answer(message, self._streams.attach(stream, attach))

    def _on_abort(self, message: Message) -> None:
        abort = _abort.read(message)
        if abort is None:
            return
        stream = self._registry.find(abort.request_id)
        if stream is not None and not (abort.unless_accepted and stream.accepted):
            self._streams.abort(stream, REQUEST_ERRORS.get(abort.error, Internal)(abort.message))
        if message.reply:
            self._bus.publish(message.reply, b"")

    def _on_ping(self, message: Message) -> None:
        """Shows that this instance is there."""
        if message.reply:
            self._bus.publish(message.reply, b"")

    def _answer(self, message: Message, answer: Wire) -> None:
        if message.reply:
            self._bus.publish(message.reply, encode(answer))
