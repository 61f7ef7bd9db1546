"""Checks the tools of a request, and decides the format of its answers. Pure."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import msgspec

from pagewire.services.tokenizer.chat.format_recognition import Formats
from pagewire.services.tokenizer.chat.tool_grammar import tool_grammar
from pagewire.shared.chat.formats import NAMED, REASONING, REQUIRED, TYPED
from pagewire.shared.client_protocol.client_requests import check_free_form
from pagewire.shared.errors import InvalidRequest, invalid_field
from pagewire.shared.messages.client import (
    ChatFormat,
    ChatMessage,
    GenerateRequest,
    SamplingParams,
    StructuredOutputsParams,
    ToolChoice,
)

MAX_TOOLS = 128
"""Maximum number of tools of a request, as with OpenAI."""


def check_tools(request: GenerateRequest, formats: Formats) -> None:
    """Checks the tools of a request, and that the model can use them as `tool_choice` says.

    Raises:
        InvalidRequest: a field is invalid; the message names it and says what to do.
    """
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice == "required" or isinstance(choice, ToolChoice):
            raise invalid_field("tool_choice", "needs tools: give some, or leave it out")
        return
    names = check_shown(request, formats)
    match choice:
        case ToolChoice(function=function):
            if function.name not in names:
                raise invalid_field("tool_choice", f"names {function.name}, but tools has only {', '.join(names)}")
        case None | "auto" if not formats.auto:
            raise invalid_field("tool_choice", "auto is switched off here: set it to none or required, or name a tool")
        case None | "auto" if not formats.tool_calls:
            raise InvalidRequest(
                "tool_choice auto needs to know how the model writes calls, which its chat template does not show: "
                "start the server with --tool-call-parser, or set tool_choice to none",
                field="tool_choice",
            )


def check_shown(request: GenerateRequest, formats: Formats) -> list[str]:
    """Returns the names of the tools. They are checked only as far as the prompt of a request depends on them.

    Raises:
        InvalidRequest: a field is invalid; the message names it and says what to do.
    """
    tools = request.tools or []
    if tools and request.messages is None:
        raise invalid_field("tools", "need messages: give a conversation instead of a prompt")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"there are {len(tools)} tools, at most {MAX_TOOLS} are allowed", field="tools")
    check_free_form("tools", tools)
    names = [_name_of(tool) for tool in tools]
    if tools and request.tool_choice != "none" and not formats.takes_tools:
        raise invalid_field("tools", "cannot be used: the model's chat template does not show them to the model")
    return names


def with_forced_call(request: GenerateRequest) -> SamplingParams:
    """Returns the sampling parameters of a request. If the answer must call tools, the grammar of the calls takes the
    place of the form that the request asks for. `check_tools` has checked the request."""
    choice = request.tool_choice if isinstance(request.tool_choice, ToolChoice) else None
    if not request.tools or (choice is None and request.tool_choice != "required"):
        return request.sampling
    schema = tool_grammar(request.tools, choice, single=not request.parallel_tool_calls)
    return msgspec.structs.replace(request.sampling, structured_outputs=StructuredOutputsParams(json=schema))


def chat_format(request: GenerateRequest, formats: Formats, progress: "Progress") -> ChatFormat | None:
    """Returns the format of the answers to a conversation; None: they are texts without tool calls and reasoning.

    Args:
        request: a request with messages, checked by `check_tools`.
        formats: the model's formats.
        progress: how far the prompt takes the reasoning.
    """
    calls = tool = ""
    if request.tools and request.tool_choice != "none":
        match request.tool_choice:
            case ToolChoice(function=function):
                calls, tool = NAMED, function.name
            case "required":
                calls = REQUIRED
            case _:
                calls = formats.tool_calls
    if not (calls or formats.reasoning):
        return None
    texts = {tool["function"]["name"]: text_arguments(tool["function"]) for tool in request.tools or ()}
    return ChatFormat(
        calls,
        formats.reasoning,
        opened=progress is Progress.BEGUN,
        single=not request.parallel_tool_calls,
        tool=tool,
        texts={name: arguments for name, arguments in texts.items() if arguments} if calls in TYPED else {},
        short_ids=bool(calls) and formats.short_ids,
    )


class Progress(Enum):
    """How far a prompt takes the reasoning of its answer."""

    AHEAD = auto()
    """The answer may begin with reasoning."""
    BEGUN = auto()
    """The prompt ends within reasoning: right behind the opening tag, or in a message to continue."""
    OVER = auto()
    """The reasoning is done, or the model does not reason."""


def progress_of(request: GenerateRequest, formats: Formats, prompt: str) -> Progress:
    """Returns how far the reasoning is in the `prompt` that the chat template has made of a request."""
    if not formats.reasoning:
        return Progress.OVER
    begin, end = REASONING[formats.reasoning]
    if request.continue_final_message:
        text = _last_text(request.messages or ())
        return Progress.BEGUN if text.rfind(begin) > text.rfind(end) else Progress.OVER
    if prompt.rstrip().endswith(begin):
        return Progress.BEGUN
    return Progress.OVER if prompt.rstrip().endswith(end) else Progress.AHEAD


def text_arguments(function: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arguments that are texts by the function's schema."""
    properties = (function.get("parameters") or {}).get("properties")
    return [name for name, schema in properties.items() if _is_text(schema)] if isinstance(properties, dict) else []


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds, values = schema.get("type"), schema.get("enum")
    if kinds is None and isinstance(values, list):
        return all(isinstance(value, str) for value in values)
    return "string" in kinds if isinstance(kinds, list) else kinds == "string"


def _name_of(tool: Mapping[str, Any]) -> str:
    """Returns the name of a tool. Raises InvalidRequest if the tool is no function."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest('tools must be functions: {"type": "function", "function": {"name": ...}}', field="tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid_field("tools", "must have names: each function.name must be a text")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(
            f"tools: the parameters of {name} must be a JSON schema, which is an object", field="tools"
        )
    return name


def _last_text(messages: Sequence[ChatMessage]) -> str:
    content = messages[-1].content
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
