"""The events of a chat whose text has reasoning or tool calls in it."""

from collections import defaultdict
from collections.abc import Sequence

from pagewire.services.gateway.events import ChatEvents
from pagewire.services.gateway.logprobs import chat_logprobs
from pagewire.services.gateway.messages import deltas_of, finish_reason
from pagewire.services.gateway.shapes import ChatChunkChoice, ChatDelta, ChatLogprobs, Usage
from pagewire.shared.chat.parser import MessageParser
from pagewire.shared.chat.parts import Kind, Part
from pagewire.shared.messages.client import ChatFormat, Delta, Final, FinalChoice


class MessageEvents(ChatEvents):
    """Parses the text of each choice as it comes: there is an event per part of the message, and the text has none."""

    def __init__(
        self, request_id: str, model: str, form: ChatFormat, *, counted: bool, top_logprobs: int, reasoning: bool
    ) -> None:
        """`reasoning`: whether the reasoning is part of the answer."""
        super().__init__(request_id, model, counted=counted, top_logprobs=top_logprobs)
        self._request_id = request_id
        self._form = form
        self._reasoning = reasoning
        self._parsers: defaultdict[int, MessageParser] = defaultdict(lambda: MessageParser(form))
        self._calling: set[int] = set()
        """Choices with calls."""

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas. The log-probabilities of a delta are in its first event."""
        events = []
        for delta in batch:
            self._tokens += len(delta.token_ids)
            usage = self._usage(prompt_tokens) if self._counted else None
            logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._top_logprobs)
            parts = self._parsers[delta.index].push(delta.text)
            events.append(self._events(delta.index, parts, usage, logprobs))
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

    def _events(self, index: int, parts: Sequence[Part], usage: Usage | None, logprobs: ChatLogprobs | None) -> bytes:
        if any(part.kind is Kind.NAME for part in parts):
            self._calling.add(index)
        deltas = deltas_of(parts, self._form, self._request_id, index, reasoning=self._reasoning)
        if not deltas and logprobs is not None:
            deltas = [ChatDelta()]
        events = []
        for delta in deltas:
            events.append(self._data([ChatChunkChoice(index, delta, logprobs)], usage))
            logprobs = None
        return b"".join(events)
