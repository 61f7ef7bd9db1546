import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagewire.bench._common.event_stream import post
from pagewire.shared.errors import ConfigurationError

EVENTS = [{"n": 1}, {"text": "ü" * 100}]
STREAM = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in EVENTS) + "data: [DONE]\n\n"


@asynccontextmanager
async def server(answer: bytes, size: int = 1 << 20) -> AsyncIterator[str]:
    """Answers every request with the same bytes, `size` of them at a time."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        for start in range(0, len(answer), size):
            writer.write(answer[start : start + size])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/chat/completions"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def read(answer: bytes, size: int = 1 << 20) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        async with server(answer, size) as url:
            return [event async for event in post(url, {})]

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_come_whole_however_they_are_cut(size: int) -> None:
    assert read(chunked(STREAM.encode(), size)) == EVENTS
    assert read(chunked(STREAM.encode(), 50), size) == EVENTS


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nno model", "refuses the request: no model"),
        (chunked(STREAM.encode(), 50)[:-5], "has broken off its answer"),
        (b"SSH-2.0\r\n\r\n", "does not answer"),
    ],
)
def test_an_answer_that_is_no_stream_is_refused(answer: bytes, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read(answer)


def test_a_server_that_is_not_there_is_named() -> None:
    async def main() -> None:
        async for _ in post("http://127.0.0.1:1/v1", {}):
            pass

    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:1/v1 does not answer"):
        asyncio.run(main())
