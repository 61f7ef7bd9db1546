"""The frames that end a request."""

from pagewire.services.detokenizer.completion import Completion
from pagewire.services.detokenizer.stream import Stream
from pagewire.shared.errors import PayloadTooLarge
from pagewire.shared.frames import encode_frame, error_frame, error_headers
from pagewire.shared.messages.client import Choice, ErrorFrame, Final, FinalChoice, Result, Usage

Closing = tuple[bytes, dict[str, str] | None]
"""A frame's bytes and headers."""


def closing(stream: Stream, encoding: int, *, streaming: bool) -> Closing:
    """The last frame of a stream, or the one reply to a request without one."""
    if stream.error is not None:
        return encode_frame(error_of(stream), encoding), error_headers(stream.error)
    return encode_frame(final(stream) if streaming else result(stream), encoding), None


def too_large(stream: Stream, encoding: int) -> Closing:
    """The reply instead of a result that exceeds the broker's limit."""
    error = PayloadTooLarge("the result does not fit into one message: ask for fewer tokens, or for a stream")
    return encode_frame(error_frame(error, stream.request_id, stream.tokens), encoding), error_headers(error)


def error_of(stream: Stream) -> ErrorFrame:
    """The error that ended a stream."""
    assert stream.error is not None
    return error_frame(stream.error, stream.request_id, stream.tokens)


def final(stream: Stream) -> Final:
    """How a stream ended."""
    choices = [
        FinalChoice(index, ended.finish or "cancelled", ended.stop_reason)
        for index, ended in enumerate(stream.completions)
    ]
    return Final(stream.request_id, choices, usage(stream))


def result(stream: Stream) -> Result:
    """All of an ended request."""
    choices = [_choice(index, ended) for index, ended in enumerate(stream.completions)]
    return Result(stream.request_id, choices, usage(stream))


def usage(stream: Stream) -> Usage:
    """What a request used so far."""
    return Usage(stream.prompt_tokens, stream.tokens, stream.cached_tokens)


def _choice(index: int, ended: Completion) -> Choice:
    return Choice(
        index=index,
        text="".join(ended.texts),
        token_ids=ended.tokens,
        finish_reason=ended.finish or "cancelled",
        stop_reason=ended.stop_reason,
    )
