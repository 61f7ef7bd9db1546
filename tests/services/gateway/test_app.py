import asyncio
import gc
import tracemalloc

import pytest

from pagewire.services.gateway import health
from pagewire.shared import peers
from pagewire.shared.errors import InvalidRequest
from tests.services.gateway.http import Gateway, start_gateway
from tests.support.responder import MODEL, settle

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


async def test_alive_whatever_the_others_do(gateway: Gateway) -> None:
    assert (await gateway.get("/livez")).status == 200


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_healthy_only_while_a_request_would_be_served(
    gateway: Gateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in health.REQUIRED:
        answer = await gateway.get(path)
        assert answer.status == 503
        assert answer.body.decode() == f"no {service} is running"
        gateway.beat(service, ready=False)
        await settle()
        assert (await gateway.get(path)).body.decode() == f"no {service} is ready"
        assert gateway.changes == 0
        gateway.beat(service)
        await settle()
    assert (await gateway.get(path)).status == 200
    assert gateway.changes == 1
    gateway.beat("scheduler", ready=False)
    await settle()
    assert gateway.changes == 2
    gateway.beat("scheduler")
    await settle()
    assert (await gateway.get(path)).status == 200
    monkeypatch.setattr(peers, "SILENCE", 0.0)
    assert (await gateway.get(path)).status == 503


async def test_without_a_broker_nothing_is_served(gateway: Gateway) -> None:
    await gateway.bus.close()
    answer = await gateway.get("/health")
    assert (answer.status, answer.body) == (503, b"there is no connection to the broker")


async def test_models(gateway: Gateway) -> None:
    listed = (await gateway.get("/v1/models")).json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["root"], model["object"], model["max_model_len"]) == (MODEL, MODEL, "model", 64)
    assert (await gateway.get(f"/v1/models/{MODEL}")).json == model
    missing = await gateway.get("/v1/models/other/name")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


async def test_paths_and_methods_that_do_not_exist_have_the_shape_of_errors(gateway: Gateway) -> None:
    lost = await gateway.get("/v1/nowhere")
    assert (lost.status, lost.json["error"]["code"]) == (404, "not_found")
    assert (await gateway.get("/v1/completions")).status == 405


async def test_a_key_guards_every_path_but_those_of_health() -> None:
    gateway = await start_gateway(api_key="secret")
    refused = await gateway.get("/v1/models")
    assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
    assert (await gateway.get("/v1/models", authorization="Bearer wrong")).status == 401
    assert (await gateway.get("/v1/models", authorization="Bearer secret")).status == 200
    assert (await gateway.post({"prompt": "x"})).status == 401
    assert gateway.responder.requests == []
    assert (await gateway.post({"prompt": "x"}, authorization="Bearer secret")).status == 200
    for path in ("/livez", "/readyz", "/health"):
        assert (await gateway.get(path)).status in {200, 503}
    for path in ("/", "/metrics", "/v1", "/nowhere", "/health/", "/v1/chat/completions", "//health"):
        assert (await gateway.get(path)).status == 401


@pytest.mark.parametrize("header", ["bearer secret", "BEARER secret", "Bearer  secret"])
async def test_the_scheme_of_a_key_is_read_in_any_case(header: str) -> None:
    gateway = await start_gateway(api_key="secret")
    assert (await gateway.get("/v1/models", authorization=header)).status == 200


@pytest.mark.parametrize("header", ["secret", "Basic secret", "Bearer", "Bearer Secret", "Bearersecret"])
async def test_another_scheme_or_key_is_refused(header: str) -> None:
    gateway = await start_gateway(api_key="secret")
    assert (await gateway.get("/v1/models", authorization=header)).status == 401


REFUSED: dict[str, tuple[int, bytes]] = {
    "by the pipeline": (400, b'{"model": "%s", "prompt": "%s"}'),
    "by the directory": (404, b'{"model": "other%s", "prompt": "%s"}'),
    "by the gateway": (400, b'{"model": "%s", "nonsense": "%s"}'),
    "by the parser": (400, b'{"model": "%s", "prompt": "%s'),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_request_leaves_no_memory_behind(case: str, stream: bool) -> None:
    """Without the garbage collector, which seldom runs in a service."""
    status, template = REFUSED[case]
    gateway = await start_gateway(body_limit=2_000_000)
    gateway.responder.script = lambda request: [InvalidRequest("top_k must be at least 1"), None]
    body = template % (MODEL.encode(), b"x" * 1_000_000)
    if stream:
        body = body.replace(b"{", b'{"stream": true, ', 1)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(20):
            assert (await gateway.post(body)).status == status
            gateway.responder.requests.clear()
            await settle()
        assert tracemalloc.get_traced_memory()[0] < 5_000_000
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_without_a_pipeline_it_is_unavailable(gateway: Gateway) -> None:
    await gateway.responder.bus.close()
    answer = await gateway.post({"model": MODEL, "prompt": "x"})
    assert (answer.status, answer.json["error"]["type"]) == (503, "server_error")


async def test_many_at_once(gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True}
    answers = await asyncio.gather(*(gateway.post(body) for _ in range(20)))
    assert all(answer.status == 200 and answer.events for answer in answers)
    assert gateway.completions.served == 20
