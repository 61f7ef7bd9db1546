"""The body of `/v1/completions`, with vLLM's extra sampling fields, and what it means for the pipeline."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside text."""

    include_usage: bool = False
    """A last event with the usage."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every event has the usage so far."""


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields beside those that say how tokens are chosen. Those that are None have their default.

    Names and meaning are OpenAI's, then vLLM's.
    """

    prompt: str | Sequence[int | str | Sequence[int]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    """A beam search with `n` beams, all of which are returned."""

    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: dict[str, object] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


SAMPLING = {field.name: field.type for field in msgspec.structs.fields(SamplingParams) if field.name != "beam_width"}
"""Fields that the pipeline knows by the same name, with their types: all but the one for which `use_beam_search`
stands."""
_Body = cast(
    "type[CompletionRequest]",
    msgspec.defstruct(
        "CompletionBody",
        [(name, kind | None, None) for name, kind in SAMPLING.items()],
        bases=(CompletionRequest,),
        forbid_unknown_fields=True,
        kw_only=True,
    ),
)
"""What is decoded: a `CompletionRequest` that has the fields of `SAMPLING` as well."""
FIELDS = frozenset(_Body.__struct_fields__)
NOT_BUILT: dict[str, object] = {
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "response_format": {"type": "text"},
    "truncate_prompt_tokens": None,
    "add_special_tokens": True,
    "spaces_between_special_tokens": True,
}
"""Fields that are accepted with the value that changes nothing, and refused with any other."""

_decoder = msgspec.json.Decoder(_Body)


def decode(body: bytes) -> CompletionRequest:
    """The request in a body.

    Raises:
        InvalidRequest: it is malformed, or a field is unknown, of the wrong type, or not built; names the field.
    """
    try:
        request = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not a completion request: {error}") from error
    for name, neutral in NOT_BUILT.items():
        if getattr(request, name) not in (None, neutral):
            raise InvalidRequest(f"{name} is not supported yet: leave it out")
    return request


def sampling(request: CompletionRequest) -> SamplingParams:
    """How tokens are chosen."""
    given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
    if request.use_beam_search:
        given["beam_width"] = given.get("n", 1)
    return SamplingParams(**given)
