from pathlib import Path
from typing import Any

import msgspec
import pytest

import pagewire
from pagewire import AsyncClient, Client, SamplingParams
from pagewire.client.sync import LoopThread
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.client_protocol.frame_encoding import encode_frame, error_frame, error_headers
from pagewire.shared.errors import (
    BusUnavailable,
    ConfigurationError,
    InvalidRequest,
    ModelNotFound,
    NotPermitted,
    Unavailable,
)
from pagewire.shared.messages.open import Encoding
from pagewire.shared.messages.tokenize import DetokenizeReply
from pagewire.shared.security.api_keys import ApiKeys
from tests.support.broker import connect_service, running_broker
from tests.support.responder import MODEL, WORDS, Responder, deltas

TEXT = "".join(WORDS)
pytestmark = pytest.mark.anyio


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def responder(memory: MemoryBroker) -> Responder:
    return await Responder(MemoryBus(memory)).start()


@pytest.fixture
def client(memory: MemoryBroker, responder: Responder) -> AsyncClient:
    return AsyncClient(bus=MemoryBus(memory, inbox_prefix="_INBOX"))


def test_the_package_exports_the_documented_names_alone() -> None:
    assert sorted(pagewire.__all__) == [
        "AsyncClient",
        "AsyncLLM",
        "Client",
        "LLM",
        "LoRARequest",
        "SamplingParams",
        "StructuredOutputsParams",
        "errors",
        "read_message",
    ]
    assert all(hasattr(pagewire, name) for name in pagewire.__all__)


async def test_without_a_name_the_only_model_is_meant(client: AsyncClient) -> None:
    assert (await client.generate("x")).choices[0].text == TEXT
    assert [info.name for info in await client.models()] == [MODEL]


async def test_sampling_is_a_struct_or_keywords_but_not_both(client: AsyncClient, responder: Responder) -> None:
    await client.generate("x", SamplingParams(max_tokens=3, top_p=0.5))
    await client.generate("x", max_tokens=3, top_p=0.5)
    first, second = (request.sampling for request in responder.requests)
    assert first == second == SamplingParams(max_tokens=3, top_p=0.5)
    with pytest.raises(InvalidRequest, match="top_k"):
        client.stream("x", SamplingParams(), top_k=3)


@pytest.mark.parametrize("wrong", [{"max_token": 3}, {"max_tokens": "many"}, {"messages": [{"role": "user"}]}])
async def test_a_wrong_argument_is_refused_before_anything_is_sent(
    client: AsyncClient, responder: Responder, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        client.stream("x", **wrong)
    assert responder.requests == []


@pytest.mark.parametrize("prompt", ["text", [1, 2], ["a", "b"], [[1], [2, 3]]])
async def test_every_form_of_prompt_is_passed_on(client: AsyncClient, responder: Responder, prompt: Any) -> None:
    await client.generate(prompt)
    assert responder.requests[0].prompt == prompt


async def test_messages_priority_and_timeout_are_passed_on(client: AsyncClient, responder: Responder) -> None:
    await client.generate(messages=[{"role": "user", "content": "hi"}], priority=3, timeout=2.5)
    (request,) = responder.requests
    assert request.messages is not None
    assert request.messages[0].content == "hi"
    assert (request.priority, request.timeout_ms) == (3, 2500)


async def test_request_ids_are_drawn_and_differ(client: AsyncClient, responder: Responder) -> None:
    await client.generate("x")
    await client.generate("x")
    first, second = (request.request_id for request in responder.requests)
    assert first != second
    assert all(subjects.is_token(request.request_id or "") for request in responder.requests)


async def test_a_request_is_cancelled_by_its_id(client: AsyncClient, responder: Responder) -> None:
    assert await client.cancel("r9") == "cancelled"
    assert responder.cancels == ["r9"]


async def _verbs(bus: Bus) -> None:
    def detokenize(message: Message) -> None:
        ids = msgspec.json.decode(message.data)["token_ids"]
        if ids == [9]:
            error = InvalidRequest("token 9 is outside the vocabulary")
            body = encode_frame(error_frame(error, ""), Encoding.JSON)
            bus.publish(message.reply, body, headers=error_headers(error))
        else:
            bus.publish(message.reply, msgspec.json.encode(DetokenizeReply("ab")))

    await bus.subscribe(f"{subjects.DETOKENIZE}.{MODEL}", detokenize)


async def test_token_ids_become_the_same_text_again(client: AsyncClient, responder: Responder) -> None:
    await _verbs(responder.bus)
    assert await client.tokenize("ab") == [100, 101, 102]
    assert await client.detokenize([1, 2]) == "ab"
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await client.detokenize([9])
    with pytest.raises(ModelNotFound):
        await client.tokenize("ab", model="other")


def test_a_client_without_a_connection_raises_an_error() -> None:
    with pytest.raises(BusUnavailable, match="async with"):
        AsyncClient().stream("x")


async def test_an_address_without_a_broker_is_an_error() -> None:
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        await AsyncClient("nats://127.0.0.1:1", connect_timeout=0.1).__aenter__()


def test_the_synchronous_client_works_over_nats() -> None:
    """The real broker, with a key, and the synchronous client."""
    with running_broker(api_key="secret") as broker:
        thread = LoopThread()

        async def serve() -> Responder:
            return await Responder(await connect_service(broker)).start()

        responder = thread.run(serve())
        with Client(broker.url, api_key="secret") as client:
            assert list(client.stream("x", max_tokens=5)) == deltas()
            assert client.generate("x").choices[0].text == TEXT
            assert [info.name for info in client.models()] == [MODEL]
            for _ in client.stream("x", request_id="r1"):
                break
            with pytest.raises(ModelNotFound):
                client.generate("x", model="other")
        thread.run(responder.bus.close())
        thread.close()
        thread.close()


async def test_a_tenant_asks_and_cancels_under_its_own_subjects(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice:alice-key-0123456789\n")
    with running_broker(api_keys=ApiKeys.load(path)) as broker:
        responder = await Responder(await connect_service(broker)).start()
        async with AsyncClient(broker.url, tenant="alice", api_key="alice-key-0123456789") as client:
            assert [delta async for delta in client.stream("x", max_tokens=5)] == deltas()
            assert await client.cancel("r1") == "cancelled"
        assert responder.tenants == ["alice"]
        for tenant, key in (("alice", "wrong"), ("bob", "alice-key-0123456789"), ("", "")):
            with pytest.raises(ConfigurationError, match="credentials"):
                await AsyncClient(broker.url, tenant=tenant, api_key=key).__aenter__()
        await responder.bus.close()


async def test_a_tenant_needs_its_key() -> None:
    with pytest.raises(ConfigurationError, match="needs its key"):
        await AsyncClient(tenant="alice").__aenter__()


async def test_a_client_that_is_no_gateway_may_not_act_for_a_tenant() -> None:
    with running_broker() as broker:
        async with AsyncClient(broker.url) as client:
            with pytest.raises(NotPermitted):
                await client.for_tenant("alice")


def test_a_broker_without_a_stack_is_an_error() -> None:
    with running_broker() as broker, Client(broker.url) as client, pytest.raises(Unavailable):
        client.generate("x")
