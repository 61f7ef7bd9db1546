"""What a tokenizer sends to clients: the answers of its small verbs, and errors."""

import structlog

from pagewire.services.tokenizer.decode import encoding_of, head_of
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusUnavailable, MessageTooLarge, PayloadTooLarge, RequestError
from pagewire.shared.frames import Reply, encode_frame, error_frame, error_headers

_log = structlog.get_logger()


class Answers:
    """Answers requests whose reply subject is a client inbox, in the encoding of the request."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def send(self, message: Message, reply: Reply) -> None:
        """The one reply to a request."""
        try:
            self._bus.publish(message.reply, encode_frame(reply, encoding_of(message.headers)))
        except MessageTooLarge:
            self.refuse(message, PayloadTooLarge("the answer does not fit into a message: send less"))
        except BusUnavailable:
            _log.warning("answer_lost")

    def refuse(self, message: Message, error: RequestError, request_id: str = "") -> str:
        """An error frame, and behind it the end of the stream if one was asked for.

        `request_id` is for requests that name none themselves; returns the one on the frame.
        """
        encoding = encoding_of(message.headers)
        head = head_of(message.data, encoding)
        frame = error_frame(error, head.request_id or request_id)
        try:
            self._bus.publish(message.reply, encode_frame(frame, encoding), headers=error_headers(error))
            if head.stream:
                self._bus.publish(message.reply, b"")
        except BusUnavailable:
            _log.warning("answer_lost", request_id=frame.request_id)
        return frame.request_id
