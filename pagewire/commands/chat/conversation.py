"""What is said in a chat, and how the model is to answer. No input or output happens here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.services.tokenizer import sampling
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams

FIXED = ("n", "beam_width", "length_penalty")
"""Sampling parameters that a chat cannot set: a conversation goes on from one answer."""
PARAMETERS = tuple(name for name in SamplingParams.__struct_fields__ if name not in FIXED)
"""Those that it can set."""

Message = dict[str, str]
"""`role` and `content`."""


@dataclass
class Conversation:
    """The turns of a chat, its system message and its sampling parameters."""

    system: str = ""
    """Empty: none is sent, and the model's chat template decides."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The parameters that were set, by their names in `SamplingParams`; the model chooses the others."""
    turns: list[Message] = field(default_factory=list)
    """What the user and the assistant have said."""

    def messages(self) -> list[Message]:
        """Returns the system message, if there is one, and all turns."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self.turns

    def ask(self, text: str) -> list[Message]:
        """Adds what the user says; returns the messages that the model is to answer."""
        self.turns.append({"role": "user", "content": text})
        return self.messages()

    def answer(self, text: str) -> None:
        """Adds what the assistant says. An answer without a text takes its question back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self) -> None:
        """Forgets all turns; the system message and the sampling parameters stay."""
        self.turns.clear()

    def set(self, name: str, text: str) -> None:
        """Sets a sampling parameter from a text: JSON, or a bare word where a string is wanted.

        Raises:
            InvalidRequest: there is no such parameter, or the value is of the wrong kind or out of range.
        """
        if name not in PARAMETERS:
            raise InvalidRequest(f"there is no parameter {name} in a chat; these can be set: {', '.join(PARAMETERS)}")
        changed = self.sampling | {name: _value(text)}
        params = as_params(changed)
        self.sampling[name] = getattr(params, name)

    def unset(self, name: str) -> None:
        """Leaves a sampling parameter to the model again.

        Raises:
            InvalidRequest: it was not set.
        """
        if name not in self.sampling:
            raise InvalidRequest(f"{name} is not set")
        del self.sampling[name]


def as_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Returns checked sampling parameters. Token ids are not checked here: only the service knows the vocabulary.

    Raises:
        InvalidRequest: a value is of the wrong kind or out of range; names the parameter.
    """
    try:
        params = msgspec.convert(dict(fields), SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise InvalidRequest(f"{place.rstrip('`')}: {reason[0].lower()}{reason[1:]}") from error
    sampling.check(params, vocab_size=2**31)
    return params


def _value(text: str) -> Any:
    """Returns what a text means as JSON; a text that is none stands for itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
