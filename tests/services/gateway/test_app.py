import asyncio
import gc
import tracemalloc
from importlib.metadata import version

import pytest

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway import app
from pagewire.services.gateway.http.authentication import find_tenant
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.openapi import ROUTES
from pagewire.services.gateway.routes import health
from pagewire.services.gateway.routes.completions import Completions
from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.process import peers
from tests.services.gateway.http_client import Gateway, start_gateway
from tests.support.responder import MODEL, Responder, settle

pytestmark = pytest.mark.anyio


async def test_a_gateway_without_other_services_is_alive(gateway: Gateway) -> None:
    assert (await gateway.get("/livez")).status == 200


@pytest.mark.parametrize("path", ["/health", "/readyz"])
async def test_health_answers_200_only_while_a_request_would_be_served(
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


async def test_models_are_listed_and_described(gateway: Gateway) -> None:
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
    assert "/v1/chat/completions" in lost.json["error"]["message"], "it says what there is"
    wrong = await gateway.get("/v1/completions")
    assert (wrong.status, wrong.json["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.json["error"]["message"].endswith("send POST")


async def test_a_slash_at_the_end_of_a_path_has_no_meaning(gateway: Gateway) -> None:
    assert (await gateway.get("/v1/models/")).json == (await gateway.get("/v1/models")).json
    assert (await gateway.post({"prompt": "x"}, "/v1/completions/")).status == 200


async def test_version_load_and_ping_answer_as_vllm_does(gateway: Gateway) -> None:
    assert (await gateway.get("/version")).json == {"version": version("pagewire"), "nats": ""}
    assert (await gateway.get("/load")).json == {"server_load": 0}
    assert [(await gateway.call(method, "/ping", b"", {})).status for method in ("GET", "POST")] == [503, 503]
    for service in health.REQUIRED:
        gateway.beat(service)
    await settle()
    assert [(await gateway.call(method, "/ping", b"", {})).status for method in ("GET", "POST")] == [200, 200]


async def test_only_scripts_of_allowed_sites_may_send_requests(gateway: Gateway) -> None:
    page = {"origin": "https://chat.example"}
    assert "access-control-allow-origin" not in (await gateway.get("/v1/models", **page)).headers
    endpoints, client = gateway.endpoints, AsyncClient(bus=gateway.bus)
    page_of_metrics = MetricsPage(gateway.bus, vllm=False)
    gateway.app = app.build(
        client, endpoints, gateway.health, page_of_metrics, find_tenant("secret", None), ["https://chat.example"]
    )
    preflight = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = await gateway.call("OPTIONS", "/v1/completions", b"", preflight)
    assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, page["origin"])
    other = await gateway.call("OPTIONS", "/v1/completions", b"", {**preflight, "origin": "https://other.example"})
    assert other.status == 400
    answer = await gateway.post({"prompt": "x"}, authorization="Bearer secret", **page)
    assert answer.headers["access-control-allow-origin"] == page["origin"]


async def test_a_request_id_in_the_header_is_repeated_and_begins_the_pipelines(gateway: Gateway) -> None:
    first = await gateway.post({"prompt": "x"}, **{"x-request-id": "r-1"})
    assert first.headers["x-request-id"] == "r-1"
    assert first.json["id"].startswith("cmpl-r-1-")
    again = await gateway.post({"prompt": "y"}, **{"x-request-id": "r-1"})
    assert again.json["id"] != first.json["id"], "a proxy may send one id with several requests"
    own = await gateway.post({"prompt": "x", "stream": True, "request_id": "mine"})
    assert own.headers["x-request-id"] == "mine"
    broken = await gateway.post({"prompt": "x", "request_id": "a\r\nb: c"})
    assert broken.headers["x-request-id"].isalnum(), "a header of it would break the answer"
    refused = await gateway.post({"prompt": 5}, **{"x-request-id": "a b"})
    assert refused.headers["x-request-id"] not in {"", "a b"}


async def test_unknown_fields_are_named_in_a_header_or_refused(gateway: Gateway) -> None:
    for stream in (False, True):
        answer = await gateway.post({"prompt": "x", "max_token": 3, "a\r\nb": 1, "c": None, "stream": stream})
        assert answer.status == 200
        assert set(answer.headers["pagewire-warning"].partition(": ")[2].split(", ")) == {"max_token", "?"}
    assert "pagewire-warning" not in (await gateway.post({"prompt": "x", "user": "me"})).headers
    strict = Endpoint(Completions(), AsyncClient(bus=gateway.bus), 1000, strict=True)
    gateway.app = app.build(
        AsyncClient(bus=gateway.bus), {"/v1/completions": strict}, gateway.health, MetricsPage(gateway.bus, vllm=False)
    )
    refused = (await gateway.post({"prompt": "x", "max_token": 3})).json["error"]
    assert (refused["param"], "do you mean max_tokens?" in refused["message"]) == ("max_token", True)


@pytest.mark.parametrize("value", [1, None])
async def test_a_body_of_very_many_fields_is_refused(value: object) -> None:
    gateway = await start_gateway(body_limit=1_000_000)
    many = {f"f{number}": value for number in range(5000)}
    for path, body in (*((path, many) for path in ROUTES), ("/api/generate", {"prompt": "x", "options": many})):
        refused = await gateway.post(body, path)
        assert (refused.status, "5000 fields" in refused.body.decode()) == (400, True), path


async def test_every_path_but_health_needs_the_key() -> None:
    gateway = await start_gateway(api_key="secret")
    refused = await gateway.get("/v1/models")
    assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
    assert (await gateway.get("/v1/models", authorization="Bearer wrong")).status == 401
    assert (await gateway.get("/v1/models", authorization="Bearer secret")).status == 200
    assert (await gateway.post({"prompt": "x"})).status == 401
    assert gateway.responder.requests == []
    assert (await gateway.post({"prompt": "x"}, authorization="Bearer secret")).status == 200
    for path in ("/livez", "/readyz", "/health", "/health/"):
        assert (await gateway.get(path)).status in {200, 503}
    assert (await gateway.get("/v1/models", **{"x-api-key": "secret"})).status == 200
    assert (await gateway.get("/v1/models", **{"x-api-key": "wrong"})).status == 401
    for path in (
        "/console/events",
        "/console/requests/r1",
        "/metrics",
        "/v1",
        "/nowhere",
        "/v1/chat/completions",
        "//health",
    ):
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
    "by the gateway": (400, b'{"model": "%s", "suffix": "%s"}'),
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


async def test_a_gateway_without_a_pipeline_answers_503(gateway: Gateway) -> None:
    await gateway.responder.bus.close()
    answer = await gateway.post({"model": MODEL, "prompt": "x"})
    assert (answer.status, answer.json["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 2000}),
        ("/detokenize", {"tokens": [1] * 2000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 2000}]}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x" * 2000}),
        ("/v1/completions", {"prompt": "x" * 2000}),
    ],
)
async def test_a_request_that_fits_into_no_message_is_too_large(path: str, body: dict[str, object]) -> None:
    broker = MemoryBroker(max_payload=1000)
    gateway = Gateway(broker, await Responder(MemoryBus(broker)).start())
    assert (await gateway.post(body, path)).status == 413


async def test_many_streams_run_at_once(gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": "x", "stream": True}
    answers = await asyncio.gather(*(gateway.post(body) for _ in range(20)))
    assert all(answer.status == 200 and answer.events for answer in answers)
    assert gateway.completions.served == 20
