"""The body of `/v1/chat/completions`, with vLLM's extra fields, and what it means for the pipeline."""

from typing import Any

import msgspec

from pagewire.services.gateway.request import StreamOptions
from pagewire.services.gateway.sampling_fields import read_body, split_sampling
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatMessage


class ChatCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that say nothing of sampling. Names and meaning are OpenAI's, then vLLM's."""

    messages: list[ChatMessage]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    user: str = ""
    cache_salt: str = ""
    request_id: str = ""
    priority: int = 0
    max_completion_tokens: int | None = None
    """OpenAI's newer name for `max_tokens`, before which it comes."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    use_beam_search: bool = False
    """A beam search with `n` beams, all of which are returned."""
    logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    add_special_tokens: bool = False


FIELDS = frozenset(ChatCompletionRequest.__struct_fields__)
_KIND = "chat completion request"
NOT_BUILT = ("logprobs", "top_logprobs", "echo", "add_special_tokens")
"""Fields that are accepted with the value that changes nothing, and refused with any other."""


def decode(body: bytes) -> tuple[ChatCompletionRequest, dict[str, Any]]:
    """The request in a body, and the sampling fields that it has; without `max_tokens` the context is the limit.

    Raises:
        InvalidRequest: it is malformed, or a field is unknown, of the wrong type, or not built; names the field.
    """
    own, sampling = split_sampling(read_body(body, FIELDS, _KIND), FIELDS)
    try:
        request = msgspec.convert(own, ChatCompletionRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is not a {_KIND}: {error}") from error
    for name in NOT_BUILT:
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported yet: leave it out")
    if request.use_beam_search:
        sampling["beam_width"] = sampling.get("n", 1)
    newer = request.max_completion_tokens
    sampling["max_tokens"] = sampling.get("max_tokens") if newer is None else newer
    return request, sampling
