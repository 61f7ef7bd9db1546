"""The gateway as a service on a real socket, and the official client of OpenAI against it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from pagewire.client.sync import LoopThread
from pagewire.services.gateway import server
from pagewire.services.gateway.service import Gateway
from pagewire.shared import heartbeater, subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.config import Settings
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.peers import Peers
from pagewire.shared.runtime import run_service
from tests.support.responder import MODEL, WORDS, Responder
from tests.support.waiting import until

TEXT = "".join(WORDS)


class Running:
    """A gateway, its pipeline and its port."""

    responder: Responder
    port: int
    task: "asyncio.Task[None]"

    async def start(self, api_key: str) -> None:
        broker = MemoryBroker()
        self.responder = await Responder(MemoryBus(broker)).start()
        peers = Peers(MemoryBus(broker))
        await peers.listen("gateway")
        settings = Settings(model="bundled", port=0, api_key=api_key)
        bus = MemoryBus(broker, inbox_prefix="_INBOX")
        self.task = asyncio.create_task(run_service("gateway", Gateway, settings, bus, "g1"))
        await until(lambda: peers.find("g1"))
        beat = peers.find("g1")
        assert beat is not None
        assert not beat.ready
        for service in ("tokenizer", "detokenizer", "scheduler"):
            self.responder.bus.publish(
                f"{subjects.HEARTBEAT}.{service}.x", encode(Heartbeat(service, service, True, 0, 0, 0, {}))
            )
        await until(lambda: (found := peers.find("g1")) and found.ready)
        self.port = int(beat.load["port"])

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


@contextmanager
def running(api_key: str = "") -> Iterator[Running]:
    thread = LoopThread()
    gateway = Running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeater, "INTERVAL", 600)  # that it is ready must be announced: no later beat will tell
        thread.run(gateway.start(api_key))
        try:
            yield gateway
        finally:
            thread.run(gateway.stop())
            thread.close()


def test_the_official_client_works_unchanged() -> None:
    with (
        running(api_key="secret") as gateway,
        openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="secret", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.completions.create(model=MODEL, prompt="x", max_tokens=5, extra_body={"top_k": 3})
        assert whole.choices[0].text == TEXT
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 2
        assert gateway.responder.requests[0].sampling.top_k == 3
        parts = list(
            client.completions.create(model=MODEL, prompt="x", stream=True, stream_options={"include_usage": True})
        )
        assert "".join(part.choices[0].text for part in parts if part.choices) == TEXT
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == 5
        with pytest.raises(openai.NotFoundError, match="no model other"):
            client.completions.create(model="other", prompt="x")
        assert client.completions.create(model=MODEL, prompt="x", echo=True).choices[0].text == "x" + TEXT
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model=MODEL, prompt="x", suffix="y")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            server.listen("127.0.0.1", port)


def test_it_listens_no_more_once_it_has_ended() -> None:
    with running() as gateway, socket.create_connection(("127.0.0.1", gateway.port)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gateway.port)).close()
