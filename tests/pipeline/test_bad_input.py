"""Bad input over HTTP against the real stack: each is refused with the reason, and nothing is counted as a fault."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from pagewire.client.sync import LoopThread
from pagewire.embedded.stack import Stack
from pagewire.shared.config import Settings

HUGE = [2**64, -(2**64), 10**30]
KEY = "a-key-for-everyone"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    thread = LoopThread()
    settings = Settings(model="bundled", device="sim:zero", port=0, nats_port=0, log_level="error", api_key=KEY)
    running = Stack(settings)
    thread.run(running.__aenter__())
    yield thread.run(running.ready()).http
    thread.run(running.__aexit__(None, None, None))
    thread.close()


def post(url: str, body: Any, path: str = "/v1/completions", scheme: str = "Bearer") -> httpx.Response:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return httpx.post(url + path, content=data, headers={"Authorization": f"{scheme} {KEY}"}, timeout=30)


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["max_tokens", "top_k", "n", "seed", "min_tokens", "priority"])
def test_an_integer_of_more_than_64_bits_is_refused_by_name(url: str, field: str, number: int) -> None:
    answer = post(url, b'{"prompt": "x", "%s": %d}' % (field.encode(), number))
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(("name", "body"), [("prompt", b"[%d]"), ("stop_token_ids", b'"x", "stop_token_ids": [%d]')])
def test_such_an_integer_in_a_list_is_refused(url: str, name: str, body: bytes, number: int) -> None:
    answer = post(url, b'{"prompt": ' + body % number + b"}")
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("start", [b"[", b'{"a":', b'{"prompt": ' + b"[" * 9, b'{"metadata": ' + b"[" * 9])
def test_what_is_nested_deeply_is_refused(url: str, start: bytes) -> None:
    assert post(url, start * 50_000).status_code == 400
    chat = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}'
    answer = post(url, chat % (b"[" * 100 + b"]" * 100), "/v1/chat/completions")
    assert answer.status_code == 400
    assert "chat_template_kwargs" in answer.json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer"])
def test_the_scheme_of_the_key_is_read_in_any_case(url: str, scheme: str) -> None:
    assert post(url, {"prompt": "x", "max_tokens": 1}, scheme=scheme).status_code == 200


@pytest.mark.parametrize("field", [{"logit_bias": {}}, {"logprobs": None}, {"logit_bias": None}, {"tools": []}])
def test_what_asks_for_nothing_has_no_effect(url: str, field: dict[str, Any]) -> None:
    assert post(url, {"prompt": "x", "max_tokens": 1, **field}).status_code == 200
