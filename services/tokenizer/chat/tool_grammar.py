"""The grammar of an answer that must call tools: JSON, which `pagewire.shared.chat.formats.forced` reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.shared.messages.client import ToolChoice


def tool_grammar(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None, *, single: bool) -> dict[str, Any]:
    """Returns the JSON schema of the answer.

    With a `choice`, the answer is the arguments of that tool. Otherwise it is an array of one or more calls, or of
    exactly one with `single`. Each call has a `name` and `parameters`.
    """
    functions = [tool["function"] for tool in tools]
    if choice is not None:
        return next(_parameters(function) for function in functions if function["name"] == choice.function.name)
    limit = {"maxItems": 1} if single else {}
    return {
        "type": "array",
        "minItems": 1,
        **limit,
        "items": {"anyOf": [_call(function["name"], index) for index, function in enumerate(functions)]},
        "$defs": {str(index): _moved(_parameters(function), index) for index, function in enumerate(functions)},
    }


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
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


def _moved(schema: Any, index: int) -> Any:
    """Returns a schema with the references that it needs at its new place, `#/$defs/<index>`."""
    if isinstance(schema, list):
        return [_moved(each, index) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, index) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{index}{reference[1:]}"
    return moved
