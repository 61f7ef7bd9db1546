"""The grammar of an answer that must call tools: JSON, which `pagewire.shared.chat.formats.forced` reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.shared.messages.client import ToolChoice


def tool_grammar(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None, *, single: bool) -> dict[str, Any]:
    """Returns the JSON schema of the answer.

    With a `choice`, the answer is the arguments of that tool. Otherwise it is an array of one or more calls, or of
    exactly one with `single`. Each call has a `name` and `parameters`, whose schema is a resource of its own, so that
    references in it stay as they are.
    """
    functions = [tool["function"] for tool in tools]
    if choice is not None:
        return next(parameters_of(function) for function in functions if function["name"] == choice.function.name)
    limit = {"maxItems": 1} if single else {}
    calls = call_schema(functions)
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls["anyOf"]}, "$defs": calls["$defs"]}


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of the functions."""
    return {
        "anyOf": [_call(function["name"], index) for index, function in enumerate(functions)],
        "$defs": {
            str(index): {"$id": f"tool:{index}", **parameters_of(function)} for index, function in enumerate(functions)
        },
    }


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a function's arguments, which are an object."""
    schema: dict[str, Any] = function.get("parameters") or {}
    return {"type": "object", **schema}


def _call(name: str, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
