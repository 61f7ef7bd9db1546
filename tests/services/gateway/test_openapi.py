import msgspec
import pytest

from pagewire.services.gateway.openapi import ROUTES, document
from pagewire.services.gateway.service import APIS
from tests.services.gateway.http_client import Gateway


def test_every_route_with_a_body_is_described() -> None:
    adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    others = {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/api/show"} | adapters
    assert APIS.keys() | others == ROUTES.keys()
    assert ROUTES.keys() <= document()["paths"].keys()


def test_every_reference_leads_to_a_schema() -> None:
    api = document()
    text = msgspec.json.encode(api).decode()
    names = {part.partition('"')[0] for part in text.split('"$ref":"#/components/schemas/')[1:]}
    assert names <= api["components"]["schemas"].keys()
    chat = api["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["required"] == ["messages"]
    assert {"messages", "temperature", "structured_outputs", "tools"} <= chat["properties"].keys()


def test_documented_bounds_equal_the_checked_ones() -> None:
    body = document()["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    expected: dict[str, dict[str, float]] = {
        "temperature": {"minimum": 0.0, "maximum": 2.0},
        "top_p": {"exclusiveMinimum": 0.0, "maximum": 1.0},
        "top_k": {"minimum": -1},
    }
    for name, bounds in expected.items():
        number, null = body["properties"][name]["anyOf"]
        assert bounds.items() <= number.items()
        assert null == {"type": "null"}


@pytest.mark.anyio
async def test_the_document_is_served_with_a_page(gateway: Gateway) -> None:
    served = (await gateway.get("/openapi.json")).json
    assert served == msgspec.to_builtins(document())
    page = await gateway.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert b"/v1/chat/completions" in page.body
    for path in served["paths"]:
        if "{" not in path:
            assert (await gateway.get(path)).status != 404, path
