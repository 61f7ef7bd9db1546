"""The server-sent events of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec

from pagewire.services.gateway import errors
from pagewire.services.gateway.logprobs import chat_logprobs, completion_logprobs
from pagewire.services.gateway.shapes import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Choice,
    Completion,
    Usage,
    usage_of,
)
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages.client import Delta, Final, FinalChoice, TokenLogprobs

DONE = b"data: [DONE]\n\n"
"""Sent after the last event."""

_encode = msgspec.json.Encoder().encode
C = TypeVar("C", Choice, ChatChunkChoice)


class Events(ABC, Generic[C]):
    """The events of one request. Events with text differ only in the text, so the rest is encoded once per choice."""

    done: ClassVar[bytes] = DONE
    key: bytes
    """The JSON key before a text."""

    def __init__(self, *, counted: bool) -> None:
        """`counted`: whether every event has the usage so far."""
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Per choice, the encoded event before and after the text."""
        self._counted = counted
        self._tokens = 0

    @abstractmethod
    def event(self, choices: list[C], usage: Usage | None) -> bytes:
        """Returns the JSON of an event."""

    @abstractmethod
    def text(self, index: int, text: str) -> C:
        """Returns the next part of a choice."""

    @abstractmethod
    def reported(self, delta: Delta, logprobs: Sequence[TokenLogprobs]) -> C:
        """Returns the next part of a choice, with the log-probabilities of its tokens."""

    @abstractmethod
    def end(self, choice: FinalChoice) -> C:
        """Returns the end of a choice."""

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns the events before all texts."""
        return b""

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns one event per delta with text or log-probabilities; usage needs `prompt_tokens`."""
        if self._counted:
            return self._counted_texts(batch, prompt_tokens)
        return b"".join([self._text(delta) for delta in batch if delta.text or delta.logprobs])

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns one event per choice with its finish reason, and with `usage` one event with the usage."""
        so_far = self._usage(final.usage.prompt_tokens) if self._counted else None
        ends = b"".join(self._data([self.end(choice)], so_far) for choice in final.choices)
        return ends + self._data([], usage_of(final.usage)) if usage else ends

    def failed(self, error: PagewireError) -> bytes:
        """Returns the events that end a stream with an error."""
        return data(errors.body_of(error)[1])

    def _counted_texts(self, batch: Sequence[Delta], prompt_tokens: int | None) -> bytes:
        events = []
        for delta in batch:
            self._tokens += len(delta.token_ids)
            if delta.logprobs is not None:
                events.append(self._data([self.reported(delta, delta.logprobs)], self._usage(prompt_tokens)))
            elif delta.text:
                events.append(self._data([self.text(delta.index, delta.text)], self._usage(prompt_tokens)))
        return b"".join(events)

    def _usage(self, prompt_tokens: int | None) -> Usage | None:
        """Returns the usage so far, or None if the number of prompt tokens is unknown."""
        if prompt_tokens is None:
            return None
        return Usage(prompt_tokens, self._tokens, prompt_tokens + self._tokens, None)

    def _text(self, delta: Delta) -> bytes:
        if delta.logprobs is not None:
            return self._data([self.reported(delta, delta.logprobs)], None)
        around = self._around.get(delta.index)
        if around is None:
            # Quotes within JSON strings are escaped, so the first match is the key.
            before, _, after = self._data([self.text(delta.index, "")], None).partition(self.key + b'""')
            around = self._around[delta.index] = before + self.key, after
        return b"".join((around[0], _encode(delta.text), around[1]))

    def _data(self, choices: list[C], usage: Usage | None) -> bytes:
        return data(self.event(choices, usage))


class CompletionEvents(Events[Choice]):
    """The events of `/v1/completions`."""

    key = b'"text":'

    def __init__(self, request_id: str, model: str, *, counted: bool = False, prompts: Sequence[str] = ()) -> None:
        """`prompts`: the texts that the choices begin with, if they are echoed."""
        super().__init__(counted=counted)
        self._prompts = prompts
        self._offsets: dict[int, int] = {}
        """Characters of all tokens of each choice so far."""
        self._event = Completion(id=f"cmpl-{request_id}", created=int(time.time()), model=model, choices=[])

    def event(self, choices: list[Choice], usage: Usage | None) -> bytes:
        """Returns the JSON of a `Completion`."""
        self._event.choices, self._event.usage = choices, usage
        return _encode(self._event)

    def text(self, index: int, text: str) -> Choice:
        """Returns the next part of a choice."""
        return Choice(index, text)

    def reported(self, delta: Delta, logprobs: Sequence[TokenLogprobs]) -> Choice:
        """Returns the next part of a choice, with the log-probabilities of its tokens."""
        found = completion_logprobs(logprobs, self._offsets.get(delta.index, 0))
        self._offsets[delta.index] = found.text_offset[-1] + len(found.tokens[-1])
        return Choice(delta.index, delta.text, found)

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns one event per choice with the prompt that it echoes."""
        usage = self._usage(prompt_tokens) if self._counted else None
        texts = [text for text in self._prompts for _ in range(choices)]
        return b"".join(self._data([self.text(index, text)], usage) for index, text in enumerate(texts))

    def end(self, choice: FinalChoice) -> Choice:
        """Returns the end of a choice."""
        return Choice(choice.index, "", finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)


class ChatEvents(Events[ChatChunkChoice]):
    """The events of `/v1/chat/completions`. The first event of each choice has the role."""

    key = b'"content":'

    def __init__(self, request_id: str, model: str, *, counted: bool = False, top_logprobs: int = 0) -> None:
        super().__init__(counted=counted)
        self._top_logprobs = top_logprobs
        self._event = ChatChunk(id=f"chatcmpl-{request_id}", created=int(time.time()), model=model, choices=[])

    def event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        """Returns the JSON of a `ChatChunk`."""
        self._event.choices, self._event.usage = choices, usage
        return _encode(self._event)

    def text(self, index: int, text: str) -> ChatChunkChoice:
        """Returns the next part of a choice."""
        return ChatChunkChoice(index, ChatDelta(content=text))

    def reported(self, delta: Delta, logprobs: Sequence[TokenLogprobs]) -> ChatChunkChoice:
        """Returns the next part of a choice, with the log-probabilities of its tokens."""
        found = chat_logprobs(logprobs, self._top_logprobs)
        return ChatChunkChoice(delta.index, ChatDelta(content=delta.text), found)

    def end(self, choice: FinalChoice) -> ChatChunkChoice:
        """Returns the end of a choice."""
        return ChatChunkChoice(
            choice.index, ChatDelta(), finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
        )

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns one event per choice with the assistant's role."""
        usage = self._usage(prompt_tokens) if self._counted else None
        begin = ChatDelta(role="assistant", content="")
        return b"".join(self._data([ChatChunkChoice(index, begin)], usage) for index in range(choices))


def data(content: bytes) -> bytes:
    """Returns a server-sent event with `content`, which has no line breaks."""
    return b"data: " + content + b"\n\n"
