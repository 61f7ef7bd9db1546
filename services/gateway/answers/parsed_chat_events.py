"""The events of a chat whose text has reasoning or tool calls in it."""

from collections.abc import Sequence

from msgspec import UNSET
from typing_extensions import override

from pagewire.services.gateway.answers.answer_reader import AnswerReader
from pagewire.services.gateway.answers.chat_messages import deltas_of, finish_reason_of
from pagewire.services.gateway.answers.openai_events import TEXT_ALONE, ChatEvents, EventFields
from pagewire.services.gateway.answers.openai_shapes import ChatChunkChoice, ChatDelta, Usage
from pagewire.shared.chat.parts import Part
from pagewire.shared.messages.client import Delta, Final, FinalChoice


class ParsedChatEvents(ChatEvents):
    """Parses the text of each choice as it comes: there is an event per part of the message, and the text has none."""

    def __init__(
        self,
        request_id: str,
        model: str,
        reader: AnswerReader,
        fields: EventFields = TEXT_ALONE,
        top_logprobs: int = 0,
    ) -> None:
        super().__init__(request_id, model, fields, top_logprobs)
        self._reader = reader

    @override
    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas. Reports on the tokens of a delta are in its first event."""
        events = []
        for delta in batch:
            self._tokens += len(delta.token_ids)
            parts = self._reader.push(delta.index, delta.text)
            report = None if self._plain else self.part(delta)
            events.append(self._parts(delta.index, parts, self._usage(prompt_tokens), report))
        return b"".join(events)

    @override
    def ends(self, final: Final, *, usage: bool) -> bytes:
        so_far = self._usage(final.usage.prompt_tokens)
        rest = [self._parts(end.index, self._reader.end(end), so_far) for end in final.choices]
        return b"".join(rest) + super().ends(final, usage=usage)

    @override
    def end(self, choice: FinalChoice) -> ChatChunkChoice:
        end = super().end(choice)
        end.finish_reason = finish_reason_of(choice, self._reader)
        return end

    def _parts(
        self, index: int, parts: Sequence[Part], usage: Usage | None, report: ChatChunkChoice | None = None
    ) -> bytes:
        """Returns the events of a choice's parts, the first one with what `report` has beside the text."""
        deltas = deltas_of(parts, index, self._reader)
        if not deltas and report is not None and (report.logprobs is not None or self._detailed):
            deltas = [ChatDelta()]
        events = []
        for delta in deltas:
            choice = ChatChunkChoice(index, delta)
            if report is not None:
                choice.logprobs, choice.token_ids = report.logprobs, report.token_ids
                choice.token_origin, report = report.token_origin, None
            events.append(self._event([choice], usage))
            self._body.prompt_logprobs = UNSET
        return b"".join(events)
