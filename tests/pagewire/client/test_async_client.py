import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

import pagewire
from pagewire import AsyncClient, Client, SamplingParams
from pagewire.client.sync import LoopThread
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import BusUnavailable, InvalidRequest, ModelNotFound, Unavailable
from pagewire.shared.frames import encode_frame, error_frame, error_headers
from pagewire.shared.messages.client import DetokenizeReply, TokenizeReply
from pagewire.shared.messages.open import Encoding
from tests.support.broker import connect_service, running_broker
from tests.support.responder import MODEL, WORDS, Responder, deltas

TEXT = "".join(WORDS)
Scenario = Callable[[AsyncClient, Responder], Coroutine[Any, Any, None]]


def play(scenario: Scenario, model: str = "") -> None:
    async def main() -> None:
        broker = MemoryBroker()
        responder = await Responder(MemoryBus(broker)).start()
        await scenario(AsyncClient(model=model, bus=MemoryBus(broker, inbox_prefix="_INBOX")), responder)

    asyncio.run(main())


def test_the_package_exports_what_users_need_and_nothing_else() -> None:
    assert sorted(pagewire.__all__) == ["AsyncClient", "Client", "LLM", "SamplingParams", "errors"]
    assert all(hasattr(pagewire, name) for name in pagewire.__all__)


def test_without_a_name_the_only_model_is_meant() -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        assert (await client.generate("x")).choices[0].text == TEXT
        assert [info.name for info in await client.models()] == [MODEL]

    play(scenario)


def test_sampling_is_a_struct_or_keywords_but_not_both() -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        await client.generate("x", SamplingParams(max_tokens=3, top_p=0.5))
        await client.generate("x", max_tokens=3, top_p=0.5)
        first, second = (request.sampling for request in responder.requests)
        assert first == second == SamplingParams(max_tokens=3, top_p=0.5)
        with pytest.raises(InvalidRequest, match="top_k"):
            client.stream("x", SamplingParams(), top_k=3)

    play(scenario)


@pytest.mark.parametrize("wrong", [{"max_token": 3}, {"max_tokens": "many"}, {"messages": [{"role": "user"}]}])
def test_a_wrong_argument_is_refused_before_anything_is_sent(wrong: dict[str, Any]) -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        with pytest.raises(InvalidRequest):
            client.stream("x", **wrong)
        assert responder.requests == []

    play(scenario)


@pytest.mark.parametrize("prompt", ["text", [1, 2], ["a", "b"], [[1], [2, 3]]])
def test_every_form_of_prompt_is_passed_on(prompt: Any) -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        await client.generate(prompt)
        assert responder.requests[0].prompt == prompt

    play(scenario)


def test_messages_priority_and_timeout_are_passed_on() -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        await client.generate(messages=[{"role": "user", "content": "hi"}], priority=3, timeout=2.5)
        (request,) = responder.requests
        assert request.messages is not None
        assert request.messages[0].content == "hi"
        assert (request.priority, request.timeout_ms) == (3, 2500)

    play(scenario)


def test_request_ids_are_drawn_and_differ() -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        await client.generate("x")
        await client.generate("x")
        first, second = (request.request_id for request in responder.requests)
        assert first != second
        assert all(subjects.is_token(request.request_id or "") for request in responder.requests)

    play(scenario)


def test_cancel_by_id() -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        assert await client.cancel("r9") == "cancelled"
        assert responder.cancels == ["r9"]

    play(scenario)


async def _verbs(bus: Bus) -> None:
    def tokenize(message: Message) -> None:
        bus.publish(message.reply, msgspec.json.encode(TokenizeReply([1, 2])))

    def detokenize(message: Message) -> None:
        ids = msgspec.json.decode(message.data)["token_ids"]
        if ids == [9]:
            error = InvalidRequest("token 9 is outside the vocabulary")
            body = encode_frame(error_frame(error, ""), Encoding.JSON)
            bus.publish(message.reply, body, headers=error_headers(error))
        else:
            bus.publish(message.reply, msgspec.json.encode(DetokenizeReply("ab")))

    await bus.subscribe(f"{subjects.TOKENIZE}.{MODEL}", tokenize)
    await bus.subscribe(f"{subjects.DETOKENIZE}.{MODEL}", detokenize)


def test_tokenize_and_back() -> None:
    async def scenario(client: AsyncClient, responder: Responder) -> None:
        await _verbs(responder.bus)
        assert await client.tokenize("ab") == [1, 2]
        assert await client.detokenize([1, 2]) == "ab"
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await client.detokenize([9])
        with pytest.raises(ModelNotFound):
            await client.tokenize("ab", model="other")

    play(scenario)


def test_a_client_that_is_not_connected_says_so() -> None:
    with pytest.raises(BusUnavailable, match="async with"):
        AsyncClient().stream("x")


def test_nobody_at_the_address() -> None:
    async def main() -> None:
        with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
            await AsyncClient("nats://127.0.0.1:1", connect_timeout=0.1).__aenter__()

    asyncio.run(main())


def test_over_nats_also_without_a_loop_of_ones_own() -> None:
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


def test_no_stack_behind_the_broker() -> None:
    with running_broker() as broker, Client(broker.url) as client, pytest.raises(Unavailable):
        client.generate("x")
