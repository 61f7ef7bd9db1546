"""The protocol of a streamed answer: deltas of the pipeline in, encoded events out."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from pagewire.shared.errors import PagewireError
from pagewire.shared.messages.client import Delta, Final


class EventStream(Protocol):
    """The events of one request, encoded."""

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    """The `Content-Type` of the response."""
    done: ClassVar[bytes]
    """The bytes behind the last event."""

    def beginning(self, choices: int, prompt_tokens: int | None = None, cached_tokens: int = 0) -> bytes:
        """Returns the events before all texts.

        Args:
            choices: completions per prompt.
            prompt_tokens: tokens of all prompts; None: unknown.
            cached_tokens: tokens of the prompts that were in the prefix cache.
        """

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas; empty: there is nothing to send yet."""

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns the events after all texts; `usage`: whether one of them has the usage."""

    def failed(self, error: PagewireError) -> bytes:
        """Returns the events that end a stream with an error."""


def sse(content: bytes, name: str = "") -> bytes:
    """Returns a server-sent event.

    >>> sse(b"[DONE]")
    b'data: [DONE]\\n\\n'
    >>> sse(b"{}", "ping")
    b'event: ping\\ndata: {}\\n\\n'

    Args:
        content: bytes without line breaks, such as JSON.
        name: type of the event; empty: it has none.
    """
    event = b"event: " + name.encode() + b"\n" if name else b""
    return event + b"data: " + content + b"\n\n"
