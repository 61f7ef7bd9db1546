"""The replies of JetStream that the store reads."""

from datetime import datetime
from typing import Any

import msgspec

from pagewire.shared.bus.jetstream import Reply


class PutReply(Reply):
    """The acknowledgement of a stored message."""

    seq: int = 0


class StreamState(msgspec.Struct):
    """The contents of a stream."""

    subjects: dict[str, int] | None = None
    """Number of messages by subject."""
    bytes: int = 0
    """Size of all messages."""
    first_seq: int = 0
    """Number of the first message that is there."""
    last_seq: int = 0
    """Number of the last message that was stored."""
    deleted: list[int] | None = None
    """Numbers between these two whose messages are gone, if the request asks for them."""


class StreamInfo(Reply):
    """The reply to STREAM.INFO."""

    state: StreamState = msgspec.field(default_factory=StreamState)
    ts: datetime | None = None
    """Time of the reply."""
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings, with the server's defaults."""
    total: int = 0
    """Number of subjects that match the filter of the request, of which one reply has not all."""


class Position(msgspec.Struct):
    """A position of a consumer."""

    consumer_seq: int = 0
    """Number of deliveries so far."""
    stream_seq: int = 0
    """Number of the last message that was delivered."""


class ConsumerInfo(Reply):
    """The reply to CONSUMER.INFO."""

    delivered: Position = msgspec.field(default_factory=Position)
    num_ack_pending: int = 0
    """Number of messages that were delivered and have not been acknowledged."""
    paused: bool = False
    """Whether somebody has paused it."""


class RecordMessage(msgspec.Struct):
    """A message of a stream."""

    data: bytes = b""
    seq: int = 0
    """Its number in the stream."""


class GetReply(Reply):
    """The reply to STREAM.MSG.GET."""

    message: RecordMessage | None = None


put_reply = msgspec.json.Decoder(PutReply)
consumer_info = msgspec.json.Decoder(ConsumerInfo)
stream_info = msgspec.json.Decoder(StreamInfo)
get_reply = msgspec.json.Decoder(GetReply)
