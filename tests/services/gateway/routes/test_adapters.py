"""The routes that load and remove adapters, with vLLM's bodies."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest

from pagewire.services.executor.adapters.requests import AdapterRequests
from pagewire.shared.errors import BusUnavailable, InvalidRequest, ModelNotFound
from pagewire.shared.messages.adapters import AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.messages.client import ModelInfo
from tests.services.gateway.http_client import Gateway
from tests.support.responder import MODEL

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Names:
    """A registrar without files."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.stores = True

    async def load(self, request: LoadAdapterRequest) -> AdapterReply:
        if not self.stores:
            raise BusUnavailable("no room")
        if request.lora_name in self.digests and not request.load_inplace:
            raise InvalidRequest("there is one already")
        self.digests[request.lora_name] = request.lora_path
        return AdapterReply(request.lora_name, request.lora_path)

    async def unload(self, request: UnloadAdapterRequest) -> AdapterReply:
        if request.lora_name not in self.digests:
            raise ModelNotFound("there is no such adapter")
        return AdapterReply(request.lora_name, self.digests.pop(request.lora_name))


@asynccontextmanager
async def executor(gateway: Gateway) -> AsyncIterator[Names]:
    registrar = Names()
    requests = AdapterRequests(gateway.responder.bus, MODEL, cast("Any", registrar))
    await requests.subscribe()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(requests.run)
        yield registrar
        tasks.cancel_scope.cancel()


async def test_an_adapter_is_loaded_replaced_and_removed(gateway: Gateway) -> None:
    async with executor(gateway) as registrar:
        body = {"lora_name": "sql", "lora_path": "one"}
        answer = await gateway.post(body, LOAD)
        assert (answer.status, answer.json["digest"]) == (200, "one")
        assert answer.json["message"] == "Success: LoRA adapter 'sql' added successfully."
        again = await gateway.post(body, LOAD)
        assert (again.status, again.json["error"]["message"]) == (400, "there is one already")
        assert (await gateway.post(body | {"lora_path": "two", "load_inplace": True}, LOAD)).json["digest"] == "two"
        assert registrar.digests == {"sql": "two"}
        removed = await gateway.post({"lora_name": "sql", "lora_int_id": 1}, UNLOAD)
        assert removed.json["message"] == "Success: LoRA adapter 'sql' removed successfully."
        assert (await gateway.post({"lora_name": "sql"}, UNLOAD)).status == 404


async def test_with_several_models_a_body_names_the_model_and_removal_finds_it(gateway: Gateway) -> None:
    models = gateway.responder.models
    models.append(ModelInfo("other", "", 64, "r2"))
    body = {"lora_name": "sql", "lora_path": "one"}
    async with executor(gateway) as registrar:
        unnamed = await gateway.post(body, LOAD)
        assert (unnamed.status, "name a model" in unnamed.json["error"]["message"]) == (400, True)
        absent = await gateway.post(body | {"base_model_name": "gone"}, LOAD)
        assert (absent.status, "no model gone is served" in absent.json["error"]["message"]) == (404, True)
        assert (await gateway.post(body | {"base_model_name": MODEL}, LOAD)).status == 200
        models.append(ModelInfo("sql", "", 64, "r1", root="one", parent=MODEL))
        assert (await gateway.post({"lora_name": "gone"}, UNLOAD)).status == 404
        assert (await gateway.post({"lora_name": "sql"}, UNLOAD)).status == 200
        assert registrar.digests == {}


@pytest.mark.parametrize("name", ["other", "other-alias", "its-adapter", "its.adapter"])
async def test_an_adapter_takes_no_name_of_another_model_or_of_its_adapters(gateway: Gateway, name: str) -> None:
    gateway.responder.models += [
        ModelInfo("other", "", 64, "r2", root="other"),
        ModelInfo("other-alias", "", 64, "r2", root="other"),
        ModelInfo("its-adapter", "", 64, "r2", root="two", parent="other"),
        ModelInfo("its_adapter", "", 64, "r2", root="two", parent="other"),
    ]
    async with executor(gateway) as registrar:
        body = {"lora_name": name, "lora_path": "one", "base_model_name": MODEL}
        answer = await gateway.post(body, LOAD)
        assert (answer.status, "choose another name" in answer.json["error"]["message"]) == (400, True)
        assert registrar.digests == {}


async def test_bad_bodies_are_refused(gateway: Gateway) -> None:
    async with executor(gateway):
        bodies: tuple[Any, ...] = ({}, {"lora_name": "a"}, {"lora_name": 1, "lora_path": "b"}, b"{", [])
        for body in bodies:
            assert (await gateway.post(body, LOAD)).status == 400
        assert (await gateway.post({"lora_path": "a"}, UNLOAD)).status == 400


async def test_a_stack_without_adapters_answers_400_and_one_without_room_503(gateway: Gateway) -> None:
    answer = await gateway.post({"lora_name": "a", "lora_path": "b"}, LOAD)
    assert (answer.status, "--enable-lora" in answer.json["error"]["message"]) == (400, True)
    async with executor(gateway) as registrar:
        registrar.stores = False
        assert (await gateway.post({"lora_name": "a", "lora_path": "b"}, LOAD)).status == 503
