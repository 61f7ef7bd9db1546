"""The grammar of a call that a model may make instead of an answer of the requested form."""

import json
import re
from collections.abc import Collection, Mapping

from pagewire.services.tokenizer.chat.lark import SPACE, symbols
from pagewire.shared.chat.formats import HARMONY, NAMED, REQUIRED, TOOL_TAGS, harmony

_TEXT = r"/(?s:.+)/"


def call_rule(calls: str, names: Collection[str], token_ids: Mapping[str, int]) -> str:
    """Returns llguidance's Lark rule `call`; empty: the model may not choose to call.

    Where a call is one JSON object, its tool is one of `names`. Other formats are free behind the tag that begins a
    call, as they are without a requested form.

    Args:
        calls: format of the calls of an answer.
        names: names of the tools.
        token_ids: ids of tags, or of parts of them, that are tokens of their own: no other token has their text.
    """
    if calls in {"", NAMED, REQUIRED}:
        return ""
    if calls in {"hermes", "llama3_json"}:
        key = "arguments" if calls == "hermes" else "parameters"
        properties = {"name": {"enum": sorted(names)}, key: {"type": "object"}}
        schema = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        one = f"%json {json.dumps(schema)}"
        if calls == "llama3_json":
            return f"call: {one}\n"
        begin, end = (symbols(tag, token_ids) for tag in TOOL_TAGS[calls])
        return f"call: ({begin} {SPACE} {one} {SPACE} {end} {SPACE})+\n"
    if calls == "pythonic":
        called = "|".join(re.escape(name).replace("/", r"\/") for name in sorted(names))
        return rf"call: /\[({called})\((?s:.*)/" + "\n"
    tags = f" | <[{','.join(map(str, sorted(token_ids.values())))}]>" if token_ids else ""
    begin = harmony.COMMENTARY if calls == HARMONY else TOOL_TAGS[calls][0]
    return f"call: {symbols(begin, token_ids)} ({_TEXT}{tags})*\n"
