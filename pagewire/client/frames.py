"""What arrives from the pipeline, decoded: frames, and the errors that they stand for."""

import msgspec

from pagewire.shared.bus import Bus
from pagewire.shared.errors import REQUEST_ERRORS, Internal, RequestError
from pagewire.shared.messages.client import CancelReply, ErrorFrame, Frame

MSGPACK = {"Content-Type": "application/msgpack"}
"""Headers of a request whose replies are MessagePack."""

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def decode(data: bytes) -> Frame:
    """The frame in a message.

    Raises:
        Internal: it is none that this release knows.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Internal("a frame could not be read: client and services are of different releases") from error


def error_of(frame: ErrorFrame) -> RequestError:
    """The exception that an error frame stands for."""
    return REQUEST_ERRORS.get(frame.error, Internal)(frame.message, frame.retry_after_ms)


async def cancel(bus: Bus, subject: str, timeout: float = 2.0) -> str:
    """Asks a `cancel` subject to end its request. Returns cancelled, ended or unknown.

    Raises:
        BusError: nobody answers.
    """
    reply = await bus.request(subject, b"", timeout=timeout)
    return msgspec.json.decode(reply.data, type=CancelReply).state
