"""Ollama's routes about models."""

import pytest

from pagewire.services.gateway import app
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.routes.ollama_models import REFUSED
from tests.services.gateway.http_client import Gateway
from tests.support.responder import MODEL

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
async def test_the_served_models_are_listed(gateway: Gateway, path: str) -> None:
    (model,) = (await gateway.get(path)).json["models"]
    assert (model["name"], model["model"], model["context_length"]) == (MODEL, MODEL, 64)
    assert len(model["digest"]) == 64, "Ollama's command shows the first twelve characters"


@pytest.mark.parametrize("body", [{"model": MODEL}, {"name": MODEL, "verbose": True}, {"model": f"{MODEL}:latest"}])
async def test_a_model_is_described(gateway: Gateway, body: dict[str, object]) -> None:
    answer = (await gateway.post(body, "/api/show")).json
    assert answer["model_info"]["pagewire.context_length"] == 64
    assert answer["capabilities"] == ["completion", "tools"]


async def test_a_model_that_is_not_served_is_unknown(gateway: Gateway) -> None:
    answer = await gateway.post({"model": "other"}, "/api/show")
    assert (answer.status, "other" in answer.json["error"]) == (404, True)


async def test_the_version_is_one_that_clients_accept(gateway: Gateway) -> None:
    major, minor, _ = (await gateway.get("/api/version")).json["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6)


@pytest.mark.parametrize("path", REFUSED)
async def test_an_unsupported_route_answers_with_its_reason(gateway: Gateway, path: str) -> None:
    answer = await gateway.post({"model": MODEL, "input": "x"}, path)
    assert (answer.status, answer.json) == (400, {"error": f"{path}: {REFUSED[path]}"})


async def test_a_client_finds_the_server_by_the_head_of_its_page(gateway: Gateway) -> None:
    assert (await gateway.call("HEAD", "/", b"", {})).status == 200
    gateway.app = app.build(gateway.client, gateway.endpoints, gateway.health, MetricsPage(gateway.bus, vllm=True))
    assert (await gateway.call("HEAD", "/", b"", {})).status == 200
    assert (await gateway.get("/")).status == 404
