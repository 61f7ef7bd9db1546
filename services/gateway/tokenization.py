"""`/tokenize` and `/detokenize`, with vLLM's bodies and answers."""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway.connection import read_body
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatMessage
from pagewire.shared.messages.tokenize import TokenizeRequest

T = TypeVar("T")


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """By default a prompt gets special tokens, and a conversation does not."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    """Whether the answer has the tokens as the vocabulary spells them."""


class TokenizeAnswer(msgspec.Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The tokens of a text."""

    tokens: list[int]
    model: str = ""


class DetokenizeAnswer(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class Tokenization:
    """The handlers of both routes."""

    def __init__(self, client: AsyncClient, body_limit: int) -> None:
        self._client = client
        self._body_limit = body_limit

    async def tokenize(self, request: Request) -> Response:
        """Answers with the tokens of a text or of a conversation."""
        body = await self._read(request, TokenizeBody)
        client = await self._client.for_tenant(request.scope.get("tenant", ""))
        asked = TokenizeRequest(
            text=body.prompt,
            messages=body.messages,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            return_token_strs=bool(body.return_token_strs),
        )
        reply = await client.tokenize_request(asked, body.model)
        lengths = {info.name: info.max_model_len for info in await client.models()}
        length = lengths.get(body.model) or next(iter(lengths.values()))
        return _json(TokenizeAnswer(len(reply.token_ids), length, reply.token_ids, reply.token_strs))

    async def detokenize(self, request: Request) -> Response:
        """Answers with the text of tokens, special tokens spelled out."""
        body = await self._read(request, DetokenizeBody)
        client = await self._client.for_tenant(request.scope.get("tenant", ""))
        return _json(DetokenizeAnswer(await client.detokenize(body.tokens, body.model, keep_prefix=True)))

    async def _read(self, request: Request, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(await read_body(request.scope, request.receive, self._body_limit), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not valid: {error}") from error


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
