"""The server-sent events of a stream of completions."""

import time
from collections.abc import Sequence

import msgspec

from pagewire.services.gateway.shapes import Choice, Completion, Usage, usage_of
from pagewire.shared.messages.client import Delta, Final

DONE = b"data: [DONE]\n\n"
"""Behind the last event."""

_TEXT = b'"text":'
_encode = msgspec.json.Encoder().encode


class Events:
    """Those of one request. Of the events with text nothing but the text differs: the rest is encoded once."""

    def __init__(self, request_id: str, model: str, *, counted: bool = False) -> None:
        """`counted`: every event has the usage so far."""
        self._event = Completion(id=f"cmpl-{request_id}", created=int(time.time()), model=model, choices=[])
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what stands before its texts, and what behind."""
        self._counted = counted
        self._tokens = 0

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """One event per delta that has text. While the prompt's tokens are not known, it has no usage."""
        if self._counted:
            return self._counted_texts(batch, prompt_tokens)
        return b"".join([self._text(delta) for delta in batch if delta.text])

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """One event per completion with the reason of its end, then one with the usage if it is wanted."""
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
            # Within JSON's strings quotes are escaped: what is found is the key.
            before, _, behind = self._encoded([Choice(delta.index, "")]).partition(_TEXT + b'""')
            around = self._around[delta.index] = before + _TEXT, behind
        return b"".join((around[0], _encode(delta.text), around[1]))

    def _encoded(self, choices: list[Choice]) -> bytes:
        self._event.choices = choices
        return event(_encode(self._event))


def event(data: bytes) -> bytes:
    """An event that carries `data`, which has no line breaks."""
    return b"data: " + data + b"\n\n"
