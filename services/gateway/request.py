"""The body of `/v1/completions`, with vLLM's extra sampling fields, and what it means for the pipeline."""

from collections.abc import Sequence
from typing import Any

import msgspec

from pagewire.services.gateway.sampling_fields import read_body, split_sampling
from pagewire.shared.errors import InvalidRequest


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside text."""

    include_usage: bool = False
    """A last event with the usage."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every event has the usage so far."""


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that are no sampling parameters. Names and meaning are OpenAI's, then vLLM's."""

    prompt: str | Sequence[int | str | Sequence[int]]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    user: str = ""
    cache_salt: str = ""
    request_id: str = ""
    priority: int = 0
    use_beam_search: bool = False
    """A beam search with `n` beams, all of which are returned."""
    echo: bool = False
    add_special_tokens: bool = True


FIELDS = frozenset(CompletionRequest.__struct_fields__)
NOT_BUILT = {"echo": False, "add_special_tokens": True}
"""Fields that are accepted with the value that changes nothing, and refused with any other."""
_KIND = "completion request"


def decode(body: bytes) -> tuple[CompletionRequest, dict[str, Any]]:
    """Returns the request in a body, and the sampling fields that the body has.

    Raises:
        InvalidRequest: the body is malformed, or a field is unknown, of the wrong type, or not built; names the field.
    """
    own, sampling = split_sampling(read_body(body, FIELDS, _KIND), FIELDS)
    try:
        request = msgspec.convert(own, CompletionRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not a {_KIND}: {error}") from error
    for name, neutral in NOT_BUILT.items():
        if getattr(request, name) != neutral:
            raise InvalidRequest(f"{name} is not supported yet: leave it out")
    if request.use_beam_search:
        sampling["beam_width"] = sampling.get("n", 1)
    return request, sampling
