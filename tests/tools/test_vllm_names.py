"""The gateway treats each field of vLLM's requests as docs/from-vllm.md says."""

import json
from typing import Any

import pytest

from tests.services.gateway.http_client import start_gateway
from tests.support.responder import MODEL
from tools.vllm_names import Here, here, request_fields

CHAT = [{"role": "user", "content": "x"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
IGNORED = {
    "ec_transfer_params",
    "enable_response_messages",
    "kv_transfer_params",
    "media_io_kwargs",
    "mm_payload",
    "mm_processor_kwargs",
    "return_mm_kwargs",
    "routed_experts_prompt_start",
    "session_id",
    "vllm_xargs",
    "watermarking",
}
"""On some of the routes: they move caches, ask for media, or name what has no meaning here."""
ODD = 10**40
"""A value that no field takes, but those without effect."""


def test_every_route_of_vllms_is_here() -> None:
    assert request_fields().keys() == VALID.keys()


def test_few_fields_are_ignored() -> None:
    found = {name for path, names in request_fields().items() for name in names if here(path, name) is Here.IGNORED}
    assert found <= IGNORED


@pytest.mark.anyio
@pytest.mark.parametrize("path", VALID)
async def test_a_field_is_treated_as_the_page_says(path: str) -> None:
    gateway = await start_gateway()
    for name in request_fields()[path]:
        body = {"model": MODEL, **VALID[path]}
        answer = await gateway.post(as_json(body, name), path)
        warned = name in answer.headers.get("pagewire-warning", "")
        match here(path, name):
            case Here.SAME | Here.REFUSED if answer.status == 400:
                assert name in answer.json["error"]["message"], answer.body
            case Here.IGNORED:
                assert warned, name
            case kind:
                assert (kind, warned) != (Here.REFUSED, False), (name, answer.status, answer.body)
                assert not warned, name


def as_json(body: dict[str, Any], name: str) -> bytes:
    """Returns a body in which a field has the odd value, which the encoder of the gateway's tests does not take."""
    return json.dumps(body | {name: ODD}).encode()
