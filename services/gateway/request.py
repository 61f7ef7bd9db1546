"""The body of `/v1/completions`, with vLLM's extra sampling fields, and what it means for the pipeline."""

from collections.abc import Sequence
from typing import Any

import msgspec

from pagewire.services.gateway.sampling_fields import read_body
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside text."""

    include_usage: bool = False
    """A last event with the usage."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every event has the usage so far."""


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that are None have their default. Names and meaning are OpenAI's, then vLLM's."""

    prompt: str | Sequence[int | str | Sequence[int]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, object] | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    """A beam search with `n` beams, all of which are returned."""

    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: dict[str, object] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


FIELDS = frozenset(CompletionRequest.__struct_fields__)
SAMPLING = tuple(name for name in SamplingParams.__struct_fields__ if name in FIELDS)
"""Fields that the pipeline knows by the same name."""
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


def decode(body: bytes) -> CompletionRequest:
    """The request in a body.

    Raises:
        InvalidRequest: it is malformed, or a field is unknown, of the wrong type, or not built; names the field.
    """
    try:
        request = msgspec.convert(read_body(body, FIELDS, "completion request"), CompletionRequest, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not a completion request: {error}") from error
    for name, neutral in NOT_BUILT.items():
        if getattr(request, name) not in (None, neutral):
            raise InvalidRequest(f"{name} is not supported yet: leave it out")
    return request


def sampling(request: CompletionRequest) -> SamplingParams:
    """How tokens are chosen."""
    return SamplingParams(**given_sampling(request))


def given_sampling(request: CompletionRequest) -> dict[str, Any]:
    """The sampling fields that the request has, by their names in the pipeline."""
    given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
    if request.use_beam_search:
        given["beam_width"] = 1 if request.n is None else request.n
    return given
