"""Requests that public reports of HTTP servers name: each is answered, or refused at once."""

import pytest

from pagewire.services.gateway.http.http_protocol import ConnectionLimits
from tests.services.gateway.http.test_http_protocol import GET, Peer, serving

pytestmark = pytest.mark.anyio

H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
BODY = b"content-length: 5\r\n\r\nhello"
ODD = {
    "the JDK's HttpClient and curl --http2 offer h2c with a body (uvicorn#2722)": (
        b"POST / HTTP/1.1\r\nhost: x\r\n" + H2C + BODY,
        b"5",
    ),
    "a chunked body behind an offer": (
        b"POST / HTTP/1.1\r\nhost: x\r\n" + H2C + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"2",
    ),
    "an offer of websocket": (
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"0",
    ),
    "an absolute target": (b"GET http://x/ HTTP/1.1\r\nhost: x\r\n\r\n", b"0"),
    "a compressed body": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\n" + BODY, 415),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n" + BODY, 400),
    "a length and chunks (request smuggling)": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + BODY,
        400,
    ),
    "a length with a sign": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nhello", 400),
    "a space before the colon": (b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", 400),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "a tunnel": (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
}
"""Bytes of a request, and the body of the answer or the status of the refusal."""


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("pieces", [1, 7])
async def test_an_odd_request_is_answered_or_refused(name: str, pieces: int) -> None:
    data, expected = ODD[name]
    async with serving(ConnectionLimits()) as running:
        peer = await running.connect()
        step = -(-len(data) // pieces)
        for begin in range(0, len(data), step):
            peer.send(data[begin : begin + step])
            await peer.writer.drain()
        status, body = await peer.answer()
        assert (body if isinstance(expected, bytes) else status) == expected
        assert status == (200 if isinstance(expected, bytes) else expected)
        assert await running.answers(), "the next client is served"


async def test_the_connection_goes_on_behind_an_offer() -> None:
    offer, _ = ODD["the JDK's HttpClient and curl --http2 offer h2c with a body (uvicorn#2722)"]
    async with serving(ConnectionLimits()) as running:
        peer = await running.connect()
        peer.send(offer + offer + GET)
        assert [await peer.answer() for _ in range(3)] == [(200, b"5"), (200, b"5"), (200, b"0")]


async def whole(peer: Peer, data: bytes) -> tuple[bytes, bytes]:
    """Returns the header and the body of an answer that ends with the connection."""
    peer.send(data)
    head, _, body = (await peer.reader.read()).partition(b"\r\n\r\n")
    return head.lower(), body


async def test_http_1_0_gets_no_chunks() -> None:
    async with serving(ConnectionLimits()) as running:
        peer = await running.connect()
        head, body = await whole(peer, b"POST / HTTP/1.0\r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\nhello")
        assert (b"chunked" in head, b"connection: close" in head, body) == (False, True, b"5")
        peer = await running.connect()
        peer.send(b"GET /watched HTTP/1.0\r\n\r\n")
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert (b"chunked" in head, await peer.reader.readexactly(5)) == (False, b"begun")


async def test_many_offers_at_once_are_answered_one_by_one() -> None:
    """In one piece they must not nest: thousands of them fit into what a connection reads at a time."""
    offer = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: a\r\n\r\n"
    async with serving(ConnectionLimits()) as running:
        peer = await running.connect()
        peer.send(offer * 900 + GET)
        assert [await peer.answer() for _ in range(901)] == [(200, b"0")] * 901
