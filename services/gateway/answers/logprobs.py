"""Log-probabilities in the formats of OpenAI's completions and chat completions."""

from collections.abc import Iterable, Sequence

import msgspec

from pagewire.services.gateway.answers.openai_shapes import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from pagewire.shared.messages.client import Logprob, TokenLogprobs


def completion_logprobs(tokens: Iterable[TokenLogprobs], offset: int = 0) -> CompletionLogprobs:
    """Returns the log-probabilities of consecutive tokens, the first of which begins `offset` characters in the text.

    As in vLLM, the likeliest tokens of each position include the token itself: there are up to one more than asked for.
    """
    columns = CompletionLogprobs([], [], [], [])
    for candidates in tokens:
        token = next(iter(candidates.values()))
        text = token.decoded_token or ""
        likely: dict[str, float] = {}
        for candidate in candidates.values():
            likely.setdefault(candidate.decoded_token or "", candidate.logprob)
        columns.text_offset.append(offset)
        columns.token_logprobs.append(token.logprob)
        columns.tokens.append(text)
        columns.top_logprobs.append(likely)
        offset += len(text)
    return columns


def echoed_logprobs(first: str, prompt: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
    """Returns the log-probabilities of a prompt, whose first token has the text `first` and no log-probability."""
    rest = completion_logprobs((candidates for candidates in prompt if candidates is not None), len(first))
    return CompletionLogprobs(
        [0, *rest.text_offset], [None, *rest.token_logprobs], [first, *rest.tokens], [None, *rest.top_logprobs]
    )


def joined(left: CompletionLogprobs, right: CompletionLogprobs) -> CompletionLogprobs:
    """Returns the columns of two texts as those of both in a row."""
    return CompletionLogprobs(
        left.text_offset + right.text_offset,
        left.token_logprobs + right.token_logprobs,
        left.tokens + right.tokens,
        left.top_logprobs + right.top_logprobs,
    )


def chat_logprobs(tokens: Iterable[TokenLogprobs], top: int) -> ChatLogprobs:
    """Returns the log-probabilities of tokens, each with the `top` likeliest ones, the most likely first; -1: all."""
    content = []
    for candidates in tokens:
        token = next(iter(candidates.values()))
        likely = sorted(candidates.values(), key=lambda candidate: candidate.rank or 0)[: None if top < 0 else top]
        content.append(ChatTokenLogprob(*_columns(token), [TopLogprob(*_columns(candidate)) for candidate in likely]))
    return ChatLogprobs(content)


def _columns(token: Logprob) -> tuple[str, float, list[int]]:
    """Returns a token's text, log-probability and bytes."""
    text = token.decoded_token or ""
    return text, token.logprob, list(text.encode()) if isinstance(token.bytes, msgspec.UnsetType) else token.bytes
