"""The asynchronous client, which talks to the services over NATS, without a gateway."""

import asyncio
import secrets
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar
from weakref import WeakSet

import msgspec

from pagewire.client import frames
from pagewire.client.adapter_changes import change_adapter
from pagewire.client.batch_inbox import BatchInbox
from pagewire.client.directory import Directory
from pagewire.client.stream import Stream
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.client_protocol.client_requests import field_of
from pagewire.shared.errors import (
    BusUnavailable,
    InvalidRequest,
    ModelNotFound,
    NoResponders,
)
from pagewire.shared.messages.adapters import LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.messages.client import ErrorFrame, GenerateRequest, ModelInfo, Result, SamplingParams
from pagewire.shared.messages.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from pagewire.shared.security import credentials
from pagewire.shared.settings import config

Prompt = str | Sequence[int | str | Sequence[int]]
"""Text, token ids, or several of either."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: `{"role": ..., "content": ...}` for each turn; content is text, or a list of text parts."""

T = TypeVar("T", TokenizeReply, DetokenizeReply)

CLOSED = "the client is closed"
"""Message of the error for what was still running."""


class AsyncClient:
    """A connection to a running stack: `async with AsyncClient() as client: ...`

    Args:
        url: URL of the broker; by default that of the settings in the environment, such as `PAGEWIRE_NATS_URL`.
        api_key: the key of `--api-key`, or that of the tenant; empty: none; by default that of the environment.
        tenant: name of the tenant in the file of keys; empty: none; by default that of the environment.
        model: the served name; by default the only model that is served.
        connect_timeout: seconds within which the broker must answer.
        user: NATS user and password that are used instead of a key; by default, unless `api_key` is given, those of the
            environment.
        tls: how the broker's certificate is checked, and which certificate it gets; by default the system's way, with
            a url `tls://...`.
        bus: an open connection with inboxes that the client may read, used instead of `url`; the client does not close
            it.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        model: str = "",
        connect_timeout: float = 5.0,
        user: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        bus: Bus | None = None,
    ) -> None:
        if bus is None and None in (url, api_key, tenant):
            settings = config.load({})
            url = config.nats_urls(settings) if url is None else url
            if user is None and api_key is None and settings.nats_user:
                user = settings.nats_user, settings.nats_password
            api_key = settings.api_key if api_key is None else api_key
            tenant = settings.tenant if tenant is None else tenant
        self._url = url or ""
        self._api_key = api_key or ""
        self._tenant = tenant = tenant or ""
        self._user = user
        self._tls = tls
        self._model = model
        self._connect_timeout = connect_timeout
        self._owns_bus = bus is None
        self._bus = bus
        self._directory = Directory(bus, model, tenant) if bus is not None else None
        self._batch_inbox = BatchInbox(bus) if bus is not None else None
        self._streams: WeakSet[Stream] = WeakSet()  # which end with the connection
        self._tenants: dict[str, AsyncClient] = {}
        self._adding_tenant = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._bus is None:
            user, password = self._user or credentials.of_client(self._tenant, self._api_key)
            self._bus = await nats.connect(
                self._url,
                name="client",
                user=user,
                password=password,
                inbox_prefix=subjects.client_inbox(self._tenant),
                connect_timeout=self._connect_timeout,
                tls=self._tls,
            )
            self._directory = Directory(self._bus, self._model, self._tenant)
            self._batch_inbox = BatchInbox(self._bus)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._owns_bus and self._bus is not None:
            bus, self._bus, self._directory, self._batch_inbox = self._bus, None, None, None
            for stream in list(self._streams):
                stream.fail(BusUnavailable(CLOSED))
            await bus.close()

    async def for_tenant(self, tenant: str) -> "AsyncClient":
        """Returns a client that acts for a tenant over the same connection, whose user must be the gateway's.

        Raises:
            NotPermitted: this user may not act for tenants.
            BusUnavailable: there is no connection.
        """
        if tenant == self._tenant:
            return self
        if tenant not in self._tenants:
            async with self._adding_tenant:
                if tenant not in self._tenants:
                    bus, directory, _ = self._connection()
                    view = await bus.view(subjects.gateway_inbox(tenant))
                    client = AsyncClient(tenant=tenant, model=self._model, bus=view)
                    client._directory = directory.for_tenant(view, tenant)
                    self._tenants[tenant] = client
        return self._tenants[tenant]

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        user: str = "",
        cache_salt: str = "",
        timeout: float = 60.0,
        traceparent: str = "",
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool | None = None,
        return_token_ids: bool = False,
        return_token_origins: bool = False,
        clamp_max_tokens: bool = False,
        fresh: bool = False,
        repeatable: bool = False,
        **fields: Any,
    ) -> Stream:
        """Returns a request whose deltas are read with `async for`. Nothing is sent before that.

        Args:
            prompt: text or token ids to continue, or several of either.
            sampling: all sampling parameters; or pass fields as keywords, such as `max_tokens=64`: the model's
                generation_config decides those that are left out.
            messages: a conversation instead of a prompt; `stream_chat` takes only these.
            add_generation_prompt: whether the template begins the assistant's turn; by default, unless the last message
                is continued.
            continue_final_message: whether the model continues the last message.
            chat_template_kwargs: variables for the model's chat template, such as `enable_thinking`.
            tools: functions that the model may call, in OpenAI's shape; `pagewire.read_message` finds the calls.
            tool_choice: none, auto, required, or `{"type": "function", "function": {"name": ...}}`.
            parallel_tool_calls: whether an answer may have more than one call.
            model: the served name; by default the client's.
            request_id: [A-Za-z0-9_-]{1,64}; by default random. The same id with the same body is the same request.
            priority: requests with lower values run earlier.
            user: user of the request; users of the same priority get equal shares.
            cache_salt: only requests with the same salt share cached prefixes.
            timeout: seconds until the deadline.
            traceparent: W3C trace context that the request continues.
            truncate_prompt_tokens: number of tokens that are kept at the end of a prompt; -1: as many as fit into the
                context.
            add_special_tokens: whether a text gets the model's special tokens around a prompt; by default
                prompts do, and conversations do not.
            return_token_ids: whether the ids of the prompts are part of the answer.
            return_token_origins: whether each delta says if its token was sampled, drafted or forced.
            clamp_max_tokens: whether a `max_tokens` beyond the context becomes what the context leaves.
            fresh: whether `request_id` is new, so that no earlier request is looked for.
            repeatable: whether the request goes on for a while when the loop is left early, as it may be sent again.

        Raises:
            InvalidRequest: an argument is unknown or has the wrong type.
        """
        if sampling is not None and fields:
            raise InvalidRequest(f"give {', '.join(fields)} in `sampling` or as keywords, not both")
        request = {
            "prompt": prompt,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "sampling": fields if sampling is None else sampling,
            "request_id": request_id or secrets.token_hex(12),
            "priority": priority,
            "user": user,
            "cache_salt": cache_salt,
            "timeout_ms": round(timeout * 1000),
        }
        if tools or tool_choice is not None:
            request |= {"tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        optional = {
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "add_special_tokens": add_special_tokens,
            "return_token_ids": return_token_ids or None,
            "return_token_origins": return_token_origins or None,
            "clamp_max_tokens": clamp_max_tokens or None,
        }
        request |= {name: value for name, value in optional.items() if value is not None}
        try:
            body = msgspec.to_builtins(request)
            parsed = msgspec.convert(body, GenerateRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error), field=field_of(error)) from error
        bus, directory, batch_inbox = self._connection()
        new = fresh or not request_id
        stream = Stream(bus, directory, batch_inbox, model, parsed, body, traceparent, fresh=new, repeatable=repeatable)
        if self._owns_bus:
            self._streams.add(stream)
        return stream

    def stream_chat(self, messages: Messages, sampling: SamplingParams | None = None, **options: Any) -> Stream:
        """Returns a request for the model's answer to a conversation. The arguments are those of `stream`."""
        return self.stream(None, sampling, messages=messages, **options)

    async def generate(
        self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **options: Any
    ) -> Result:
        """Sends a request and returns its result. The arguments are those of `stream`.

        Raises:
            RequestError: the request has failed.
            BusUnavailable: there is no connection.
        """
        return await self.stream(prompt, sampling, **options).result()

    async def chat(self, messages: Messages, sampling: SamplingParams | None = None, **options: Any) -> Result:
        """Returns the model's whole answer to a conversation. The arguments are those of `stream`.

        Raises:
            RequestError: the request has failed.
            BusUnavailable: there is no connection.
        """
        return await self.stream_chat(messages, sampling, **options).result()

    async def cancel(self, request_id: str) -> str:
        """Cancels a request of any client of the tenant. Returns cancelled, ended or unknown.

        Raises:
            BusError: no service answers.
        """
        bus, directory, _ = self._connection()
        return await frames.cancel(bus, directory.subject(f"{subjects.CANCEL}.{request_id}"))

    async def models(self) -> list[ModelInfo]:
        """Returns the models that are served.

        Raises:
            Unavailable: no tokenizer answers.
        """
        return await self._connection()[1].models()

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """Returns the token ids of a text.

        Raises:
            RequestError: the text is refused, or no tokenizer answers.
        """
        return (await self.tokenize_request(TokenizeRequest(text), model)).token_ids

    async def tokenize_request(self, request: TokenizeRequest, model: str = "") -> TokenizeReply:
        """Returns the tokens of a text or of a conversation.

        Raises:
            RequestError: the request is refused, or no tokenizer answers.
        """
        return await self._request(subjects.TOKENIZE, model, request, TokenizeReply)

    async def detokenize(self, token_ids: Sequence[int], model: str = "", *, keep_prefix: bool = False) -> str:
        """Returns the text of token ids; with `keep_prefix` also of special tokens that `tokenize` puts before a text.

        Raises:
            RequestError: the ids are refused, or no detokenizer answers.
        """
        request = DetokenizeRequest(list(token_ids), keep_prefix)
        return (await self._request(subjects.DETOKENIZE, model, request, DetokenizeReply)).text

    async def load_adapter(self, name: str, path: str, model: str = "", *, replace: bool = False) -> str:
        """Loads an adapter (LoRA) for all who may use the model; returns the hash of its content.

        Only the user `operator` of the broker may do so.

        Args:
            name: name of the adapter in requests.
            path: its folder or .gguf file, within the executors' `lora_dirs`.
            model: the served name of the model that it changes; by default the client's.
            replace: whether it may take the name of another one, with which running requests end.

        Raises:
            RequestError: the adapter is refused, or no executor answers.
        """
        bus, directory, _ = self._connection()
        return (await change_adapter(bus, directory, model, LoadAdapterRequest(name, path, replace))).digest

    async def unload_adapter(self, name: str, model: str = "") -> str:
        """Removes an adapter; returns the hash of its content, or an empty one if an executor died as it answered.

        Requests that run with it end with it.

        Args:
            name: name of the adapter in requests.
            model: the served name of the model that it changes; by default that of the adapter with this name.

        Raises:
            RequestError: there is no such adapter, or no executor answers.
        """
        bus, directory, _ = self._connection()
        return (await change_adapter(bus, directory, model, UnloadAdapterRequest(name))).digest

    async def _request(self, verb: str, model: str, request: msgspec.Struct, kind: type[T]) -> T:
        _, directory, _ = self._connection()
        name = await directory.resolve(model)
        try:
            reply = await directory.ask(f"{verb}.{subjects.model_token(name)}", msgspec.json.encode(request))
        except NoResponders as error:
            if (base := await directory.base_of(name)) != name:  # detokenizers know no adapters
                return await self._request(verb, base, request, kind)
            raise await directory.absence(name) from error
        if "Nats-Service-Error" in reply.headers:
            refusal = frames.error_of(msgspec.json.decode(reply.data, type=ErrorFrame))
            raise await directory.absence(name) if isinstance(refusal, ModelNotFound) else refusal
        return msgspec.json.decode(reply.data, type=kind)

    def _connection(self) -> tuple[Bus, Directory, BatchInbox]:
        if self._bus is None or self._directory is None or self._batch_inbox is None:
            raise BusUnavailable("the client is not connected: use it as `async with AsyncClient(...) as client:`")
        return self._bus, self._directory, self._batch_inbox
