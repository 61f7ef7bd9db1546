"""The events of a chat whose text has reasoning or tool calls in it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from pagewire.services.gateway.answers.chat_messages import deltas_of, finish_reason
from pagewire.services.gateway.answers.openai_shapes import ChatChunkChoice, ChatDelta, Usage
from pagewire.services.gateway.answers.sse_events import ChatEvents
from pagewire.shared.chat.parser import MessageParser
from pagewire.shared.chat.parts import Kind, Part
from pagewire.shared.messages.client import ChatFormat, Delta, Final, FinalChoice


class ParsedChatEvents(ChatEvents):
    """Parses the text of each choice as it comes: there is an event per part of the message, and the text has none."""

    def __init__(self, request_id: str, model: str, form: ChatFormat, *, reasoning: bool, **shown: Any) -> None:
        """`reasoning`: whether the reasoning is part of the answer; `shown`: see `ChatEvents`."""
        super().__init__(request_id, model, **shown)
        self._request_id = request_id
        self._form = form
        self._reasoning = reasoning
        self._parsers: defaultdict[int, MessageParser] = defaultdict(lambda: MessageParser(form))
        self._calling: set[int] = set()
        """Choices with calls."""

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas. What is reported of the tokens of a delta is in its first event."""
        events = []
        for delta in batch:
            self._tokens += len(delta.token_ids)
            usage = self._usage(prompt_tokens) if self._counted else None
            parts = self._parsers[delta.index].push(delta.text)
            events.append(self._events(delta.index, parts, usage, self.part(delta)))
        return b"".join(events)

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns the rest of each choice, then what ends every stream."""
        so_far = self._usage(final.usage.prompt_tokens) if self._counted else None
        rest = [self._events(end.index, self._parsers[end.index].end(), so_far, None) for end in final.choices]
        return b"".join(rest) + super().ends(final, usage=usage)

    def end(self, choice: FinalChoice) -> ChatChunkChoice:
        """Returns the end of a choice."""
        ended = super().end(choice)
        ended.finish_reason = finish_reason(choice, self._form, calls=choice.index in self._calling)
        return ended

    def _events(self, index: int, parts: Sequence[Part], usage: Usage | None, told: ChatChunkChoice | None) -> bytes:
        if any(part.kind is Kind.NAME for part in parts):
            self._calling.add(index)
        deltas = deltas_of(parts, self._form, self._request_id, index, reasoning=self._reasoning)
        if not deltas and told is not None and (told.logprobs is not None or self._detailed):
            deltas = [ChatDelta()]
        events = []
        for delta in deltas:
            choice = ChatChunkChoice(index, delta)
            if told is not None:
                choice.logprobs, choice.token_ids, told = told.logprobs, told.token_ids, None
            events.append(self._data([choice], usage))
            self._event.prompt_logprobs = UNSET
        return b"".join(events)
