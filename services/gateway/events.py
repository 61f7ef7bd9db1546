"""The server-sent events of a stream of completions."""

import time
from collections.abc import Sequence

import msgspec

from pagewire.services.gateway.shapes import Choice, Completion, Usage, usage_of
from pagewire.shared.messages.client import Delta, Final

DONE = b"data: [DONE]\n\n"
"""Sent after the last event."""

_TEXT = b'"text":'
_encode = msgspec.json.Encoder().encode


class Events:
    """The events of one request. Events with text differ only in the text, so the rest is encoded once."""

    def __init__(self, request_id: str, model: str, *, counted: bool = False) -> None:
        """`counted`: whether every event has the usage up to it."""
        self._event = Completion(id=f"cmpl-{request_id}", created=int(time.time()), model=model, choices=[])
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The encoded event before and after the text, by choice."""
        self._counted = counted
        self._tokens = 0

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns one event per delta with text, without usage while `prompt_tokens` is unknown."""
        if self._counted:
            return self._counted_texts(batch, prompt_tokens)
        return b"".join([self._text(delta) for delta in batch if delta.text])

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns one event per completion with its finish reason, then one with the usage if wanted."""
        ends = b"".join(
            self._encoded(
                [Choice(choice.index, "", finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)]
            )
            for choice in final.choices
        )
        if not usage:
            return ends
        self._event.usage = usage_of(final.usage)
        return ends + self._encoded([])

    def _counted_texts(self, batch: Sequence[Delta], prompt_tokens: int | None) -> bytes:
        events = []
        for delta in batch:
            self._tokens += len(delta.token_ids)
            if prompt_tokens is not None:
                self._event.usage = Usage(prompt_tokens, self._tokens, prompt_tokens + self._tokens, None)
            if delta.text:
                events.append(self._encoded([Choice(delta.index, delta.text)]))
        return b"".join(events)

    def _text(self, delta: Delta) -> bytes:
        around = self._around.get(delta.index)
        if around is None:
            # JSON strings contain no unescaped quotes, so the match is the key.
            before, _, behind = self._encoded([Choice(delta.index, "")]).partition(_TEXT + b'""')
            around = self._around[delta.index] = before + _TEXT, behind
        return b"".join((around[0], _encode(delta.text), around[1]))

    def _encoded(self, choices: list[Choice]) -> bytes:
        self._event.choices = choices
        return event(_encode(self._event))


def event(data: bytes) -> bytes:
    """Returns an event with `data`, which must not contain line breaks."""
    return b"data: " + data + b"\n\n"
