"""Requests of clients for tokens and texts, and the replies, as maps in JSON or MessagePack."""

from typing import Any

import msgspec

from pagewire.shared.messages.client import ChatMessage


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Request to `pagewire.v1.tokenize.<model>`: exactly one of `text` and `messages`. The other fields mean what they
    mean in `GenerateRequest`."""

    text: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False
    """Whether the answer has the tokens as the vocabulary spells them."""


class TokenizeReply(msgspec.Struct, omit_defaults=True):
    """Reply to a `TokenizeRequest`, and the body of a detokenize request."""

    token_ids: list[int]
    token_strs: list[str] | None = None
    """Each token as the vocabulary spells it, if the request asks for them."""


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request to `pagewire.v1.detokenize.<model>`."""

    token_ids: list[int]
    keep_prefix: bool = False
    """Whether special tokens at the beginning that `tokenize` has put there are spelled out like all others."""


class DetokenizeReply(msgspec.Struct):
    """Reply to a `DetokenizeRequest`."""

    text: str
