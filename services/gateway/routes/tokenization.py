"""`/tokenize` and `/detokenize`, with vLLM's bodies and answers, and Anthropic's `/v1/messages/count_tokens`."""

from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway.http.connection import read_body
from pagewire.services.gateway.requests import anthropic_request
from pagewire.services.gateway.requests.sampling_fields import converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.messages.client import ChatMessage
from pagewire.shared.messages.tokenize import TokenizeRequest

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
T = TypeVar("T", bound=msgspec.Struct)


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    model: str = ""
    prompt: str | None = None
    """Text. Exactly one of `prompt` and `messages` must be given."""
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """By default a prompt gets special tokens, and a conversation does not."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False
    """Whether the answer has the tokens as the vocabulary spells them."""


class TokenizeAnswer(msgspec.Struct):
    """The tokens of a text."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Context length of the model, in tokens."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as the vocabulary spells them, if the request asks for them."""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The tokens of a text."""

    tokens: list[TokenId]
    model: str = ""


class DetokenizeAnswer(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class TokenCount(msgspec.Struct):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: int


NOT_BUILT = frozenset({"chat_template", "media_io_kwargs", "mm_processor_kwargs"})
"""Fields of vLLM that change the tokens and are refused."""
FREE_FORM = frozenset({"chat_template_kwargs", "messages", "tools"})
"""Fields whose values may have any form."""
COUNTED = FREE_FORM | {"add_generation_prompt", "continue_final_message"}
"""Fields of a chat that the number of its prompt's tokens depends on."""


class Tokenization:
    """The handlers of `/tokenize`, `/detokenize` and `/v1/messages/count_tokens`."""

    def __init__(self, client: AsyncClient, body_limit: int, *, strict: bool = False) -> None:
        """`strict`: whether unknown fields are refused."""
        self._client = client
        self._body_limit = body_limit
        self._strict = strict

    async def tokenize(self, request: Request) -> Response:
        """Answers with the tokens of a text or of a conversation."""
        body, unknown = await self._read(request, TokenizeBody)
        client = await self._client_of(request)
        conversation = TokenizeRequest(
            text=body.prompt,
            messages=body.messages,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
            return_token_strs=body.return_token_strs,
        )
        reply = await client.tokenize_request(conversation, body.model)
        lengths = {info.name: info.max_model_len for info in await client.models()}
        length = lengths.get(body.model) or next(iter(lengths.values()))
        return _json(TokenizeAnswer(len(reply.token_ids), length, reply.token_ids, reply.token_strs), unknown)

    async def detokenize(self, request: Request) -> Response:
        """Answers with the text of tokens, special tokens spelled out."""
        body, unknown = await self._read(request, DetokenizeBody)
        client = await self._client_of(request)
        return _json(DetokenizeAnswer(await client.detokenize(body.tokens, body.model, keep_prefix=True)), unknown)

    async def count_tokens(self, request: Request) -> Response:
        """Answers with the number of tokens of the prompt that a messages request would have."""
        unknown = UnknownFields(strict=self._strict)
        body = anthropic_request.decode(await self._body(request), unknown)
        chat = anthropic_request.chat_fields(body, unknown)
        fields = {name: chat[name] for name in COUNTED & chat.keys()}
        conversation = converted(fields, TokenizeRequest, "messages request")
        client = await self._client_of(request)
        return _json(TokenCount(len((await client.tokenize_request(conversation, body.model)).token_ids)), unknown)

    async def _read(self, request: Request, kind: type[T]) -> tuple[T, UnknownFields]:
        """Returns the body and its unknown fields."""
        unknown = UnknownFields(strict=self._strict)
        known, name = kind.__struct_fields__, f"{request.url.path[1:]} request"
        fields = read_fields(await self._body(request), known, name, unknown, not_built=NOT_BUILT, free_form=FREE_FORM)
        return converted(fields, kind, name), unknown

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._body_limit)

    async def _client_of(self, request: Request) -> AsyncClient:
        return await self._client.for_tenant(request.scope.get("tenant", ""))


def _json(answer: msgspec.Struct, unknown: UnknownFields) -> Response:
    headers = {name.decode(): value.decode() for name, value in unknown.headers()}
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")
