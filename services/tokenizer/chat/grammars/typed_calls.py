"""The grammar of calls in the formats that write each argument between tags, as plain text or JSON. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.services.tokenizer.chat.grammars.lark import SPACE, symbols
from pagewire.services.tokenizer.chat.tool_grammar import parameters_of
from pagewire.shared.chat.formats import TOOL_TAGS

FREE = "free_arguments"
"""The Lark rule of arguments that follow no schema."""
_PLAIN = frozenset(
    {
        *("$defs", "$schema", "additionalProperties", "definitions"),
        *("description", "properties", "required", "title", "type"),
    }
)
"""Keywords of a schema whose properties may be written one by one."""
_NAME = re.compile(r"[^<>\s{}]+")
_LINE = '"\\n"?'
"""A line break, which is no part of the value beside it."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function."""

    name: str
    required: bool
    schema: Any
    """Schema of its value, with the definitions that it may refer to."""
    is_text: bool
    """Whether its value is written as plain text."""

    @property
    def choices(self) -> list[str] | None:
        """The texts that it may be; None: any one."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def arguments_of(function: Mapping[str, Any], texts: Sequence[str]) -> list[Argument] | None:
    """Returns the arguments of a function in the order of its schema; None: they cannot be written one by one.

    `texts` are the names of those that are texts.
    """
    schema = parameters_of(function)
    properties, required = schema.get("properties", {}), schema.get("required") or []
    if schema.keys() - _PLAIN or not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    if not all(_NAME.fullmatch(name) and isinstance(part, dict) for name, part in properties.items()):
        return None
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [Argument(name, name in required, definitions | part, name in texts) for name, part in properties.items()]


def arguments_rule(calls: str, arguments: Sequence[tuple[Argument, str]], token_ids: Mapping[str, int]) -> str:
    """Returns Lark of the arguments of a call, each with the Lark of its value, which is empty for a text."""
    written = []
    for argument, value in arguments:
        name = json.dumps(argument.name, ensure_ascii=False)
        one = f"{_head(calls, name, token_ids)} {_rest(calls, argument, value, token_ids)} {SPACE}"
        written.append(one if argument.required else f"({one})?")
    return " ".join(written) or '""'


def typed_rules(calls: str, arguments: Mapping[str, str], token_ids: Mapping[str, int]) -> str:
    """Returns the Lark rule `called` of what follows the tag that begins a call, and the rules that it refers to.

    `arguments`: Lark of each tool's arguments, by its name.
    """
    end = symbols(TOOL_TAGS[calls][1], token_ids)
    if calls == "qwen3_coder":
        each = (f"{json.dumps(f'<function={name}>')} {SPACE} {body}" for name, body in arguments.items())
        called, name = f'{SPACE} ({" | ".join(each)}) "</function>" {SPACE} {end} {SPACE}', r"/[^<>\s]+/"
    else:
        each = (f"{json.dumps(name)} {SPACE} {body}" for name, body in arguments.items())
        called, name = f"{SPACE} ({' | '.join(each)}) {end} {SPACE}", r"/[^<>]+/"
    free = f"({_head(calls, name, token_ids)} value {SPACE})*"
    close = _close(calls)
    value = f"value: /(?s:.*)/ {symbols(close, token_ids)}"
    if close not in token_ids:
        closing = close.replace("/", r"\/")
        value = f"value[lazy]: /(?s:.*){closing}/"
    return f"called: {called}\n{FREE}: {free}\n{value}\n"


def _close(calls: str) -> str:
    return "</parameter>" if calls == "qwen3_coder" else "</arg_value>"


def _head(calls: str, name: str, token_ids: Mapping[str, int]) -> str:
    """Returns Lark of what is before a value; `name` is Lark, too."""
    if calls == "qwen3_coder":
        return f'"<parameter=" {name} ">"'
    key, key_end, begin = (symbols(tag, token_ids) for tag in ("<arg_key>", "</arg_key>", "<arg_value>"))
    return f"{key} {name} {key_end} {SPACE} {begin}"


def _rest(calls: str, argument: Argument, value: str, token_ids: Mapping[str, int]) -> str:
    """Returns Lark of a value and the tag behind it."""
    close, line = symbols(_close(calls), token_ids), _LINE if calls == "qwen3_coder" else ""
    if value:
        return f"{SPACE} {value} {SPACE} {close}"
    if argument.choices is None:
        return "value"
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in argument.choices)
    return f"{line} ({choices}) {line} {close}"
