"""The results of offline generation, with the names of vLLM's module and the attribute names of its classes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.shared.messages.client import ChatFormat, Choice, PromptLogprobs, Result, TokenLogprobs, Usage
from pagewire.shared.messages.request_metrics import Metrics

CompletionOutput = Choice
"""One completion."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None if the request had its ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    """Log-probabilities of each token of the prompt; None for the first token."""
    outputs: list[Choice]
    usage: Usage
    finished: bool = True
    metrics: Metrics | None = None
    """Times of the request's stages; None until it ends."""
    chat_format: ChatFormat | None = None
    """Format by which `pagewire.read_message` finds tool calls and reasoning; None: the texts have none."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were in the prefix cache."""
        return self.usage.cached_tokens


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One beam."""

    tokens: list[int]
    """Token ids of the prompt and of the beam."""
    text: str
    """Text of all tokens, special ones included."""
    cum_logprob: float
    """Sum of the log-probabilities of the generated tokens."""
    logprobs: list[TokenLogprobs]
    """Log-probabilities of each generated token."""
    finish_reason: str
    stop_reason: str | int | None = None


class BeamSearchOutput(msgspec.Struct):
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def output_of(request: Mapping[str, Any], result: Result, prompt: str | None = None) -> RequestOutput:
    """Returns the result of a request with one prompt, with `return_token_ids`. `prompt`: text of a conversation."""
    own_prompt = request.get("prompt")
    return RequestOutput(
        request_id=result.request_id,
        prompt=own_prompt if isinstance(own_prompt, str) else prompt,
        prompt_token_ids=(result.prompt_token_ids or [[]])[0],
        prompt_logprobs=None if result.prompt_logprobs is None else result.prompt_logprobs[0],
        outputs=result.choices,
        usage=result.usage,
        metrics=result.metrics,
        chat_format=result.chat_format,
    )
