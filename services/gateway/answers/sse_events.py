"""The server-sent events of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from pagewire.services.gateway.answers.logprobs import chat_logprobs, completion_logprobs
from pagewire.services.gateway.answers.openai_shapes import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
    Timings,
    Usage,
    timings_of,
    usage_of,
)
from pagewire.services.gateway.http import errors
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages.client import Delta, Final, FinalChoice

DONE = b"data: [DONE]\n\n"
"""Sent after the last event."""

_encode = msgspec.json.Encoder().encode
C = TypeVar("C", CompletionChoice, ChatChunkChoice)


class Events(ABC, Generic[C]):
    """The events of one request. Events with text differ only in the text, so the rest is encoded once per choice."""

    done: ClassVar[bytes] = DONE
    key: bytes
    """The JSON key before a text."""

    def __init__(
        self,
        *,
        counted: bool = False,
        logprobs: bool = False,
        prompt_ids: Sequence[list[int]] | None = None,
        prompt_logprobs: bool = False,
    ) -> None:
        """Begins a stream.

        Args:
            counted: whether every event has the usage so far.
            logprobs: whether log-probabilities of tokens are part of the events.
            prompt_ids: ids of each prompt if token ids are.
            prompt_logprobs: whether log-probabilities of prompts are.
        """
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Per choice, the encoded event before and after the text."""
        self._counted = counted
        self._tokens = 0
        self._prompt_ids = prompt_ids
        self._detailed = prompt_ids is not None or prompt_logprobs
        """Whether a part has more than text and log-probabilities of its tokens."""
        self._plain = not (counted or logprobs or self._detailed)
        """Whether the events have nothing but text."""
        self._choices = 1
        """Choices per prompt."""
        self._timings: Timings | msgspec.UnsetType = msgspec.UNSET

    @abstractmethod
    def event(self, choices: list[C], usage: Usage | None) -> bytes:
        """Returns the JSON of an event."""

    @abstractmethod
    def text(self, index: int, text: str) -> C:
        """Returns the next part of a choice."""

    @abstractmethod
    def part(self, delta: Delta) -> C:
        """Returns the next part of a choice, with all that is reported of its tokens."""

    @abstractmethod
    def end(self, choice: FinalChoice) -> C:
        """Returns the end of a choice."""

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns the events before all texts."""
        return b""

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns one event per delta with text or anything else to tell; usage needs `prompt_tokens`."""
        if self._plain:
            return b"".join([self._text(delta) for delta in batch if delta.text])
        events = []
        for delta in batch:
            self._tokens += len(delta.token_ids)
            if delta.logprobs or self._detailed:
                part = self.part(delta)
            elif delta.text:
                part = self.text(delta.index, delta.text)
            else:
                continue
            events.append(self._data([part], self._usage(prompt_tokens) if self._counted else None))
        return b"".join(events)

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns one event per choice with its finish reason, and with `usage` one event with the usage."""
        so_far = self._usage(final.usage.prompt_tokens) if self._counted else None
        ends = b"".join(self._data([self.end(choice)], so_far) for choice in final.choices)
        if not usage:
            return ends
        self._timings = timings_of(final.metrics, final.usage)
        return ends + self._data([], usage_of(final.usage))

    def failed(self, error: PagewireError) -> bytes:
        """Returns the events that end a stream with an error."""
        return data(errors.body_of(error)[1])

    def _usage(self, prompt_tokens: int | None) -> Usage | None:
        """Returns the usage so far, or None if the number of prompt tokens is unknown."""
        if prompt_tokens is None:
            return None
        return Usage(prompt_tokens, self._tokens, prompt_tokens + self._tokens, None)

    def _text(self, delta: Delta) -> bytes:
        around = self._around.get(delta.index)
        if around is None:
            # Quotes within JSON strings are escaped, so the first match is the key.
            before, _, after = self._data([self.text(delta.index, "")], None).partition(self.key + b'""')
            around = self._around[delta.index] = before + self.key, after
        return b"".join((around[0], _encode(delta.text), around[1]))

    def _data(self, choices: list[C], usage: Usage | None) -> bytes:
        return data(self.event(choices, usage))


class CompletionEvents(Events[CompletionChoice]):
    """The events of `/v1/completions`."""

    key = b'"text":'

    def __init__(self, request_id: str, model: str, **shown: Any) -> None:
        """`shown`: see `Events`."""
        super().__init__(**shown)
        self._offsets: dict[int, int] = {}
        """Characters of all tokens of each choice so far."""
        self._event = Completion(id=f"cmpl-{request_id}", created=int(time.time()), model=model, choices=[])

    def event(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        """Returns the JSON of a `Completion`."""
        self._event.choices, self._event.usage, self._event.timings = choices, usage, self._timings
        return _encode(self._event)

    def text(self, index: int, text: str) -> CompletionChoice:
        """Returns the next part of a choice."""
        return CompletionChoice(index, text)

    def part(self, delta: Delta) -> CompletionChoice:
        """Returns the next part of a choice, with all that is reported of its tokens."""
        choice = CompletionChoice(delta.index, delta.text, prompt_logprobs=delta.prompt_logprobs)
        if delta.logprobs is not None:
            choice.logprobs = found = completion_logprobs(delta.logprobs, self._offsets.get(delta.index, 0))
            self._offsets[delta.index] = found.text_offset[-1] + len(found.tokens[-1])
        if self._prompt_ids is not None:
            choice.token_ids = delta.token_ids
            if not delta.start:
                choice.prompt_token_ids = self._prompt_ids[delta.index // self._choices]
        return choice

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns the events before all texts: none."""
        self._choices = choices
        return b""

    def end(self, choice: FinalChoice) -> CompletionChoice:
        """Returns the end of a choice."""
        return CompletionChoice(choice.index, "", finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)


class ChatEvents(Events[ChatChunkChoice]):
    """The events of `/v1/chat/completions`. The first event of each choice has the role."""

    key = b'"content":'

    def __init__(self, request_id: str, model: str, *, top_logprobs: int = 0, **shown: Any) -> None:
        """`top_logprobs`: the likeliest tokens that are shown with each token; `shown`: see `Events`."""
        super().__init__(**shown)
        self._top_logprobs = top_logprobs
        self._event = ChatChunk(id=f"chatcmpl-{request_id}", created=int(time.time()), model=model, choices=[])

    def event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        """Returns the JSON of a `ChatChunk`."""
        self._event.choices, self._event.usage, self._event.timings = choices, usage, self._timings
        return _encode(self._event)

    def text(self, index: int, text: str) -> ChatChunkChoice:
        """Returns the next part of a choice."""
        return ChatChunkChoice(index, ChatDelta(content=text))

    def part(self, delta: Delta) -> ChatChunkChoice:
        """Returns the next part of a choice, with all that is reported of its tokens."""
        found = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._top_logprobs)
        self._event.prompt_logprobs = delta.prompt_logprobs
        ids = delta.token_ids if self._prompt_ids is not None else msgspec.UNSET
        return ChatChunkChoice(delta.index, ChatDelta(content=delta.text), found, token_ids=ids)

    def end(self, choice: FinalChoice) -> ChatChunkChoice:
        """Returns the end of a choice."""
        self._event.prompt_logprobs = msgspec.UNSET
        return ChatChunkChoice(
            choice.index, ChatDelta(), finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
        )

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns one event per choice with the assistant's role."""
        usage = self._usage(prompt_tokens) if self._counted else None
        begin = ChatDelta(role="assistant", content="")
        if self._prompt_ids:
            self._event.prompt_token_ids = self._prompt_ids[0]
        events = b"".join(self._data([ChatChunkChoice(index, begin)], usage) for index in range(choices))
        self._event.prompt_token_ids = msgspec.UNSET
        return events


def data(content: bytes) -> bytes:
    """Returns a server-sent event with `content`, which has no line breaks."""
    return b"data: " + content + b"\n\n"
