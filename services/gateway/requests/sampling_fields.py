"""Splits the body of an HTTP request into the route's fields and sampling fields, and drops fields without effect."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from pagewire.services.gateway.requests.api_elements import CHAT_FIELDS, Treatment
from pagewire.services.gateway.requests.response_format import structured_outputs
from pagewire.services.gateway.requests.unknown_fields import UnknownFields, check_count
from pagewire.shared.client_protocol.client_requests import check_free_form, field_of
from pagewire.shared.errors import InvalidRequest, invalid_field
from pagewire.shared.messages.client import SamplingParams

T = TypeVar("T")
TokenLimit = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
"""A number of tokens in a route's own field for `max_tokens`, checked here so that an error names that field."""

IGNORED = frozenset(CHAT_FIELDS)
"""Fields that clients may send and that are ignored, where they are no fields of the route."""
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
    "vllm_xargs": ({},),
    "watermarking": (),
}
"""Values with which a field is ignored."""
RESPONSE_FORMAT = "response_format"
"""OpenAI's field for `structured_outputs`."""
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


def read_openai_fields(
    body: bytes, names: Collection[str], kind: str, unknown: UnknownFields | None = None
) -> dict[str, Any]:
    """Returns the fields of a body of OpenAI's, without those that are ignored.

    Args:
        body: JSON.
        names: the route's fields.
        kind: kind of request, for error messages.
        unknown: takes the fields that are neither the route's nor documented anywhere; by default they are ignored.

    Raises:
        InvalidRequest: the body is not a JSON object, or has an unknown field that is refused.
    """
    unknown = UnknownFields() if unknown is None else unknown
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        check_count(raw, "the body")
        documented = DOCUMENTED.union(names)
        for name in raw.keys() - documented:
            if bytes(raw.pop(name)).decode() != "null":
                unknown.add(name, documented)
        for name in raw.keys() & IGNORED.difference(names):
            if CHAT_FIELDS[name] is Treatment.LEFT_OUT and bytes(raw[name]) != b"null":
                unknown.leave_out("field", name)
            del raw[name]
        return {name: _value(name, value, names) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a {kind}: {error}") from error


def without_neutral(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the fields that have an effect: neither None nor neutral. `names`: the route's fields.

    Raises:
        InvalidRequest: a field is not supported, or its value is too deep or too large.
    """
    effective = {name: value for name, value in fields.items() if not _is_neutral(name, value, names)}
    for name, value in effective.items():
        if name in NOT_BUILT and name not in names:
            raise invalid_field(name, "is not supported yet: leave it out")
        if name in FREE_FORM:
            check_free_form(name, value)
    return effective


def converted(fields: Mapping[str, Any], kind: type[T], name: str) -> T:
    """Returns fields as a struct, which errors call by `name`.

    Raises:
        InvalidRequest: a field has the wrong type.
    """
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not a {name}: {error}", field=field_of(error)) from error


def read_fields(
    body: bytes,
    names: Collection[str],
    kind: str,
    unknown: UnknownFields,
    *,
    not_built: Collection[str] = (),
    free_form: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the fields of a body of a route without sampling parameters of vLLM's. A null field counts as missing.

    Args:
        body: JSON.
        names: the route's fields.
        kind: kind of request, for error messages.
        unknown: takes all other fields.
        not_built: fields that change the answer and are refused.
        free_form: fields whose values may have any form.

    Raises:
        InvalidRequest: the body is not a JSON object, a field is not supported, or its value is too deep or too large.
    """
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        check_count(raw, "the body")
        fields = {}
        for name, value in raw.items():
            text = bytes(value).decode()
            if text == "null":
                continue
            if name in not_built:
                raise invalid_field(name, "is not supported yet: leave it out")
            if name in names:
                fields[name] = msgspec.json.decode(text)
            else:
                unknown.add(name, names)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a {kind}: {error}") from error
    for name in fields.keys() & set(free_form):
        check_free_form(name, fields[name])
    return fields


def split_sampling(fields: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields that have an effect: the route's, which `names` has, and sampling fields of checked types.

    A `response_format` becomes `structured_outputs`.

    Raises:
        InvalidRequest: a field is not supported, of the wrong type, too deep or too large.
    """
    effective = without_neutral(fields, names)
    own = {name: value for name, value in effective.items() if name in names}
    sampling = {name: value for name, value in effective.items() if name not in names}
    if RESPONSE_FORMAT in sampling:
        if "structured_outputs" in sampling:
            raise invalid_field(RESPONSE_FORMAT, "and structured_outputs are both given: leave one of them out")
        sampling["structured_outputs"] = structured_outputs(sampling.pop(RESPONSE_FORMAT))
    params = converted(sampling, SamplingParams, "valid request")
    return own, {name: getattr(params, name) for name in sampling}


def _value(name: str, raw: msgspec.Raw, names: Collection[str]) -> object:
    """Returns the value of a field. One that will be refused is not decoded: a body can hold millions of objects."""
    text = bytes(raw)
    sampling = name in SamplingParams.__struct_fields__ or name == RESPONSE_FORMAT
    supported = name in names or (sampling and name not in NOT_BUILT)
    if supported or len(text) <= LONGEST_NEUTRAL:
        return msgspec.json.decode(text)
    return text


def _is_neutral(name: str, value: object, names: Collection[str]) -> bool:
    # Types are compared too, because 0 equals False, and logprobs 0 has an effect.
    return value is None or (
        not (name in BESIDE_TOOLS and name in names)
        and any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ()))
    )
