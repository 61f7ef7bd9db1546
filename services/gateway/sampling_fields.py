"""The body of a request over HTTP, sorted: fields that ask for nothing, fields of the route, and fields of sampling."""

from collections.abc import Collection
from typing import Any

import msgspec

from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams

IGNORED = frozenset(
    {
        "cache_prompt",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields that clients may send and that mean nothing here, whatever their value is."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_options": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}
"""Fields that may be there with these values, which ask for nothing. With others they count."""
NOT_BUILT = NEUTRAL.keys() - SamplingParams.__struct_fields__ - {"stream_options"}
"""Those of them that are refused then, unless the route knows them."""


def read_body(body: bytes, known: Collection[str], kind: str) -> dict[str, Any]:
    """The fields of a body that ask for something. A field that is null is one that is not there.

    Args:
        body: JSON.
        known: fields of the route.
        kind: what the body should be, for messages.

    Raises:
        InvalidRequest: it is no JSON object, or asks for what is not built; names the field.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a {kind}: {error}") from error
    asked = {name: value for name, value in fields.items() if not _asks_for_nothing(name, value)}
    for name in asked:
        if name in NOT_BUILT and name not in known:
            raise InvalidRequest(f"{name} is not supported yet: leave it out")
    return asked


def split_sampling(body: dict[str, Any], known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a body that are its route's own, `known` by name, and its sampling fields, checked for their types.

    Raises:
        InvalidRequest: a field is unknown or of the wrong type; names it.
    """
    own = {name: value for name, value in body.items() if name in known}
    rest = {name: value for name, value in body.items() if name not in known}
    try:
        checked = msgspec.convert(rest, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not a valid request: {error}") from error
    return own, {name: getattr(checked, name) for name in rest}


def _asks_for_nothing(name: str, value: object) -> bool:
    # By type too: 0 and 1 equal False and True, and logprobs that are 0 do ask for something.
    return (
        value is None
        or name in IGNORED
        or any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ()))
    )
