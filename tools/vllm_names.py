"""The names of vLLM's flags and of the fields of its requests, and what each field is here."""

from enum import Enum
from pathlib import Path

from pagewire.services.gateway.openapi import ROUTES, fields
from pagewire.services.gateway.requests import sampling_fields
from pagewire.services.gateway.requests.api_elements import (
    CHAT_FIELDS,
    MESSAGES_FIELDS,
    RESPONSES_FIELDS,
    Treatment,
    names_of,
)
from pagewire.services.gateway.routes import tokenization

FOLDER = Path(__file__).parent


class Here(Enum):
    """The treatment of a field of vLLM."""

    SAME = "the same"
    NO_EFFECT = "without effect"
    REFUSED = "refused by name, unless their value asks for nothing"
    IGNORED = "ignored, and named in the header `Pagewire-Warning`"


def flags() -> list[str]:
    """Returns the names of the flags of `vllm serve`, without dashes."""
    return [line.removeprefix("--") for line in _lines("vllm_flags.txt")]


def request_fields() -> dict[str, list[str]]:
    """Returns the names of the fields of requests, by route."""
    by_route: dict[str, list[str]] = {}
    for line in _lines("vllm_fields.txt"):
        path, name = line.split()
        by_route.setdefault(path, []).append(name)
    return by_route


def here(path: str, name: str) -> Here:
    """Returns what a field of a route is here."""
    without_effect, refused = _EFFECTLESS.get(path, frozenset()), _REFUSED[path]
    if name in {row[0] for row in fields(ROUTES[path])} or (path in _OPENAIS and name == "response_format"):
        return Here.SAME
    if name in without_effect:
        return Here.NO_EFFECT
    return Here.REFUSED if name in refused else Here.IGNORED


_OPENAIS = ("/v1/completions", "/v1/chat/completions")
_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
_ELEMENTS = {
    **dict.fromkeys(_OPENAIS, CHAT_FIELDS),
    "/v1/responses": RESPONSES_FIELDS,
    **dict.fromkeys(_MESSAGES, MESSAGES_FIELDS),
}
_EFFECTLESS = {
    path: frozenset(elements) - names_of(elements, Treatment.REFUSED) for path, elements in _ELEMENTS.items()
}
_REFUSED = {
    **dict.fromkeys(_OPENAIS, frozenset(sampling_fields.NEUTRAL)),
    "/v1/responses": names_of(RESPONSES_FIELDS, Treatment.REFUSED),
    **dict.fromkeys(_MESSAGES, frozenset[str]()),
    **dict.fromkeys(("/tokenize", "/detokenize"), tokenization.NOT_BUILT),
}


def _lines(file: str) -> list[str]:
    return [line for line in (FOLDER / file).read_text().splitlines() if not line.startswith("#")]
