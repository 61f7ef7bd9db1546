"""Decodes the bodies of Ollama's `/api/chat` and `/api/generate` into fields of a chat or of a completion."""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from pagewire.services.gateway.requests.api_elements import OLLAMA_FIELDS, OLLAMA_OPTIONS, Treatment, names_of
from pagewire.services.gateway.requests.sampling_fields import converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields, check_count
from pagewire.shared.errors import invalid_field
from pagewire.shared.messages.client import SamplingParams

RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Sampling parameters that Ollama's options have other names for."""
_WHOLE = frozenset(field.name for field in msgspec.structs.fields(SamplingParams) if field.type in (int, int | None))
"""Sampling parameters that are whole numbers. Ollama cuts off what 128.5 has after the point."""
_LEAST = {"num_predict": 1, "seed": 0}
"""Least values of options; a smaller one, such as -1, stands for the default."""


class FunctionCall(msgspec.Struct):
    """The function that a call names."""

    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class ToolCall(msgspec.Struct):
    """A call that an assistant has made."""

    function: FunctionCall
    id: str = ""


class Turn(msgspec.Struct):
    """A turn of the conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    """Tool whose result the turn holds."""
    tool_call_id: str | None = None
    """Call whose result the turn holds; by default the first call of the tool without a result."""


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields that both routes have."""

    model: str = ""
    stream: bool = True
    """Whether the answer is a stream of lines, as it is by default."""
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema that the answer keeps to."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Ollama's names of sampling parameters, such as `num_predict`; the table at the end lists them."""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """Whether, or how much, the model reasons, if its chat template lets the request decide."""
    keep_alive: str | float | None = None
    """Without effect: the server decides when a model is unloaded (`--idle-unload`)."""
    logprobs: bool = False
    """Whether the log-probabilities of tokens are part of the answer."""
    top_logprobs: int = 0
    """Number of the likeliest tokens that are shown with each token; needs `logprobs`."""


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The fields of `/api/chat`."""

    messages: list[Turn] = msgspec.field(default_factory=list)
    """The conversation; without one the request loads the model. The answer goes on where a last text of the assistant
    ends."""
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The fields of `/api/generate`."""

    prompt: str = ""
    """Prompt of the user; without it the request loads the model."""
    system: str = ""
    raw: bool = False
    """Whether the model continues the prompt as it is, without its chat template."""


MAX_MESSAGE = 200
"""Characters of an error that shows a value."""
R = TypeVar("R", bound=OllamaRequest)
FREE_FORM = frozenset({"format", "messages", "options", "tools"})
"""Fields whose values may have any form."""


def decode(body: bytes, kind: type[R], unknown: UnknownFields) -> R:
    """Returns the request in a body.

    Raises:
        InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported.
    """
    names = kind.__struct_fields__
    fields = read_fields(body, OLLAMA_FIELDS.keys() | set(names), "request", unknown, free_form=FREE_FORM)
    for name in fields.keys() & names_of(OLLAMA_FIELDS, Treatment.REFUSED):
        if fields[name]:
            raise invalid_field(name, "is not supported: leave it out")
    request = converted({name: fields[name] for name in fields.keys() & set(names)}, kind, "request")
    if request.keep_alive in (0, "0") and not _has_text(request):
        raise invalid_field("keep_alive", "cannot unload a model: the server does, with --idle-unload")
    return request


def loads(request: OllamaRequest) -> bool:
    """Returns whether a request asks for no text: it loads its model."""
    return not _has_text(request)


def chat_fields(request: OllamaChatRequest | OllamaGenerateRequest, unknown: UnknownFields) -> dict[str, Any]:
    """Returns the fields of the chat that means the same.

    Raises:
        InvalidRequest: a message has images, or the format or an option is malformed.
    """
    fields = _common_fields(request, unknown)
    if isinstance(request, OllamaChatRequest):
        fields["messages"] = turns = _turns(request.messages)
        if turns and turns[-1]["role"] == "assistant" and turns[-1]["content"] and "tool_calls" not in turns[-1]:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.tools:
            fields["tools"] = [{"type": "function", **tool} for tool in request.tools]
    else:
        system = [{"role": "system", "content": request.system}] if request.system else []
        fields["messages"] = [*system, {"role": "user", "content": request.prompt}]
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if isinstance(request.think, str):
        fields["reasoning_effort"] = request.think
    elif request.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.think}
    return fields


def completion_fields(request: OllamaGenerateRequest, unknown: UnknownFields) -> dict[str, Any]:
    """Returns the fields of the completion that means the same as a raw prompt.

    Raises:
        InvalidRequest: the format or an option is malformed.
    """
    fields = _common_fields(request, unknown) | {"prompt": request.system + request.prompt}
    return fields | ({"logprobs": request.top_logprobs} if request.logprobs else {})


def _common_fields(request: OllamaRequest, unknown: UnknownFields) -> dict[str, Any]:
    if request.top_logprobs and not request.logprobs:
        raise invalid_field("top_logprobs", "needs logprobs: set it to true")
    return {
        "model": request.model,
        "stream": request.stream,
        "response_format": _response_format(request.format),
        **_sampling(request.options, unknown),
    }


def _sampling(options: dict[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    """Returns the sampling parameters that options mean."""
    check_count(options, "options")
    sampling = {}
    for name, value in options.items():
        if value is None:
            continue
        treatment = OLLAMA_OPTIONS.get(name)
        if treatment is None:
            unknown.add(name, OLLAMA_OPTIONS)
        elif treatment is Treatment.LEFT_OUT:
            unknown.leave_out("option", name)
        elif name == "stop":
            sampling[name] = value
        elif treatment is Treatment.BUILT:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise invalid_field("options", f"has a {name} that is no number: {value!r}"[:MAX_MESSAGE])
            whole = RENAMED.get(name, name) in _WHOLE
            if whole and abs(value) >= 1 << 63:
                raise invalid_field("options", f"has a {name} of more than 64 bits: give a smaller one")
            if value >= _LEAST.get(name, value):
                sampling[RENAMED.get(name, name)] = int(value) if whole else value
    return sampling


def _response_format(form: str | dict[str, Any] | None) -> dict[str, Any] | None:
    match form:
        case None | "":
            return None
        case "json":
            return {"type": "json_object"}
        case dict():
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": form}}
    raise invalid_field("format", 'is unknown: send "json" or a JSON schema')


def _turns(messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """Returns the messages of a chat. Calls get ids, and results those of their calls: Ollama's may have none."""
    turns: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        if message.images:
            raise invalid_field("messages", f"[{index}].images are not supported: text is the only kind")
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                (call.id or f"call{index:02}{number:03}", call.function)
                for number, call in enumerate(message.tool_calls)
            ]
            waiting = [(call_id, function.name) for call_id, function in calls]
            turn["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": function.name, "arguments": function.arguments},
                }
                for call_id, function in calls
            ]
        if message.role == "tool":
            turn["tool_call_id"] = message.tool_call_id or _take_id(waiting, message.tool_name)
            if message.tool_name:
                turn["name"] = message.tool_name
        turns.append(turn)
    return turns


def _take_id(waiting: list[tuple[str, str]], tool: str | None) -> str:
    """Removes the first call of a tool that waits for its result, and returns its id.

    >>> calls = [("a", "look"), ("b", "read")]
    >>> _take_id(calls, "read"), calls
    ('b', [('a', 'look')])
    """
    for entry in waiting:
        if not tool or entry[1] == tool:
            waiting.remove(entry)
            return entry[0]
    return "call00000"


def _has_text(request: OllamaRequest) -> bool:
    match request:
        case OllamaChatRequest():
            return bool(request.messages)
        case OllamaGenerateRequest():
            return bool(request.prompt)
    return False
