"""Reads the texts of a chat's answers as parts: content, reasoning and calls of tools."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.shared.chat.formats import NAMED
from pagewire.shared.chat.parser import Message, MessageParser, read_parts
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

    def takes(self, part: Part) -> bool:
        """Returns whether a part goes on with this block; else another one begins."""
        return part.kind is not Kind.NAME and part.kind in {self.kind, Kind.ARGUMENTS}


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
        self._last_calls: dict[int, AnswerBlock] = {}
        """Last call of each choice that has one."""

    def push(self, choice: int, text: str) -> list[Part]:
        """Returns the parts that the next piece of a choice's text completes."""
        if self._form is None:
            return [Part(Kind.CONTENT, text)] if text else []
        return self._shown(choice, self._parsers[choice].push(text))

    def end(self, choice: FinalChoice) -> list[Part]:
        """Returns the last parts of a choice, whose text has ended."""
        if self._form is None:
            return []
        return self._shown(choice.index, self._parsers[choice.index].end(cut=_was_cut(choice)))

    def message(self, choice: Choice) -> Message:
        """Returns the message of a whole choice."""
        message = Message()
        for part in self._parts(choice):
            message.add(part)
        return message

    def blocks(self, choice: Choice) -> list[AnswerBlock]:
        """Returns the blocks of a whole choice in their order, at least one."""
        blocks: list[AnswerBlock] = []
        for part in self._parts(choice):
            if not blocks or not blocks[-1].takes(part):
                blocks.append(self.block(choice.index, part))
            if part.kind is not Kind.NAME:
                blocks[-1].texts.append(part.text)
        return blocks or [AnswerBlock(Kind.CONTENT)]

    def block(self, choice: int, part: Part) -> AnswerBlock:
        """Returns the block that begins with a part, without the part's text."""
        if part.kind is Kind.NAME:
            return AnswerBlock(Kind.NAME, part.text, self.call_id(choice, part.call))
        return AnswerBlock(part.kind)

    def call_id(self, choice: int, call: int) -> str:
        """Returns the id of a call, the same for the same request, in the form that the model's template takes."""
        digest = hashlib.sha256(f"{self._request_id} {choice} {call}".encode()).hexdigest()
        is_short = self._form is not None and self._form.short_ids
        return f"call{digest[:5]}" if is_short else f"call_{digest[:24]}"

    def calls(self, end: Choice | FinalChoice) -> bool:
        """Returns whether a choice that was read to its end calls tools, and was not cut within a call."""
        call = self._last_calls.get(end.index)
        if call is None or end.finish_reason != "stop":
            return False
        return not _was_cut(end) or call.arguments is not None

    @property
    def is_named(self) -> bool:
        """Whether the request names the tool that is called."""
        return self._form is not None and self._form.tool_calls == NAMED

    def _shown(self, choice: int, parts: Iterable[Part]) -> list[Part]:
        """Notes the calls of a choice and returns the parts that are part of the answer."""
        shown = []
        for part in parts:
            if part.kind is Kind.NAME:
                self._last_calls[choice] = AnswerBlock(Kind.NAME, part.text)
            elif part.kind is Kind.ARGUMENTS:
                self._last_calls[choice].texts.append(part.text)
            if self._reasoning or part.kind is not Kind.REASONING:
                shown.append(part)
        return shown

    def _parts(self, choice: Choice) -> list[Part]:
        """Returns all parts of a whole choice."""
        return self._shown(choice.index, read_parts(choice.text, self._form, cut=_was_cut(choice)))


def _was_cut(end: Choice | FinalChoice) -> bool:
    """Returns whether the limit of tokens or a stop string has ended a choice, and not the model."""
    return end.finish_reason == "length" or isinstance(end.stop_reason, str)
