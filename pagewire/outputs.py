"""The results of offline generation, with the names of vLLM's module and the attribute names of its classes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.shared.messages.client import ChatFormat, Choice, Metrics, PromptLogprobs, Result, TokenLogprobs, Usage

CompletionOutput = Choice
"""One completion."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None if its ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    """Of each token of the prompt; the first one has None."""
    outputs: list[Choice]
    usage: Usage
    finished: bool = True
    metrics: Metrics | None = None
    """What the request has waited for; None while it goes on."""
    chat_format: ChatFormat | None = None
    """With which `pagewire.read_message` finds tool calls and reasoning in the texts; None: there are none."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were in the prefix cache."""
        return self.usage.cached_tokens


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One beam."""

    tokens: list[int]
    """With those of the prompt."""
    text: str
    """Of all of these tokens, special ones included."""
    cum_logprob: float
    """Sum of the log-probabilities of the generated tokens."""
    logprobs: list[TokenLogprobs]
    """Of each generated token."""
    finish_reason: str
    stop_reason: str | int | None = None


class BeamSearchOutput(msgspec.Struct):
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def output_of(request: Mapping[str, Any], result: Result, prompt: str | None = None) -> RequestOutput:
    """Returns the result of a request with one prompt, which asked for `return_token_ids`. `prompt`: its text."""
    asked = request.get("prompt")
    return RequestOutput(
        request_id=result.request_id,
        prompt=asked if isinstance(asked, str) else prompt,
        prompt_token_ids=(result.prompt_token_ids or [[]])[0],
        prompt_logprobs=None if result.prompt_logprobs is None else result.prompt_logprobs[0],
        outputs=result.choices,
        usage=result.usage,
        metrics=result.metrics,
        chat_format=result.chat_format,
    )
