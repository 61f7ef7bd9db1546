"""A gateway on a real port whose model says what a test has written."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.client.sync import LoopThread
from pagewire.services.gateway.http.http_protocol import ConnectionLimits, Connections
from pagewire.services.gateway.http.origin import AllowedPages, PageGuard
from pagewire.services.gateway.http.server import Server
from pagewire.services.gateway.routes.health import REQUIRED
from pagewire.shared.messages.client import (
    ChatFormat,
    Delta,
    Final,
    FinalChoice,
    GenerateRequest,
    Logprob,
    TokenOrigin,
    Usage,
)
from pagewire.shared.process.listener import listen
from tests.services.gateway.http_client import Gateway, start_gateway

BODY_LIMIT = 1 << 20


@dataclass
class Model:
    """The next answer of the model.

    Attributes:
        text: the answer, whose words become tokens.
        holds: whether the answer does not end by itself.
        pace: seconds between two batches of 100 tokens; 0: all come at once.
        requests: what was asked so far.
    """

    text: str = "Hello **world**, this is `code`."
    holds: bool = False
    pace: float = 0.0
    requests: list[GenerateRequest] = field(default_factory=list)

    def script(self, request: GenerateRequest) -> list[Any]:
        """The frames of an answer."""
        self.requests.append(request)
        count = request.sampling.n
        deltas = [
            Delta(index, start, word, [start], _logprobs(word, request), origin=_origin(start, request))
            for index in range(count)
            for start, word in enumerate(self._words())
        ]
        if self.holds:
            return deltas
        ends = [FinalChoice(index, "stop") for index in range(count)]
        return [*deltas, Final(request.request_id or "", ends, Usage(3, len(deltas))), None]

    def _words(self) -> list[str]:
        return [part + " " for part in self.text.split(" ")[:-1]] + self.text.split(" ")[-1:]


def _origin(position: int, request: GenerateRequest) -> TokenOrigin | msgspec.UnsetType:
    """Returns how a token came: of three in a row one was sampled, one drafted, one forced."""
    origins: tuple[TokenOrigin, ...] = ("sampled", "drafted", "forced")
    return origins[position % 3] if request.return_token_origins else msgspec.UNSET


@dataclass
class ScriptedServer:
    """The server, its model, and the gateway behind it, on a thread of their own."""

    thread: LoopThread
    url: str
    model: Model
    gateway: Gateway
    connections: Connections

    def cut_connections(self) -> None:
        """Cuts all connections, as a server that dies does."""

        async def cut() -> None:
            self.connections.abort()

        self.thread.run(cut())

    def calls_tools(self) -> None:
        """Has texts read for tool calls from now on."""
        self.gateway.responder.chat_format = ChatFormat(tool_calls="hermes")


@contextmanager
def scripted_server(api_key: str = "") -> Iterator[ScriptedServer]:
    """Runs a server on a thread of its own."""
    thread = LoopThread()
    server, tasks = thread.run(_start(thread, api_key))
    try:
        yield server
    finally:
        thread.run(_stop(tasks))
        thread.close()


async def _start(thread: LoopThread, api_key: str) -> "tuple[ScriptedServer, list[asyncio.Task[None]]]":
    gateway = await start_gateway(api_key, BODY_LIMIT)
    model = Model()
    pacing: set[asyncio.Task[None]] = set()

    def script(request: GenerateRequest) -> list[Any]:
        frames = model.script(request)
        if not model.pace:
            return frames
        pacing.add(asyncio.create_task(_send_slowly(gateway, frames, model.pace)))
        return []

    gateway.responder.script = script
    listener = listen("127.0.0.1", 0)
    guarded = PageGuard(gateway.app, None if api_key else AllowedPages({"127.0.0.1"}, ()))
    connections = Connections(ConnectionLimits())
    server = Server(guarded, listener, connections)
    tasks = [asyncio.create_task(work) for work in (server.run(), gateway.console.run(), _beat(gateway))]
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return ScriptedServer(thread, url, model, gateway, connections), tasks


async def _stop(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _send_slowly(gateway: Gateway, frames: list[Any], pace: float) -> None:
    for begin in range(0, len(frames), 100):
        gateway.responder.send(*frames[begin : begin + 100])
        await asyncio.sleep(pace)


async def _beat(gateway: Gateway) -> None:
    """Sends the heartbeats of a pipeline that is ready."""
    while True:
        for service in REQUIRED:
            gateway.beat(service)
        await asyncio.sleep(0.5)


def _logprobs(word: str, request: GenerateRequest) -> Any:
    if request.sampling.logprobs is None:
        return None
    return [{1: Logprob(-0.1, 1, word), 2: Logprob(-2.5, 2, "other")}]
