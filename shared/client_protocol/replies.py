"""Replies to the requests of clients, and only to inboxes of theirs."""

from collections import Counter
from collections.abc import Iterator

import structlog

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.client_protocol.client_requests import RequestHead, decode_head, encoding_of
from pagewire.shared.client_protocol.frame_encoding import Reply, encode_frame, error_frame, error_headers
from pagewire.shared.errors import BusUnavailable, MessageTooLarge, PayloadTooLarge, RequestError
from pagewire.shared.messages.client_headers import REFUSED
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample

_log = structlog.get_logger()


class Replier:
    """Replies to client inboxes, each time in the encoding of the request.

    Attributes:
        dropped: requests so far whose reply subject was no inbox of their client.
        refused: requests so far that got an error instead of a stream or an answer, by the kind of the error.
    """

    def __init__(self, bus: Bus) -> None:
        self.dropped = 0
        self.refused: Counter[str] = Counter()
        self._bus = bus

    def metrics(self) -> Iterator[Sample]:
        """Yields the metrics of the requests that were not served."""
        yield table.REPLIES_DROPPED.sample(self.dropped)
        yield from table.REFUSED.samples(self.refused.items())

    def accepts(self, reply: str, tenant: str = "") -> bool:
        """Returns whether `reply` is an inbox of the tenant, and counts the request as dropped if it is not.

        Every handler checks this first: with another reply subject, a client could make a service publish to a service,
        or to another tenant.
        """
        if subjects.owner_of(reply) == tenant:
            return True
        self.dropped += 1
        return False

    def send(self, message: Message, reply: Reply) -> None:
        """Sends the only reply to a request."""
        try:
            self._bus.publish(message.reply, encode_frame(reply, encoding_of(message.headers)))
        except MessageTooLarge:
            self.refuse(message, PayloadTooLarge("the answer does not fit into a message: send less"))
        except BusUnavailable:
            _log.warning("answer_lost")

    def refuse(
        self, message: Message, error: RequestError, request_id: str = "", head: RequestHead | None = None
    ) -> str:
        """Sends an error frame, and the empty message that ends a stream if the request asked for a stream.

        Args:
            message: the request.
            error: the error.
            request_id: id on the frame if the request has no id of its own.
            head: the decoded head of the request; None: it is decoded here.

        Returns:
            The request id on the frame.
        """
        encoding = encoding_of(message.headers)
        head = head or decode_head(message.data, encoding)
        self.refused[error.kind] += 1
        frame = error_frame(error, head.request_id or request_id)
        try:
            self._bus.publish(
                message.reply, encode_frame(frame, encoding), headers=error_headers(error) | {REFUSED: "1"}
            )
            if head.stream:
                self._bus.publish(message.reply, b"")
        except BusUnavailable:
            _log.warning("answer_lost", request_id=frame.request_id)
        return frame.request_id
