"""Splits the body of an HTTP request into fields of the route and sampling fields, and drops fields without effect."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from pagewire.services.gateway.requests.response_format import structured_outputs
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.client_protocol.client_requests import check_free_form, field_of
from pagewire.shared.errors import InvalidRequest, invalid_field
from pagewire.shared.messages.client import SamplingParams

T = TypeVar("T")
TokenLimit = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
"""A number of tokens in a field that is `max_tokens` elsewhere, so that an error names the field that was sent."""

IGNORED = frozenset(
    {
        "cache_prompt",
        "metadata",
        "moderation",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_interval",
    }
)
"""Fields that clients may send and that are ignored."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_options": ({},),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation_side": ("left",),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (),
    "web_search_options": (),
}
"""Fields that are ignored if they have one of these neutral values."""
RESPONSE_FORMAT = "response_format"
NOT_BUILT = NEUTRAL.keys() - SamplingParams.__struct_fields__ - {"stream_options", RESPONSE_FORMAT}
"""Fields of `NEUTRAL` that are refused with any other value, unless the route supports them."""

DOCUMENTED = IGNORED | NEUTRAL.keys() | set(SamplingParams.__struct_fields__)
"""All fields but those of a single route."""

BESIDE_TOOLS = frozenset({"parallel_tool_calls", "tool_choice"})
"""Fields of `NEUTRAL` whose neutral values have an effect where the route supports tools."""

FREE_FORM = frozenset({"chat_template_kwargs", "structured_outputs", "tools", RESPONSE_FORMAT})
"""Fields whose values may have any form."""
LONGEST_NEUTRAL = 256
"""Bytes of the longest neutral value, with room for spaces."""


def read_body(body: bytes, known: Collection[str], kind: str, unknown: UnknownFields | None = None) -> dict[str, Any]:
    """Returns the fields of a body without those that have no effect. A null field counts as missing.

    Args:
        body: JSON.
        known: names of the route's fields.
        kind: kind of request, for error messages.
        unknown: takes the fields that are neither the route's nor documented anywhere; by default they are ignored.

    Raises:
        InvalidRequest: the body is not a JSON object, or uses an unsupported field, which the message names.
    """
    unknown = UnknownFields() if unknown is None else unknown
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in raw.keys() - DOCUMENTED.union(known):
            if bytes(raw.pop(name)).decode() != "null":
                unknown.add(name, DOCUMENTED.union(known))
        fields = {name: _value(name, value, known) for name, value in raw.items() if name not in IGNORED}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a {kind}: {error}") from error
    return without_neutral(fields, known)


def without_neutral(fields: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a body without those that have a neutral value or are None.

    Raises:
        InvalidRequest: a field is not supported, or its value is too deep or too large.
    """
    effective = {name: value for name, value in fields.items() if not _is_neutral(name, value, known)}
    for name, value in effective.items():
        if name in NOT_BUILT and name not in known:
            raise invalid_field(name, "is not supported yet: leave it out")
        if name in FREE_FORM:
            check_free_form(name, value)
    return effective


def converted(fields: Mapping[str, Any], kind: type[T], name: str) -> T:
    """Returns the struct of a route's own fields; `name` is what it is called in errors.

    Raises:
        InvalidRequest: a field has the wrong type.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not a {name}: {error}", field=field_of(error)) from error


def read_fields(
    body: bytes,
    known: Collection[str],
    kind: str,
    unknown: UnknownFields,
    *,
    not_built: Collection[str] = (),
    free_form: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the fields of a body of a route without sampling parameters of vLLM's. A null field counts as missing.

    Args:
        not_built: fields that change the answer and are refused.
        free_form: fields whose values may have any form.

    Raises:
        InvalidRequest: the body is not a JSON object, a field is not supported, or its value is too deep or too large.
    """
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields = {}
        for name, value in raw.items():
            text = bytes(value).decode()
            if text == "null":
                continue
            if name in not_built:
                raise invalid_field(name, "is not supported yet: leave it out")
            if name in known:
                fields[name] = msgspec.json.decode(text)
            else:
                unknown.add(name, known)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a {kind}: {error}") from error
    for name in fields.keys() & set(free_form):
        check_free_form(name, fields[name])
    return fields


def split_sampling(body: dict[str, Any], known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of a body that are `known` to the route, and its sampling fields, whose types are checked.

    A `response_format` becomes `structured_outputs`.

    Raises:
        InvalidRequest: a field is unknown or of the wrong type; the message names it.
    """
    own = {name: value for name, value in body.items() if name in known}
    rest = {name: value for name, value in body.items() if name not in known}
    if RESPONSE_FORMAT in rest:
        if "structured_outputs" in rest:
            raise invalid_field(RESPONSE_FORMAT, "and structured_outputs are both given: leave one of them out")
        rest["structured_outputs"] = structured_outputs(rest.pop(RESPONSE_FORMAT))
    try:
        checked = msgspec.convert(rest, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not a valid request: {error}", field=field_of(error)) from error
    return own, {name: getattr(checked, name) for name in rest}


def _value(name: str, raw: msgspec.Raw, known: Collection[str]) -> object:
    """Returns the value of a field. One that will be refused is not decoded: a body can hold millions of objects."""
    text = bytes(raw)
    sampling = name in SamplingParams.__struct_fields__ or name == RESPONSE_FORMAT
    supported = name in known or (sampling and name not in NOT_BUILT)
    if supported or len(text) <= LONGEST_NEUTRAL:
        return msgspec.json.decode(text)
    return text


def _is_neutral(name: str, value: object, known: Collection[str]) -> bool:
    # Types are compared too, because 0 equals False, and logprobs 0 has an effect.
    return value is None or (
        not (name in BESIDE_TOOLS and name in known)
        and any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ()))
    )
