"""The answers of Ollama's `/api/chat` and `/api/generate`, whole or a line of a stream."""

from datetime import UTC, datetime
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from typing_extensions import override

from pagewire.services.gateway.answers.openai_shapes import ChatTokenLogprob
from pagewire.shared.messages.client import Choice, FinalChoice, Usage
from pagewire.shared.messages.request_metrics import Metrics


class CalledFunction(msgspec.Struct):
    """The function that a call names."""

    index: int
    """Index of the call in its message."""
    name: str
    arguments: dict[str, Any]


class MadeCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: CalledFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message of the assistant, or the next part of one."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    """Reasoning before the answer."""
    tool_calls: list[MadeCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """The fields that the answers of both routes have. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    """Tokens of the prompt."""
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    """Tokens of the answer."""
    eval_duration: int | UnsetType = UNSET

    @classmethod
    def of(cls, model: str, message: OllamaMessage) -> Self:
        """Returns an answer, or a line of one, that has not ended."""
        raise NotImplementedError

    def end(self, choice: Choice | FinalChoice, usage: Usage, metrics: Metrics | None) -> None:
        """Adds why the answer has ended, its numbers of tokens and its times."""
        self.done = True
        self.done_reason = "length" if choice.finish_reason == "length" else "stop"
        self.prompt_eval_count, self.eval_count = usage.prompt_tokens, usage.completion_tokens
        if metrics is not None:
            self.total_duration, self.load_duration = _nanoseconds(metrics.e2e_latency), 0
            self.prompt_eval_duration = _nanoseconds(metrics.prefill_time)
            self.eval_duration = _nanoseconds(metrics.decode_time)

    def end_load(self) -> None:
        """Adds that the model is loaded, which is all that the request asked for."""
        self.done, self.done_reason = True, "load"


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """The answer of `/api/chat`, or a line of it."""

    message: OllamaMessage

    @classmethod
    @override
    def of(cls, model: str, message: OllamaMessage) -> Self:
        return cls(model=model, created_at=now(), message=message)


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """The answer of `/api/generate`, or a line of it."""

    response: str
    thinking: str | UnsetType = UNSET
    """Reasoning before the answer."""

    @classmethod
    @override
    def of(cls, model: str, message: OllamaMessage) -> Self:
        return cls(model=model, created_at=now(), response=message.content, thinking=message.thinking)


def now() -> str:
    """Returns the time as Ollama writes it, such as `2026-11-27T12:11:37.450365Z`."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float | None) -> int:
    return round(1e9 * (seconds or 0.0))
