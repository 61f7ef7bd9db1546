"""The tools of OpenAI's responses as functions of a chat, and the names by which a client knows them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.services.gateway.requests.api_elements import RESPONSES_TOOLS, Treatment
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import invalid_field

_FUNCTION_FIELDS = ("description", "parameters", "strict")
INPUT = "input"
"""The one argument of a function that stands for a custom tool, which takes a free text."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    """Namespace that the tool belongs to; empty: none."""
    custom: bool = False
    """Whether a call has a free text instead of arguments."""


@dataclass(slots=True)
class ResponsesTools:
    """The functions of a chat that stand for the tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """Tools of the chat, in its shape."""
    by_function: dict[str, ClientTool] = field(default_factory=dict)
    """Tools of the client by the name of their function."""

    def add(self, tools: Iterable[Any], unknown: UnknownFields, namespace: str = "") -> None:
        """Adds tools of a request; hosted ones are left out.

        Raises:
            InvalidRequest: a tool is malformed.
        """
        for tool in tools:
            match tool:
                case {"type": "namespace", "name": str(name), "tools": list(inner)} if not namespace:
                    self.add(inner, unknown, name)
                case {"type": "function" | "custom" as kind, "name": str(name)}:
                    self._offer(ClientTool(name, namespace, kind == "custom"), tool)
                case {"type": str(kind)} if RESPONSES_TOOLS.get(kind) is not Treatment.BUILT:
                    unknown.leave_out("tool", kind)
                case _:
                    raise invalid_field("tools", "has a malformed tool: give each a type, and functions a name")

    def choice(self, choice: str | dict[str, Any]) -> str | dict[str, Any]:
        """Returns the chat's `tool_choice`; of `allowed_tools`, the other functions go.

        Raises:
            InvalidRequest: the choice names no tool that was given, or one that is left out.
        """
        match choice:
            case str():
                return choice
            case {"type": "allowed_tools", "tools": list(allowed)}:
                names = {self._function_of(tool) for tool in allowed if isinstance(tool, dict)}
                self.functions = [each for each in self.functions if each["function"]["name"] in names]
                if not self.functions:
                    raise invalid_field("tool_choice", "allows no tool that can be called here")
                return str(choice.get("mode", "auto"))
            case {"type": "function" | "custom", "name": str()}:
                return {"type": "function", "function": {"name": self._function_of(choice)}}
        kind = choice.get("type")
        raise invalid_field("tool_choice", f"of type {kind} is not supported: name a function or a custom tool")

    def _offer(self, tool: ClientTool, described: Mapping[str, Any]) -> None:
        """Adds a function or a custom tool."""
        name = function_name(tool.namespace, tool.name)
        function = {name: described[name] for name in _FUNCTION_FIELDS if described.get(name) is not None}
        if tool.custom:
            function = {"description": _custom_description(described), "parameters": _CUSTOM_PARAMETERS}
        self.functions.append({"type": "function", "function": {"name": name, **function}})
        self.by_function[name] = tool

    def _function_of(self, tool: Mapping[str, Any]) -> str:
        """Returns the name of the function that stands for a tool, which may be named without its namespace."""
        name = function_name(tool.get("namespace"), str(tool.get("name")))
        if name in self.by_function:
            return name
        return next((known for known, each in self.by_function.items() if each.name == tool.get("name")), name)


_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


def function_name(namespace: object, name: str) -> str:
    """Returns the name of the function that stands for a tool in a namespace.

    >>> function_name("mcp__files__", "read"), function_name("mail", "send"), function_name(None, "shell")
    ('mcp__files__read', 'mail__send', 'shell')
    """
    if not isinstance(namespace, str) or not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def custom_input(arguments: str) -> str:
    """Returns the free text of a call of a custom tool; a model may have written other arguments, or no end.

    >>> custom_input('{"input": "*** Begin Patch"}')
    '*** Begin Patch'
    """
    try:
        decoded = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = decoded.get(INPUT)
    return text if isinstance(text, str) else arguments


def _custom_description(tool: Mapping[str, Any]) -> str:
    """Returns the description of a custom tool, with the grammar of its text, which the model has to keep to."""
    texts = [str(tool.get("description") or "")]
    match tool.get("format"):
        case {"type": "grammar", "definition": str(definition)}:
            texts.append(f"The input has this form:\n{definition}")
    return "\n\n".join(filter(None, texts))
