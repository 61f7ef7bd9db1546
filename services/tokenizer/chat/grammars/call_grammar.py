"""The grammar of calls that a model may make beside its answer, or instead of it."""

import json
import re
from collections.abc import Mapping

from pagewire.services.tokenizer.chat.grammars.lark import SPACE, symbols
from pagewire.services.tokenizer.chat.grammars.typed_calls import FREE, typed_rules
from pagewire.shared.chat.formats import HARMONY, NAMED, REQUIRED, TOOL_TAGS, TYPED, harmony, kimi_k2, llama3_json
from pagewire.shared.chat.json_call import BARE_KEYS

TEXT = "/(?s:.*)/"
ANY_ARGUMENTS = '%json {"type": "object"}'
"""Lark of arguments that follow no schema."""
HELD = frozenset({HARMONY, "hermes", "kimi_k2", "llama3_json", "mistral", *TYPED})
"""Formats whose arguments can follow a schema."""
_NO_CALL = (
    rf"/(?s:.*)/ & ~/[ \n\r\t]*({re.escape(llama3_json.TAG)})?[ \n\r\t]*"
    rf'\{{[ \n\r\t]*"(({"|".join(BARE_KEYS)})"|[^"\\]*\\)(?s:.*)/'
)
"""A text that does not begin as a call of `llama3_json` may: with one of its keys, or one that has an escape."""


def any_arguments(calls: str) -> str:
    """Returns Lark of arguments that follow no schema."""
    return FREE if calls in TYPED else ANY_ARGUMENTS


def may_call(calls: str) -> bool:
    """Returns whether calls of a format are the model's choice."""
    return calls not in {"", NAMED, REQUIRED}


def call_rule(calls: str, arguments: Mapping[str, str], token_ids: Mapping[str, int], bare: str = "") -> str:
    """Returns llguidance's Lark rule `call`; empty: the model may not choose to call.

    The calls of the formats `HELD` are of the tools, with their arguments. Those of `pythonic` have free arguments.

    Args:
        calls: format of the calls of an answer.
        arguments: Lark of each tool's arguments, by its name.
        token_ids: ids of tags, or of parts of them, that are tokens of their own: no other single token has their text.
        bare: Lark of a whole call that has no tag, where the text may also be other JSON: llguidance takes no
            alternative in Lark to a JSON schema that begins alike.
    """
    if not may_call(calls):
        return ""
    if calls == "llama3_json":
        python_tag = symbols(llama3_json.TAG, token_ids)
        one = bare or f"{SPACE} {_objects(arguments, 'parameters')} {SPACE}"
        return f'call: ({python_tag})? {one} (";" {one})*\n'
    if calls == "pythonic":
        called = "|".join(re.escape(name).replace("/", r"\/") for name in sorted(arguments))
        return rf"call: /\[({called})\((?s:.*)/" + "\n"
    if calls == HARMONY:
        return f"call: {symbols(harmony.COMMENTARY, token_ids)} called\ncalled: {_harmony(arguments, token_ids)}\n"
    begin = symbols(TOOL_TAGS[calls][0], token_ids)
    if calls in TYPED:
        return f"call: ({begin} called)+\n{typed_rules(calls, arguments, token_ids)}"
    return f"call: ({begin} called)+\ncalled: {_called(calls, arguments, token_ids)}\n"


def free_rule(calls: str, token_ids: Mapping[str, int]) -> str:
    """Returns llguidance's Lark rule `free` of a text in which each call that is begun follows the rule `call`."""
    if calls == "llama3_json":
        return f"free: call | NO_CALL\nNO_CALL: {_NO_CALL}\n"
    if calls == HARMONY:
        return f"free: {TEXT}\n"
    begin = TOOL_TAGS[calls][0]
    if begin in token_ids:
        return f"free: ({TEXT} {symbols(begin, token_ids)} called)* {TEXT}\n"
    opening = re.escape(begin).replace("/", r"\/")
    return f"free: (before called)* {TEXT}\nbefore[lazy]: /(?s:.*){opening}/\n"


def _called(calls: str, arguments: Mapping[str, str], token_ids: Mapping[str, int]) -> str:
    """Returns Lark of what follows the tag that begins a call, or several calls."""
    if calls == "hermes":
        end = symbols(TOOL_TAGS[calls][1], token_ids)
        return f"{SPACE} {_objects(arguments, 'arguments')} {SPACE} {end} {SPACE}"
    if calls == "kimi_k2":
        call, argument, call_end, end = (
            symbols(tag, token_ids) for tag in (kimi_k2.CALL, kimi_k2.ARGUMENTS, kimi_k2.CALL_END, kimi_k2.CLOSE)
        )
        each = " | ".join(
            f"{json.dumps(f'functions.{name}:')} /[0-9]+/ {SPACE} {argument} {SPACE} {body}"
            for name, body in arguments.items()
        )
        return f"({SPACE} {call} {SPACE} ({each}) {SPACE} {call_end})+ {SPACE} {end} {SPACE}"
    assert calls == "mistral", calls
    one = _objects(arguments, "arguments")
    call_id, args = symbols("[CALL_ID]", token_ids), symbols("[ARGS]", token_ids)
    head = f"({call_id} /[a-zA-Z0-9]+/)? ({args})? {SPACE}"
    named = " | ".join(f"{json.dumps(name)} {head} {body}" for name, body in arguments.items())
    return f'{SPACE} ("[" {SPACE} {one} ({SPACE} "," {SPACE} {one})* {SPACE} "]" | {one} | {named}) {SPACE}'


def _harmony(arguments: Mapping[str, str], token_ids: Mapping[str, int]) -> str:
    constrain, message, end = (symbols(tag, token_ids) for tag in (harmony.CONSTRAIN, harmony.MESSAGE, harmony.CALL))
    each = " | ".join(
        f'{json.dumps(f" to=functions.{name}")} {SPACE} (({constrain})? "json")? {message} {body}'
        for name, body in arguments.items()
    )
    return f"({each}) ({end})?"


def _objects(arguments: Mapping[str, str], key: str) -> str:
    """Returns Lark of a JSON object with the name of a tool and its arguments."""
    space = SPACE.strip("/")
    begin, between, end = (
        rf'/\{{{space}"name"{space}:{space}/',
        f'/{space},{space}"{key}"{space}:{space}/',
        rf"/{space}\}}/",
    )
    each = (f"{json.dumps(json.dumps(name))} {between} {body}" for name, body in arguments.items())
    return f"({begin} ({' | '.join(each)}) {end})"
