"""What a request asks to continue: one prompt, several, or a conversation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from pagewire.services.tokenizer.chat.conversation import conversation_of
from pagewire.services.tokenizer.chat.layout import Conversation
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import GenerateRequest

MAX_PROMPTS = 256
"""Prompts in one request."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as text."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Ids:
    """Prompts as token ids."""

    prompts: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: one prompt once the chat template has laid it out."""

    conversation: Conversation


def prompts_of(request: GenerateRequest) -> Texts | Ids | Chat:
    """What a request asks to continue.

    Raises:
        InvalidRequest: not exactly one of `prompt` and `messages`, nothing in it, several kinds mixed, or too many.
    """
    prompt, messages = request.prompt, request.messages
    if messages is not None and prompt is None:
        return Chat(conversation_of(request, messages))
    if prompt is None or messages is not None:
        raise InvalidRequest("give exactly one of prompt and messages")
    if isinstance(prompt, str):
        return Texts([prompt])
    if not prompt:
        raise InvalidRequest("prompt is empty: give text, token ids, or several of either")
    if _all_ids(prompt):
        return Ids([prompt])
    return _batch(prompt)


def _batch(prompts: Sequence[int | str | Sequence[int]]) -> Texts | Ids:
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"there are {len(prompts)} prompts, at most {MAX_PROMPTS} fit into one request")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) == len(prompts):
        return Texts(texts)
    ids = [prompt for prompt in prompts if not isinstance(prompt, str | int)]
    if len(ids) == len(prompts):
        return Ids(ids)
    raise InvalidRequest("the prompts are of several kinds: give either texts or lists of token ids")


def check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuses prompts without tokens, and tokens that the model does not have.

    Raises:
        InvalidRequest
    """
    for index, ids in enumerate(prompts):
        if not ids:
            raise InvalidRequest(f"prompt {index} is empty: give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            token = low if low < 0 else high
            raise InvalidRequest(f"prompt {index} has token {token}, outside the vocabulary of {vocab_size} tokens")


def _all_ids(prompt: Sequence[int | str | Sequence[int]]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(entry, int) for entry in prompt)
