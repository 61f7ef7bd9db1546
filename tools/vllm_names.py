"""The names of vLLM's flags and of the fields of its requests, and what each field is here."""

from enum import Enum
from pathlib import Path

from pagewire.services.gateway.openapi import ROUTES, fields
from pagewire.services.gateway.requests import anthropic_request, responses_request, sampling_fields
from pagewire.services.gateway.routes import tokenization

FOLDER = Path(__file__).parent


class Here(Enum):
    """Treatment of a field of vLLM's requests."""

    SAME = "the same"
    NO_EFFECT = "without effect"
    REFUSED = "refused by name, unless their value asks for nothing"
    IGNORED = "ignored, and named in the header `Pagewire-Warning`"


def flags() -> list[str]:
    """Returns the names of the flags of `vllm serve`, without dashes."""
    return [line.removeprefix("--") for line in _lines("vllm_flags.txt")]


def request_fields() -> dict[str, list[str]]:
    """Returns the names of the fields of requests, by route."""
    groups: dict[str, list[str]] = {}
    for line in _lines("vllm_fields.txt"):
        path, name = line.split()
        groups.setdefault(path, []).append(name)
    return groups


def here(path: str, name: str) -> Here:
    """Returns what a field of a route is here."""
    without_effect, refused = _EFFECTLESS.get(path, frozenset()), _REFUSED[path]
    if name in {row[0] for row in fields(ROUTES[path])} or (path in _OPENAIS and name == "response_format"):
        return Here.SAME
    if name in without_effect:
        return Here.NO_EFFECT
    return Here.REFUSED if name in refused else Here.IGNORED


_OPENAIS = ("/v1/completions", "/v1/chat/completions")
_EFFECTLESS = {
    **dict.fromkeys(_OPENAIS, sampling_fields.IGNORED),
    "/v1/responses": responses_request.IGNORED,
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), anthropic_request.IGNORED),
}
_REFUSED = {
    **dict.fromkeys(_OPENAIS, frozenset(sampling_fields.NEUTRAL)),
    "/v1/responses": responses_request.STATEFUL | responses_request.NEUTRAL.keys(),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), anthropic_request.NOT_BUILT),
    **dict.fromkeys(("/tokenize", "/detokenize"), tokenization.NOT_BUILT),
}


def _lines(file: str) -> list[str]:
    return [line for line in (FOLDER / file).read_text().splitlines() if not line.startswith("#")]
