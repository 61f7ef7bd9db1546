"""Decodes the frames of the pipeline and turns error frames into exceptions."""

import msgspec

from pagewire.shared.bus import Bus
from pagewire.shared.errors import REQUEST_ERRORS, Internal, RequestError
from pagewire.shared.messages.client import CancelReply, ErrorFrame, Frame

MSGPACK = {"Content-Type": "application/msgpack"}
"""Headers of a request in MessagePack, whose replies are in MessagePack too."""
CANCEL_TIMEOUT = 2.0
"""Seconds within which a service must answer that a request is cancelled."""

ENCODER = msgspec.msgpack.Encoder()
"""Encodes the requests of clients."""
encode = ENCODER.encode
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def decode(data: bytes) -> Frame:
    """Decodes a frame.

    Raises:
        Internal: this release does not know the frame.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Internal("a frame cannot be decoded: run client and services of the same release") from error


def error_of(frame: ErrorFrame) -> RequestError:
    """Returns the exception for an error frame."""
    kind = REQUEST_ERRORS.get(frame.error, Internal)
    return kind(frame.message, frame.retry_after_ms, field=frame.field, lengths=frame.lengths)


async def cancel(bus: Bus, subject: str) -> str:
    """Sends a request to a `cancel` subject. Returns cancelled, ended or unknown.

    Raises:
        BusError: no service answers.
    """
    reply = await bus.request(subject, b"", timeout=CANCEL_TIMEOUT)
    return msgspec.json.decode(reply.data, type=CancelReply).state
