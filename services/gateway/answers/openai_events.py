"""The events of OpenAI's completions and chat completions."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from typing_extensions import override

from pagewire.services.gateway.answers.logprobs import chat_logprobs, completion_logprobs
from pagewire.services.gateway.answers.openai_shapes import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
    Usage,
    metrics_of,
    origin_of,
    timings_of,
    usage_of,
)
from pagewire.services.gateway.answers.sse import EventStream, sse
from pagewire.services.gateway.http import errors
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages.client import Delta, Final, FinalChoice

_encode = msgspec.json.Encoder().encode
C = TypeVar("C", CompletionChoice, ChatChunkChoice)


@dataclass(frozen=True, slots=True)
class EventFields:
    """The fields of events beside the text."""

    counted: bool = False
    """Whether every event has the usage so far."""
    logprobs: bool = False
    """Whether events have the log-probabilities of their tokens."""
    prompt_ids: Sequence[list[int]] | None = None
    """Ids of each prompt, if events have token ids; None: they have none."""
    prompt_logprobs: bool = False
    """Whether events have the log-probabilities of prompts."""
    metrics: bool = False
    """Whether the event with the usage has the figures of the drafts."""
    origins: bool = False
    """Whether events say how their tokens came."""


TEXT_ALONE = EventFields()
"""No field beside the text."""


class OpenAIEvents(EventStream, Generic[C]):
    """The events of one request. Events with text differ only in the text, so the rest is encoded once per choice."""

    done: ClassVar[bytes] = sse(b"[DONE]")
    key: ClassVar[bytes]
    """The JSON key before a text."""

    def __init__(self, body: Completion | ChatChunk, fields: EventFields) -> None:
        """`body`: an event without its choices."""
        self._body: Any = body
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Per choice, the encoded event before and after the text."""
        self._counted = fields.counted
        self._tokens = 0
        """Generated tokens so far."""
        self._prompt_ids = fields.prompt_ids
        self._metrics = fields.metrics
        self._detailed = fields.prompt_ids is not None or fields.prompt_logprobs or fields.origins
        """Whether an event has more than text and log-probabilities of its tokens."""
        self._plain = not (fields.counted or fields.logprobs or self._detailed)
        """Whether the events have nothing but text."""
        self._choices = 1
        """Choices per prompt."""

    @abstractmethod
    def text(self, index: int, text: str) -> C:
        """Returns a choice that goes on with a text."""

    @abstractmethod
    def part(self, delta: Delta) -> C:
        """Returns a choice that goes on with a delta, with all that is reported of its tokens."""

    @abstractmethod
    def end(self, choice: FinalChoice) -> C:
        """Returns a choice that ends."""

    @override
    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        if self._plain:
            return b"".join([self._text(delta.index, delta.text) for delta in batch if delta.text])
        events = []
        for delta in batch:
            self._tokens += len(delta.token_ids)
            if delta.logprobs or self._detailed:
                part = self.part(delta)
            elif delta.text:
                part = self.text(delta.index, delta.text)
            else:
                continue
            events.append(self._event([part], self._usage(prompt_tokens)))
        return b"".join(events)

    @override
    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns one event per choice with its finish reason, and with `usage` one event with the usage."""
        so_far = self._usage(final.usage.prompt_tokens)
        ends = b"".join(self._event([self.end(choice)], so_far) for choice in final.choices)
        if not usage:
            return ends
        self._body.timings = timings_of(final.metrics, final.usage)
        self._body.metrics = metrics_of(final.metrics, len(final.choices), shown=self._metrics)
        return ends + self._event([], usage_of(final.usage))

    @override
    def failed(self, error: PagewireError) -> bytes:
        return sse(errors.body_of(error)[1])

    def _usage(self, prompt_tokens: int | None) -> Usage | None:
        """Returns the usage so far; None: events have none, or the number of prompt tokens is unknown."""
        if prompt_tokens is None or not self._counted:
            return None
        return Usage(prompt_tokens, self._tokens, prompt_tokens + self._tokens, None)

    def _text(self, index: int, text: str) -> bytes:
        """Returns the event of a choice's next text, with nothing but text."""
        around = self._around.get(index)
        if around is None:
            # Quotes within JSON strings are escaped, so the first match is the key.
            before, _, after = self._event([self.text(index, "")], None).partition(self.key + b'""')
            around = self._around[index] = before + self.key, after
        return around[0] + _encode(text) + around[1]

    def _event(self, choices: list[C], usage: Usage | None) -> bytes:
        self._body.choices, self._body.usage = choices, usage
        return sse(_encode(self._body))


class CompletionEvents(OpenAIEvents[CompletionChoice]):
    """The events of `/v1/completions`."""

    key = b'"text":'

    def __init__(self, request_id: str, model: str, fields: EventFields = TEXT_ALONE) -> None:
        super().__init__(Completion(f"cmpl-{request_id}", int(time.time()), model, []), fields)
        self._offsets: dict[int, int] = {}
        """Characters of all tokens of each choice so far."""

    @override
    def text(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index, text)

    @override
    def part(self, delta: Delta) -> CompletionChoice:
        choice = CompletionChoice(
            delta.index, delta.text, prompt_logprobs=delta.prompt_logprobs, token_origin=origin_of(delta)
        )
        if delta.logprobs is not None:
            choice.logprobs = columns = completion_logprobs(delta.logprobs, self._offsets.get(delta.index, 0))
            self._offsets[delta.index] = columns.text_offset[-1] + len(columns.tokens[-1])
        if self._prompt_ids is not None:
            choice.token_ids = delta.token_ids
            if not delta.start:
                choice.prompt_token_ids = self._prompt_ids[delta.index // self._choices]
        return choice

    @override
    def beginning(self, choices: int, prompt_tokens: int | None = None, cached_tokens: int = 0) -> bytes:
        self._choices = choices
        return b""

    @override
    def end(self, choice: FinalChoice) -> CompletionChoice:
        return CompletionChoice(choice.index, "", finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)


class ChatEvents(OpenAIEvents[ChatChunkChoice]):
    """The events of `/v1/chat/completions`. The first event of each choice has the role."""

    key = b'"content":'

    def __init__(self, request_id: str, model: str, fields: EventFields = TEXT_ALONE, top_logprobs: int = 0) -> None:
        """`top_logprobs`: number of the likeliest tokens that are shown with each token."""
        super().__init__(ChatChunk(f"chatcmpl-{request_id}", int(time.time()), model, []), fields)
        self._top_logprobs = top_logprobs

    @override
    def text(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text))

    @override
    def part(self, delta: Delta) -> ChatChunkChoice:
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._top_logprobs)
        self._body.prompt_logprobs = delta.prompt_logprobs
        ids = delta.token_ids if self._prompt_ids is not None else msgspec.UNSET
        text = ChatDelta(content=delta.text)
        return ChatChunkChoice(delta.index, text, logprobs, token_ids=ids, token_origin=origin_of(delta))

    @override
    def end(self, choice: FinalChoice) -> ChatChunkChoice:
        self._body.prompt_logprobs = msgspec.UNSET
        return ChatChunkChoice(
            choice.index, ChatDelta(), finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
        )

    @override
    def beginning(self, choices: int, prompt_tokens: int | None = None, cached_tokens: int = 0) -> bytes:
        begin = ChatDelta(role="assistant", content="")
        if self._prompt_ids:
            self._body.prompt_token_ids = self._prompt_ids[0]
        usage = self._usage(prompt_tokens)
        events = b"".join(self._event([ChatChunkChoice(index, begin)], usage) for index in range(choices))
        self._body.prompt_token_ids = msgspec.UNSET
        return events
