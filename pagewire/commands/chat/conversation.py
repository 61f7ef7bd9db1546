"""The state of a chat: messages and sampling parameters. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.services.tokenizer.validation import sampling_checks
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams

FIXED = ("n", "beam_width", "length_penalty")
"""Sampling parameters that a chat cannot set, because a conversation continues from a single answer."""
PARAMETERS = tuple(name for name in SamplingParams.__struct_fields__ if name not in FIXED)
"""Sampling parameters that a chat can set."""

Message = dict[str, str]
"""A message with `role` and `content`."""


@dataclass
class Conversation:
    """The turns of a chat, its system message and its sampling parameters."""

    system: str = ""
    """System message; empty: none is sent, and the chat template decides."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The parameters that were set, by field name of `SamplingParams`; the others have the model's defaults."""
    turns: list[Message] = field(default_factory=list)
    """Messages of the user and the assistant."""

    def messages(self) -> list[Message]:
        """Returns the system message, if there is one, and all turns."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self.turns

    def ask(self, text: str) -> list[Message]:
        """Adds a message of the user; returns all messages, for the model to answer."""
        self.turns.append({"role": "user", "content": text})
        return self.messages()

    def answer(self, text: str) -> None:
        """Adds the assistant's answer. If it is empty, removes the user's message instead."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self) -> None:
        """Removes all turns; the system message and the sampling parameters stay."""
        self.turns.clear()

    def set(self, name: str, text: str) -> None:
        """Sets a sampling parameter from a text: JSON, or a bare word for a string.

        Raises:
            InvalidRequest: there is no such parameter, or the value has the wrong type or is out of range.
        """
        if name not in PARAMETERS:
            raise InvalidRequest(f"there is no parameter {name} in a chat; these can be set: {', '.join(PARAMETERS)}")
        changed = self.sampling | {name: _value(text)}
        params = as_params(changed)
        self.sampling[name] = getattr(params, name)

    def unset(self, name: str) -> None:
        """Restores the model's own value of a sampling parameter.

        Raises:
            InvalidRequest: the parameter was not set.
        """
        if name not in self.sampling:
            raise InvalidRequest(f"{name} is not set")
        del self.sampling[name]


def as_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Returns checked sampling parameters. Token ids are not checked, because only the service knows the vocabulary.

    Raises:
        InvalidRequest: a value has the wrong type or is out of range; the message names the parameter.
    """
    try:
        params = msgspec.convert(dict(fields), SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise InvalidRequest(f"{place.rstrip('`')}: {reason[0].lower()}{reason[1:]}") from error
    sampling_checks.check(params, vocab_size=2**31)
    return params


def _value(text: str) -> Any:
    """Returns the value of a text as JSON, or the text itself if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
