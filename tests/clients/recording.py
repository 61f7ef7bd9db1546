"""Requests of real clients: a relay that keeps them, their form in tests/data/clients, and their replay.

A recording has no credentials, no ids and no folders of a machine, and its long texts are cut.
"""

import asyncio
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from tests.support.waiting import PATIENCE

FOLDER = Path(__file__).parents[1] / "data" / "clients"
KEPT_HEADERS = (
    "accept",
    "accept-encoding",
    "anthropic-beta",
    "anthropic-version",
    "connection",
    "content-type",
    "http2-settings",
    "upgrade",
    "user-agent",
)
"""Headers that a server may read."""
BEGINNING, END = 64, 24
"""Characters of a long text that a recording keeps; a text without a space, such as a pattern, stays whole."""
SCRUBBED = (
    (
        re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        "00000000-0000-4000-8000-000000000000",
    ),
    (re.compile(r"[0-9a-f]{64}"), "0" * 64),
    (re.compile(r"/tmp/[\w./-]+"), "/home/user/project"),
)


class Recording(msgspec.Struct, frozen=True):
    """A request of a client, and what the scripted model answers."""

    method: str
    path: str
    version: str
    """Version of HTTP: 1.0 or 1.1."""
    headers: dict[str, str]
    body: Any
    answer: list[str] = []
    """Texts, and names of called tools in brackets."""

    def replay(self, url: str) -> tuple[int, bytes]:
        """Sends the request as its client did; returns the status and the body of the answer."""
        address = urlsplit(url)
        body = b"" if self.body is None else msgspec.json.encode(self.body)
        headers = {"host": address.netloc, "content-length": str(len(body))} | self.headers
        lines = [
            f"{self.method} {self.path} HTTP/{self.version}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        with socket.create_connection((address.hostname or "", address.port or 80), PATIENCE) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            with http.client.HTTPResponse(connection, method=self.method) as response:
                response.begin()
                return response.status, response.read()


def summary(body: bytes) -> list[str]:
    """Returns the texts of an answer, and the names of called tools in brackets, after a look at its shape.

    Raises:
        AssertionError: it is no whole answer of one of the APIs.
    """
    if b'"done":' in body:
        return _of_lines([msgspec.json.decode(line) for line in body.splitlines()])
    if not body.startswith((b"data:", b"event:")):
        return _of_whole(msgspec.json.decode(body))
    events = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        last = msgspec.json.decode(events[-1])
        if last["type"] == "response.completed":
            return _of_whole(last["response"])
        assert last["type"] == "message_stop", last
        return _of_blocks([msgspec.json.decode(event) for event in events])
    return _of_chunks([msgspec.json.decode(event) for event in events[:-1]])


def _of_whole(answer: Any) -> list[str]:
    if "capabilities" in answer:
        return list(answer["capabilities"])
    if answer.get("object") == "chat.completion":
        message = answer["choices"][0]["message"]
        calls = [f"[{call['function']['name']}]" for call in message.get("tool_calls") or ()]
        return [*filter(None, [message["content"]]), *calls]
    if answer.get("object") == "response":
        assert answer["status"] == "completed", answer
        return [_of_item(item) for item in answer["output"]]
    assert answer["type"] == "message", answer
    return [block["text"] if block["type"] == "text" else f"[{block['name']}]" for block in answer["content"]]


def _of_item(item: Any) -> str:
    return f"[{item['name']}]" if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def _of_chunks(chunks: list[Any]) -> list[str]:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call["function"].get("name") for delta in deltas for call in delta.get("tool_calls") or ()]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return [*filter(None, [text]), *(f"[{name}]" for name in filter(None, calls))]


def _of_blocks(events: list[Any]) -> list[str]:
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    return [*filter(None, [text]), *(f"[{block['name']}]" for block in starts if block["type"] == "tool_use")]


def _of_lines(lines: list[Any]) -> list[str]:
    assert lines[-1]["done"], lines
    messages = [line.get("message") or {"content": line["response"]} for line in lines]
    text = "".join(message["content"] for message in messages)
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    return [*filter(None, [text]), *(f"[{name}]" for name in calls)]


class Relay:
    """Passes the bytes of connections on, and keeps what clients sent."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._connections: list[bytearray] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._pass_on, "127.0.0.1", 0), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self._connections.append(kept)
        upstream_reader, upstream = await asyncio.open_connection(self._target.hostname, self._target.port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, *copies: bytearray) -> None:
            try:
                while data := await source.read(65_536):
                    for copy in copies:
                        copy.extend(data)
                    target.write(data)
                    await target.drain()
            except ConnectionError:
                pass  # the client is gone
            finally:
                target.close()

        await asyncio.gather(copy(reader, upstream, kept), copy(upstream_reader, writer))

    def requests(self) -> list[Recording]:
        """Returns the requests so far, each once."""
        requests: dict[bytes, Recording] = {}
        for connection in self._connections:
            for request in _split(bytes(connection)):
                requests.setdefault(msgspec.json.encode(request), request)
        return list(requests.values())


def _split(data: bytes) -> Iterator[Recording]:
    """Yields the requests of a connection. Bodies have lengths: no client sends chunks."""
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        method, path, version = first.split()
        length = int(headers.get("content-length", 0))
        body = msgspec.json.decode(data[:length]) if length else None
        data = data[length:]
        if method == "POST":
            kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
            yield Recording(method, path, version.removeprefix("HTTP/"), kept, _shorten(body))


def _shorten(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shorten(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shorten(entry) for entry in value]
    if not isinstance(value, str):
        return value
    for pattern, replacement in SCRUBBED:
        value = pattern.sub(replacement, value)
    is_long = len(value) > BEGINNING + END and " " in value
    return f"{value[:BEGINNING]} … {value[-END:]}" if is_long else value


def save(client: str, requests: list[Recording], url: str) -> None:
    """Writes the requests of a client that a server answers, with the answers."""
    FOLDER.mkdir(exist_ok=True)
    answers = [(request, *request.replay(url)) for request in requests]
    answered = [
        msgspec.structs.replace(request, answer=summary(body)) for request, status, body in answers if status == 200
    ]
    lines = b",\n".join(msgspec.json.encode(request) for request in answered)
    (FOLDER / f"{client}.json").write_bytes(b"[\n" + lines + b"\n]\n")


def load() -> dict[str, Recording]:
    """Returns all recordings by client and number."""
    return {
        f"{path.stem} {number}": recording
        for path in sorted(FOLDER.glob("*.json"))
        for number, recording in enumerate(msgspec.json.decode(path.read_bytes(), type=list[Recording]), start=1)
    }
