"""Reads the texts of a chat's answers as parts: content, reasoning and calls of tools."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.shared.chat.formats import NAMED
from pagewire.shared.chat.parser import Message, MessageParser, read_message
from pagewire.shared.chat.parts import Kind, Part
from pagewire.shared.messages.client import ChatFormat, Choice, FinalChoice


@dataclass(slots=True)
class AnswerBlock:
    """A text, the reasoning or a call of a tool: one block of an answer in the shapes that have blocks.

    Attributes:
        kind: CONTENT, REASONING, or NAME for a call.
        name: name of the called tool.
        call_id: id of the call.
        texts: pieces of the text, or of the call's arguments.
    """

    kind: Kind
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text, or all arguments of the call."""
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments of the call as an object; None: a model has written something else, or was cut."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, Any]) if self.text else {}
        except (msgspec.DecodeError, RecursionError):
            return None


class AnswerReader:
    """Reads the choices of one request, each of them whole or as its text comes."""

    def __init__(self, request_id: str, form: ChatFormat | None, *, reasoning: bool = True) -> None:
        """Begins the answers of a request.

        Args:
            request_id: id of the request, which the ids of calls depend on.
            form: how a text becomes a message; None: it is content.
            reasoning: whether the reasoning is part of the answers.
        """
        self._request_id = request_id
        self._form = form
        self._reasoning = reasoning
        self._parsers: defaultdict[int, MessageParser] = defaultdict(lambda: MessageParser(form or ChatFormat()))
        self._calling: set[int] = set()
        """Choices with calls."""

    def push(self, choice: int, text: str) -> list[Part]:
        """Returns the parts that the next piece of a choice's text completes."""
        if self._form is None:
            return [Part(Kind.CONTENT, text)] if text else []
        return self._shown(choice, self._parsers[choice].push(text))

    def end(self, choice: FinalChoice) -> list[Part]:
        """Returns the last parts of a choice, whose text has ended."""
        if self._form is None:
            return []
        return self._shown(choice.index, self._parsers[choice.index].end(cut=choice.finish_reason == "length"))

    def message(self, choice: Choice) -> Message:
        """Returns the message of a whole choice."""
        message = read_message(choice.text, self._form, cut=choice.finish_reason == "length")
        if message.calls:
            self._calling.add(choice.index)
        if not self._reasoning:
            message.reasoning = None
        return message

    def blocks(self, choice: Choice) -> list[AnswerBlock]:
        """Returns the blocks of a whole choice, at least one: reasoning, content, calls."""
        message = self.message(choice)
        texts = [(Kind.REASONING, message.reasoning), (Kind.CONTENT, message.content)]
        blocks = [AnswerBlock(kind, texts=[text]) for kind, text in texts if text]
        for number, call in enumerate(message.calls):
            call_id = self.call_id(choice.index, number)
            blocks.append(AnswerBlock(Kind.NAME, call.name, call_id, [call.arguments]))
        return blocks or [AnswerBlock(Kind.CONTENT)]

    def call_id(self, choice: int, call: int) -> str:
        """Returns the id of a call, the same for the same request, in the form that the model's template takes."""
        digest = hashlib.sha256(f"{self._request_id} {choice} {call}".encode()).hexdigest()
        is_short = self._form is not None and self._form.short_ids
        return f"call{digest[:5]}" if is_short else f"call_{digest[:24]}"

    def calls(self, end: Choice | FinalChoice) -> bool:
        """Returns whether a choice that was read to its end calls tools, and was not cut."""
        return end.index in self._calling and end.finish_reason == "stop"

    @property
    def is_named(self) -> bool:
        """Whether the request names the tool that is called."""
        return self._form is not None and self._form.tool_calls == NAMED

    def _shown(self, choice: int, parts: Iterable[Part]) -> list[Part]:
        """Notes the calls of a choice and returns the parts that are part of the answer."""
        shown = []
        for part in parts:
            if part.kind is Kind.NAME:
                self._calling.add(choice)
            if self._reasoning or part.kind is not Kind.REASONING:
                shown.append(part)
        return shown
