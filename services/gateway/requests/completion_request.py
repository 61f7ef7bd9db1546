"""Decodes the body of `/v1/completions`, including vLLM's extra fields."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from pagewire.services.gateway.requests.sampling_fields import converted, read_openai_fields, split_sampling
from pagewire.services.gateway.requests.unknown_fields import UnknownFields

TIMEOUT_MS = 600_000
"""Milliseconds after which a request ends with an error, unless it has a `timeout_ms` of its own."""
Timeout = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
"""Milliseconds until a deadline, within what arithmetic can hold; the tokenizer has a limit of its own."""


class StreamOptions(msgspec.Struct):
    """Options of a stream. OpenAI's `include_obfuscation` has no meaning here."""

    include_usage: bool = False
    """Whether a last event has the usage."""
    continuous_usage_stats: bool = False
    """Whether every event has the usage so far; needs `include_usage`."""


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields other than sampling parameters. Names and meaning are those of OpenAI, then of vLLM."""

    prompt: str | Sequence[int | str | Sequence[int]]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    user: str = ""
    cache_salt: str = ""
    request_id: str = ""
    priority: int = 0
    use_beam_search: bool = False
    """Whether to do a beam search with `n` beams, all of which are returned."""
    echo: bool = False
    """Whether the prompt is part of the text, and its tokens of the log-probabilities."""
    add_special_tokens: bool = True
    """Whether a text gets the special tokens that the model wants around a prompt."""
    truncate_prompt_tokens: int | None = None
    """Number of last tokens of the prompt that count; -1: as many as the context has room for."""
    return_token_ids: bool = False
    """Whether the ids of prompts and completions are part of the answer."""
    return_token_origins: bool = False
    """Whether the events of a stream say if a token was sampled, drafted, or forced by a grammar."""
    timeout_ms: Timeout = TIMEOUT_MS
    """Milliseconds from the arrival until the request ends with an error; by default ten minutes."""
    drops_token: bool = False
    """Whether the one token that is generated is dropped: `max_tokens` is 0. A body does not have this field."""


FIELDS = frozenset(CompletionRequest.__struct_fields__) - {"drops_token"}
_KIND = "completion request"


def decode(body: bytes, unknown: UnknownFields | None = None) -> tuple[CompletionRequest, dict[str, Any]]:
    """Returns the request in a body, and the body's sampling fields.

    Raises:
        InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported, or unknown and refused.
    """
    return of_fields(read_openai_fields(body, FIELDS, _KIND, unknown))


def of_fields(fields: Mapping[str, Any]) -> tuple[CompletionRequest, dict[str, Any]]:
    """Returns the request with these fields, and its sampling fields; a field that is None counts as missing.

    Raises:
        InvalidRequest: a field is of the wrong type or unsupported.
    """
    own, sampling = split_sampling(fields, FIELDS)
    request = converted(own, CompletionRequest, _KIND)
    if request.use_beam_search:
        sampling["beam_width"] = sampling.get("n", 1)
    if request.echo:
        _echo(request, sampling)
    return request, sampling


def _echo(request: CompletionRequest, sampling: dict[str, Any]) -> None:
    """Completes a request whose prompt is part of the answer. Instead of no token, one is generated and dropped."""
    if "logprobs" in sampling:
        sampling.setdefault("prompt_logprobs", sampling["logprobs"])
    if sampling.get("max_tokens") == 0:
        sampling["max_tokens"], request.drops_token = 1, True
