import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire import AsyncClient
from pagewire.client import connection, stream
from pagewire.shared.bus import nats
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import (
    BusUnavailable,
    ConnectionLost,
    ContextLength,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from pagewire.shared.messages.client import Accepted, Delta, Frame, GenerateRequest, Queued
from pagewire.shared.messages.client_headers import FRESH
from tests.support.responder import MODEL, WORDS, Responder, deltas, final, settle
from tests.support.waiting import PATIENCE, until

TEXT = "".join(WORDS)
pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FRAME_TIMEOUT", 0.05)
    monkeypatch.setattr(stream, "RESULT_TIMEOUT", 0.05)
    monkeypatch.setattr(stream, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(stream, "RESEND_INTERVAL", 0.01)


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def responder(memory: MemoryBroker) -> Responder:
    return await Responder(MemoryBus(memory)).start()


@pytest.fixture
def client(memory: MemoryBroker, responder: Responder) -> AsyncClient:
    return AsyncClient(model=MODEL, bus=MemoryBus(memory, inbox_prefix="_INBOX"))


async def read(request: stream.Stream) -> str:
    return "".join([delta.text async for delta in request])


async def test_a_stream_yields_each_delta_and_ends(client: AsyncClient, responder: Responder) -> None:
    request = client.stream("x", max_tokens=5, request_id="r1")
    assert [delta async for delta in request] == deltas()
    assert request.prompt_tokens == 3
    assert request.final is not None
    assert request.final.usage.completion_tokens == 5
    assert responder.requests[0].request_id == "r1"
    assert responder.requests[0].sampling.max_tokens == 5
    assert responder.cancels == []


async def test_a_stream_ends_with_its_client(
    memory: MemoryBroker, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object, **__: object) -> MemoryBus:
        return MemoryBus(memory, inbox_prefix="_INBOX")

    monkeypatch.setattr(nats, "connect", connect)
    responder.script = lambda _: [*deltas()[:1]]
    async with AsyncClient("", api_key="", tenant="") as client:
        reader = asyncio.create_task(read(client.stream("x", max_tokens=5)))
        await until(lambda: responder.requests)
    with pytest.raises(BusUnavailable, match="the client is closed"):
        await asyncio.wait_for(reader, PATIENCE)


async def test_a_result_needs_no_stream(client: AsyncClient, responder: Responder) -> None:
    result = await client.stream("x", n=2).result()
    assert [choice.text for choice in result.choices] == [TEXT, TEXT]
    assert not responder.requests[0].stream


async def test_a_request_continues_its_callers_trace(client: AsyncClient, responder: Responder) -> None:
    traceparent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    await read(client.stream("x", traceparent=traceparent))
    assert responder.headers[0]["traceparent"] == traceparent


async def test_repeated_frames_are_dropped(client: AsyncClient, responder: Responder) -> None:
    parts = deltas()
    responder.script = lambda request: [*parts, *parts[1:], final("", parts), final("", parts), None]
    assert await read(client.stream("x")) == TEXT


async def test_a_gap_is_filled_from_the_resume_subject(client: AsyncClient, responder: Responder) -> None:
    parts = deltas()
    responder.full = [*parts, final("", parts), None]
    responder.script = lambda request: [parts[0], parts[1], parts[4], final("", parts), None]
    assert await read(client.stream("x")) == TEXT
    assert responder.resumes[0] == 2


async def test_a_silence_is_ended_by_the_resume_subject(client: AsyncClient, responder: Responder) -> None:
    parts = deltas()
    responder.full = [*parts, final("", parts)]
    responder.script = lambda request: [parts[0]]
    assert await read(client.stream("x")) == TEXT
    assert responder.resumes[0] == 1


async def test_keep_alives_are_no_silence(client: AsyncClient, responder: Responder) -> None:
    responder.script = lambda request: []
    reading = asyncio.create_task(read(client.stream("x")))
    await until(lambda: responder.requests)
    for _ in range(12):
        responder.send(Queued("r"))
        await asyncio.sleep(0.01)
    assert responder.resumes == []
    responder.send(*responder.answer(responder.requests[0]))
    assert await reading == TEXT


async def test_a_final_frame_waits_for_missing_tokens(client: AsyncClient, responder: Responder) -> None:
    parts = deltas()
    responder.full = [*parts]
    responder.script = lambda request: [*parts[:3], final("", parts), None]
    request = client.stream("x")
    assert await read(request) == TEXT
    assert request.final is not None


async def test_a_forgotten_request_is_sent_again(client: AsyncClient, responder: Responder) -> None:
    """The detokenizer is gone, its resume subject too: the same id with the same body is attached."""
    parts = deltas()

    def script(request: GenerateRequest) -> list[Any]:
        if len(responder.requests) > 1:
            return responder.answer(request)
        responder.send(Accepted(request.request_id or "", "pagewire.v1.cancel.gone", "pagewire.gone", 3))
        return [parts[0]]

    responder.script = script
    assert await read(client.stream("x", request_id="r7")) == TEXT
    assert [request.request_id for request in responder.requests] == ["r7", "r7"]


async def test_a_request_is_sent_again_when_the_resume_subject_is_silent(
    client: AsyncClient, responder: Responder
) -> None:
    """Others listen to the subject of a dead detokenizer, but none of them has the stream."""
    parts = deltas()
    responder.script = lambda request: responder.answer(request) if len(responder.requests) > 1 else [parts[0]]
    assert await read(client.stream("x", request_id="r7")) == TEXT
    assert responder.resumes == [1]
    assert [request.request_id for request in responder.requests] == ["r7", "r7"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_request_goes_on_although_its_repetition_is_refused(
    client: AsyncClient, responder: Responder, streaming: bool
) -> None:
    """The detokenizer is gone, and the tokenizer has too much to do to take the request a second time."""

    def script(request: GenerateRequest) -> list[Any]:
        if len(responder.requests) == 1:
            responder.refusal = Overloaded("too many requests are arriving")
            return [Accepted(request.request_id or "", "pagewire.v1.cancel.gone", "pagewire.gone", 3)] * streaming
        return responder.answer(request)

    async def text() -> str:
        return await read(client.stream("x")) if streaming else (await client.generate("x")).choices[0].text

    responder.script = script
    reading = asyncio.create_task(text())
    await until(lambda: len(responder.requests) > 3 or reading.done())
    responder.refusal = None
    assert await reading == TEXT


async def test_a_request_that_cannot_be_resumed_is_sent_again(client: AsyncClient, responder: Responder) -> None:
    """Its detokenizer has been replaced, and there is no record of a request that was abandoned."""
    parts = deltas()
    responder.script = lambda request: responder.answer(request) if len(responder.requests) > 1 else [parts[0]]
    responder.full = [InvalidRequest("no such request runs"), None]
    assert await read(client.stream("x")) == TEXT
    assert len(responder.requests) == 2


async def test_a_request_that_nobody_accepted_ends_with_its_refusal(client: AsyncClient, responder: Responder) -> None:
    responder.refusal = Unavailable("no detokenizer is there")
    with pytest.raises(Unavailable, match="no detokenizer"):
        await read(client.stream("x"))
    with pytest.raises(Unavailable, match="no detokenizer"):
        await client.generate("x")


async def test_an_accepted_request_ends_with_the_error_of_its_stream(client: AsyncClient, responder: Responder) -> None:
    def script(request: GenerateRequest) -> list[Any]:
        return [Unavailable("the adapter is lost"), None] if len(responder.requests) > 1 else []

    responder.script = script
    with pytest.raises(Unavailable, match="the adapter is lost"):
        await read(client.stream("x"))


async def test_a_late_result_is_requested_again(client: AsyncClient, responder: Responder) -> None:
    responder.script = lambda request: responder.answer(request) if len(responder.requests) > 1 else []
    assert (await client.generate("x")).choices[0].text == TEXT


class MovingBus(MemoryBus):
    """A connection that is lost and made again when a test says so."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, inbox_prefix="_INBOX")
        self.here = asyncio.Event()
        self.here.set()
        self.moves = 0

    @property
    def connected(self) -> bool:
        return self.here.is_set()

    @property
    def reconnections(self) -> int:
        return self.moves

    async def wait_connected(self) -> None:
        await self.here.wait()


@pytest.mark.parametrize("streaming", [True, False])
async def test_frames_lost_in_a_move_to_another_server_are_requested_at_once(
    memory: MemoryBroker, responder: Responder, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr(stream, "FRAME_TIMEOUT", 60)
    monkeypatch.setattr(stream, "RESULT_TIMEOUT", 60)
    bus = MovingBus(memory)
    client = AsyncClient(model=MODEL, bus=bus)
    parts = deltas()
    responder.full = [*parts, final("", parts)]
    responder.script = lambda request: [] if len(responder.requests) == 1 else responder.answer(request)

    async def text() -> str:
        return await read(client.stream("x")) if streaming else (await client.generate("x")).choices[0].text

    reading = asyncio.create_task(text())
    await until(lambda: bool(responder.requests))
    bus.moves += 1
    assert await reading == TEXT


async def test_a_request_waits_for_a_connection_that_moves(
    memory: MemoryBroker, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MovingBus(memory)
    client = AsyncClient(model=MODEL, bus=bus)
    bus.here.clear()
    reading = asyncio.create_task(read(client.stream("x")))
    await settle()
    assert not responder.requests
    bus.here.set()
    assert await reading == TEXT
    monkeypatch.setattr(connection, "RECONNECT_TIMEOUT", 0.02)
    bus.here.clear()
    with pytest.raises(ConnectionLost):
        await read(client.stream("x"))


async def test_a_random_id_is_fresh_in_the_first_attempt_only(client: AsyncClient, responder: Responder) -> None:
    responder.script = lambda request: responder.answer(request) if len(responder.requests) > 1 else []
    await client.generate("x")
    await client.generate("x", request_id="r8")
    drawn, again, named = responder.headers
    assert drawn[FRESH] == "1"
    assert FRESH not in again
    assert FRESH not in named
    assert responder.requests[0].request_id == responder.requests[1].request_id


async def test_an_error_frame_is_raised_as_its_type(client: AsyncClient, responder: Responder) -> None:
    responder.script = lambda request: [deltas()[0], ContextLength("too long"), None]
    deltas_read = aiter(client.stream("x"))
    assert (await anext(deltas_read)).text == WORDS[0]
    with pytest.raises(ContextLength, match="too long"):
        await anext(deltas_read)


async def test_an_unknown_model_is_refused_with_the_served_ones(client: AsyncClient) -> None:
    with pytest.raises(ModelNotFound, match=f"choose one of {MODEL}"):
        await client.generate("x", model="other")


async def test_a_broker_without_a_tokenizer_is_an_error() -> None:
    client = AsyncClient(model=MODEL, bus=MemoryBus(MemoryBroker(), inbox_prefix="_INBOX"))
    with pytest.raises(Unavailable, match="is the stack running"):
        await read(client.stream("x"))


async def test_a_request_waits_for_a_tokenizer_that_answered_before(client: AsyncClient, responder: Responder) -> None:
    assert await read(client.stream("x")) == TEXT
    await responder.leave()
    reading = asyncio.create_task(read(client.stream("x", request_id="r8")))
    await settle()
    assert not reading.done()
    await responder.start()
    assert await reading == TEXT
    assert responder.requests[-1].request_id == "r8"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects of all messages, as they are sent."""
    publish, subjects = MemoryBus.publish, list[str]()

    def note(bus: MemoryBus, subject: str, *arguments: Any, **options: Any) -> None:
        subjects.append(subject)
        publish(bus, subject, *arguments, **options)

    monkeypatch.setattr(MemoryBus, "publish", note)
    return subjects


async def test_a_request_waits_for_the_tokenizer_that_took_it(
    client: AsyncClient, responder: Responder, sent: list[str]
) -> None:
    """It was killed before it could answer; a request for one result has no other sign that it was taken."""
    responder.script = lambda request: []
    reading = asyncio.create_task(client.generate("x", request_id="r8"))
    await until(lambda: responder.requests)
    await responder.leave()
    sent.clear()
    await until(lambda: len(sent) > 2 or reading.done())
    responder.script = responder.answer
    await responder.start()
    assert (await reading).choices[0].text == TEXT


async def test_a_request_waits_for_the_tokenizer_of_a_served_model(
    memory: MemoryBroker, responder: Responder, sent: list[str]
) -> None:
    """A new gateway has learned that the model is served, and the tokenizer is away at its first request."""
    client = AsyncClient(bus=MemoryBus(memory, inbox_prefix="_INBOX"))
    await client.models()
    tenant = await client.for_tenant("alice")
    await responder.leave()
    sent.clear()
    readings = [asyncio.create_task(each.generate("x")) for each in (client, tenant)]
    await until(lambda: len(sent) > 6 or any(reading.done() for reading in readings))
    await responder.start()
    assert [(await reading).choices[0].text for reading in readings] == [TEXT] * 2


async def test_all_spellings_of_a_name_are_one_model(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch, sent: list[str]
) -> None:
    """Its tokenizer knows the name only as a token of subjects, and so does who waits for the tokenizer."""
    monkeypatch.setattr("tests.support.responder.MODEL", "a_b")
    tokenizer = await Responder(MemoryBus(memory)).start()
    client = AsyncClient(bus=MemoryBus(memory, inbox_prefix="_INBOX"))
    assert await read(client.stream("x", model="a.b")) == TEXT
    await tokenizer.leave()
    sent.clear()
    reading = asyncio.create_task(read(client.stream("x", model="a/b")))
    await until(lambda: len(sent) > 2 or reading.done())
    await tokenizer.start()
    assert await reading == TEXT


async def test_an_absence_counts_from_its_own_beginning(
    client: AsyncClient, responder: Responder, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that runs for long is sent again when the tokenizer is not there."""
    monkeypatch.setattr(stream, "RETRY_FOR", 0.3)
    answer = responder.script
    assert await read(client.stream("x")) == TEXT
    responder.script = lambda request: []
    reading = asyncio.create_task(client.generate("x", request_id="r9"))
    await until(lambda: len(responder.requests) > 8)  # it is sent again every 0.05 s
    await responder.leave()
    sent.clear()
    await until(lambda: len(sent) > 2 or reading.done())
    responder.script = answer
    await responder.start()
    assert (await reading).choices[0].text == TEXT


async def test_a_request_fails_when_its_tokenizer_stays_away(
    client: AsyncClient, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "RETRY_FOR", 0.1)
    assert await read(client.stream("x")) == TEXT
    await responder.leave()
    with pytest.raises(Unavailable, match="is the stack running"):
        await client.generate("x")


async def test_a_request_too_large_for_the_broker_is_refused() -> None:
    client = AsyncClient(model=MODEL, bus=MemoryBus(MemoryBroker(max_payload=1000), inbox_prefix="_INBOX"))
    with pytest.raises(PayloadTooLarge):
        await client.generate("x" * 1000)


async def test_a_frame_of_another_release_is_an_error(client: AsyncClient, responder: Responder) -> None:
    def script(request: GenerateRequest) -> list[Any]:
        responder.bus.publish(responder.reply, b"\xc1")
        return []

    responder.script = script
    with pytest.raises(Internal, match="the same release"):
        await read(client.stream("x"))


async def test_leaving_the_loop_cancels_the_request(client: AsyncClient, responder: Responder) -> None:
    responder.script = lambda request: [deltas()[0]]
    reader = aiter(client.stream("x", request_id="r3"))
    async for _ in reader:
        break
    await reader.aclose()
    await settle()
    assert responder.cancels == ["r3"]


async def test_cancel_is_acknowledged(client: AsyncClient, responder: Responder) -> None:
    responder.script = lambda request: [deltas()[0]]
    request = client.stream("x", request_id="r4")
    async for _ in request:
        assert await request.cancel() == "cancelled"
        responder.send(final("r4", deltas()[:1], reason="cancelled"), None)
    assert responder.cancels == ["r4"]
    assert request.final is not None
    assert request.final.choices[0].finish_reason == "cancelled"


async def test_a_request_fails_when_the_pipeline_never_answers(
    client: AsyncClient, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "GRACE", 0.05)
    responder.script = lambda request: []
    with pytest.raises(DeadlineExceeded):
        await read(client.stream("x", timeout=0.05))
    await settle()
    assert responder.cancels


class Clock:
    """The time that streams read."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_a_stream_that_has_ended_does_not_run_out_of_its_time(
    client: AsyncClient, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is slow: all frames are here, and the deadline passes before it takes them."""
    monkeypatch.setattr(stream, "time", clock := Clock())
    parts = deltas()
    responder.script = lambda request: [parts[0]]
    tasks = len(asyncio.all_tasks())
    reader = aiter(client.stream("x"))
    texts = [(await anext(reader)).text]
    responder.send(*parts[1:], final("", parts), None)
    await settle()
    clock.now += 3600
    await until(lambda: len(asyncio.all_tasks()) == tasks)  # nobody looks at the deadline any more
    texts += [delta.text async for delta in reader]
    assert "".join(texts) == TEXT
    assert responder.cancels == []


async def test_a_slow_reader_gets_merged_deltas(client: AsyncClient, responder: Responder) -> None:
    parts = deltas(words=["w"] * 500)
    responder.script = lambda request: [*parts, final("", parts), None]
    got = [delta async for delta in client.stream("x")]
    assert "".join(delta.text for delta in got) == "w" * 500
    assert len(got) < 100
    assert got[-1].start + len(got[-1].token_ids) == 500


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), choices=st.integers(1, 3))
async def test_the_text_is_whole_when_frames_are_lost_repeated_or_late(seed: int, choices: int) -> None:
    """The stream's frames pass a channel that loses, repeats and reorders them; resumptions pass it too."""
    rng = random.Random(seed)
    parts = [delta for index in range(choices) for delta in deltas(index)]
    rng.shuffle(parts)
    parts.sort(key=lambda delta: delta.start)

    def channel(frames: list[Frame | None]) -> list[Any]:
        kept = [frame for frame in frames if rng.random() > 0.3]
        repeated = [frame for frame in kept for _ in range(rng.choice((1, 1, 2)))]
        for i in range(len(repeated) - 1):
            if rng.random() < 0.2:
                repeated[i], repeated[i + 1] = repeated[i + 1], repeated[i]
        return repeated

    broker = MemoryBroker()
    responder = await Responder(MemoryBus(broker)).start()
    whole: list[Frame | None] = [*parts, final("", parts), None]
    responder.full = [*whole]
    responder.script = lambda request: channel(whole)
    lossless_after = 3
    resume = responder.send

    def lossy(*frames: Any, refused: bool = False) -> None:
        loses = 0 < len(responder.resumes) <= lossless_after
        resume(*(channel(list(frames)) if loses else frames), refused=refused)

    responder.send = lossy  # type: ignore[method-assign]
    client = AsyncClient(model=MODEL, bus=MemoryBus(broker, inbox_prefix="_INBOX"))
    texts = [""] * choices
    async with asyncio.timeout(PATIENCE):
        async for delta in client.stream("x", n=choices):
            texts[delta.index] += delta.text
    assert texts == [TEXT] * choices


async def test_batches_hold_all_deltas_that_have_arrived(client: AsyncClient) -> None:
    batches: list[list[Delta]] = [batch async for batch in client.stream("x").batches()]
    assert [delta for batch in batches for delta in batch] == deltas()
    assert len(batches) < len(deltas())
