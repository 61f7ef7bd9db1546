"""The clients of a run: what they take for an answer, a refusal, and a request that never ends."""

import asyncio

import pytest

from pagewire.bench._chaos import readers
from pagewire.bench._chaos.checks import Seen
from pagewire.bench._chaos.readers import HttpReader, NatsReader, _FrameRecord
from pagewire.bench._chaos.requests import HTTP, NATS, Request
from pagewire.client import frames
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import RequestError, Unavailable
from pagewire.shared.messages.client import ErrorFrame, Frame, GenerateRequest
from pagewire.shared.messages.client_headers import REFUSED
from tests.support.responder import MODEL, WORDS, Responder, final

pytestmark = pytest.mark.anyio

ANSWER = b'{"choices": [{"index": 0, "text": "late", "finish_reason": "stop", "stop_reason": null}]}'
REQUEST = Request(0, HTTP, "whole", "Once", {"max_tokens": 4})


async def read(deadline: float, delay: float | None) -> Seen:
    """Reads an answer that comes `delay` seconds after the request; None: it never comes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if delay is None:
            await reader.read()  # until the client goes away
        else:
            await asyncio.sleep(delay)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        closed.set()

    seen, closed = Seen(), asyncio.Event()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        reader = HttpReader(f"http://{host}:{port}", deadline)
        await reader.read(REQUEST, seen)
        await reader.close()
        await closed.wait()
    return seen


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PATIENCE", 0.1)


async def test_a_request_over_http_has_the_deadline_of_the_gateway() -> None:
    """A slow machine is no fault of the stack: NATS requests alone have the deadline of the run."""
    seen = await read(deadline=0.1, delay=0.4)
    assert not seen.hung
    assert seen.choice(0).text == "late"


async def test_a_request_without_an_end_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "TIMEOUT_MS", 100)
    assert (await read(deadline=0.1, delay=None)).hung


async def test_each_attempt_over_nats_has_a_deadline_of_its_own() -> None:
    """A request that was refused is sent again: what counts is the deadline that it has then."""
    broker = MemoryBroker()
    responder = await Responder(MemoryBus(broker)).start()

    def script(request: GenerateRequest) -> list[Frame | RequestError | None]:
        if len(responder.requests) == 1:
            return [Unavailable("the store is full")]
        asyncio.get_running_loop().call_later(0.3, responder.send, *responder.answer(request))
        return []

    responder.script = script
    reader, seen = NatsReader(MemoryBus(broker, inbox_prefix="_INBOX"), deadline=0.3), Seen()
    await reader.read(Request(0, NATS, "greedy", "Once", {"max_tokens": 5}, model=MODEL), seen)
    await reader.close()
    assert not seen.hung
    assert seen.choice(0).text == "".join(WORDS)
    assert len(seen.refusals) == 1


@pytest.mark.parametrize("refused", [True, False])
def test_the_refusal_of_a_request_that_was_sent_again_is_no_end(*, refused: bool) -> None:
    """`Pagewire-Refused` says that the frame refuses what was sent, and not the stream."""
    record = _FrameRecord(Seen())
    record.inboxes.add("_INBOX.a")
    error = ErrorFrame(503, "unavailable", "the store is full", retryable=True, request_id="r", tokens_emitted=0)
    for frame, headers in ((error, {REFUSED: "1"} if refused else {}), (final("r", []), {})):
        record.take(Message("_INBOX.a", frames.encode(frame), headers=headers))
    assert record.failed
    assert bool(record.conflicts) is not refused
