"""The fields of requests that the page offers, from the table of which docs/http.md is made."""

from typing import Any

import msgspec

from pagewire.services.gateway.openapi import ROUTES, fields, kind_of

KINDS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
"""The routes of the kinds of conversations."""
OWN = frozenset(
    {
        "best_of",
        "drops_token",
        "echo",
        "include_reasoning",
        "logprobs",
        "max_completion_tokens",
        "messages",
        "model",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "response_format",
        "return_token_ids",
        "stream",
        "stream_options",
        "tools",
        "top_logprobs",
    }
)
"""Fields that the page sets by itself, or cannot show the effect of."""
FIRST = ("temperature", "top_p", "max_tokens", "seed", "stop")
"""Fields that people change most."""


def encoded() -> bytes:
    """Returns a list of fields for each kind of conversation, as JSON."""
    return msgspec.json.encode({kind: _fields(path) for kind, path in KINDS.items()})


def _fields(path: str) -> list[dict[str, Any]]:
    rows = [_field(path, name, schema, text) for name, schema, text in fields(ROUTES[path]) if name not in OWN]
    order = {name: index for index, name in enumerate(FIRST)}
    return sorted(rows, key=lambda row: order.get(row["name"], len(order)))


def _field(path: str, name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    value = schema.get("anyOf", [schema])[0]  # the other one is null
    bounds = {bound: value[bound] for bound in ("minimum", "maximum") if bound in value}
    default = schema.get("default", value.get("default"))
    if path == KINDS["chat"] and name == "max_tokens":
        default = None  # without it a chat runs to the context limit
    return {"name": name, "kind": kind_of(schema), "default": default, **bounds, "meaning": text}
