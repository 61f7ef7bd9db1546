"""Log-probabilities in the formats of OpenAI's completions and chat completions."""

from collections.abc import Iterable, Sequence

from pagewire.services.gateway.answers.openai_shapes import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from pagewire.shared.messages.client import Logprob, TokenLogprobs


def completion_logprobs(found: Iterable[TokenLogprobs], offset: int = 0) -> CompletionLogprobs:
    """Returns the log-probabilities of consecutive tokens, the first of which begins `offset` characters in the text.

    As in vLLM, the likeliest tokens of each position include the token itself: there are up to one more than asked for.
    """
    out = CompletionLogprobs([], [], [], [])
    for each in found:
        own = next(iter(each.values()))
        text = own.decoded_token or ""
        likely: dict[str, float] = {}
        for other in each.values():
            likely.setdefault(other.decoded_token or "", other.logprob)
        out.text_offset.append(offset)
        out.token_logprobs.append(own.logprob)
        out.tokens.append(text)
        out.top_logprobs.append(likely)
        offset += len(text)
    return out


def echoed_logprobs(first: str, prompt: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
    """Returns the log-probabilities of a prompt, whose first token has the text `first` and no log-probability."""
    rest = completion_logprobs((found for found in prompt if found is not None), len(first))
    return CompletionLogprobs(
        [0, *rest.text_offset], [None, *rest.token_logprobs], [first, *rest.tokens], [None, *rest.top_logprobs]
    )


def joined(left: CompletionLogprobs, right: CompletionLogprobs) -> CompletionLogprobs:
    """Returns both parts as one."""
    return CompletionLogprobs(
        left.text_offset + right.text_offset,
        left.token_logprobs + right.token_logprobs,
        left.tokens + right.tokens,
        left.top_logprobs + right.top_logprobs,
    )


def chat_logprobs(found: Iterable[TokenLogprobs], top: int) -> ChatLogprobs:
    """Returns the log-probabilities of tokens, each with the `top` likeliest ones, the most likely first; -1: all."""
    content = []
    for each in found:
        own = next(iter(each.values()))
        likely = sorted(each.values(), key=lambda other: other.rank or 0)[: None if top < 0 else top]
        content.append(ChatTokenLogprob(*_shape(own), [TopLogprob(*_shape(other)) for other in likely]))
    return ChatLogprobs(content)


def _shape(found: Logprob) -> tuple[str, float, list[int]]:
    text = found.decoded_token or ""
    return text, found.logprob, list(text.encode())
