"""The gateway as a service on a real socket, and the official client of OpenAI against it."""

import asyncio
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pagewire.client.sync import LoopThread
from pagewire.services.gateway.http import http_protocol
from pagewire.services.gateway.http.authentication import OPERATOR_PATHS
from pagewire.services.gateway.service import Gateway
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import ConfigurationError, DeadlineExceeded, Internal, Overloaded
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process import heartbeater, peers
from pagewire.shared.process.listener import listen
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.runtime import Shutdown, run_service
from pagewire.shared.settings.config import Settings
from tests.support.responder import MODEL, WORDS, Responder, deltas, final
from tests.support.waiting import PATIENCE, until

TEXT = "".join(WORDS)


class Running:
    """A gateway, its pipeline and its port."""

    responder: Responder
    port: int
    peers: Peers
    thread: LoopThread
    task: "asyncio.Task[None]"

    def __init__(self, *, supervised: bool) -> None:
        self.shutdown = Shutdown(supervised=supervised)

    async def start(self, api_key: str, api_key_file: str) -> None:
        broker = MemoryBroker()
        self.responder = await Responder(MemoryBus(broker)).start()
        peers = Peers(MemoryBus(broker))
        await peers.listen("gateway")
        settings = Settings(model="bundled", port=0, api_key=api_key, api_key_file=api_key_file)
        bus = MemoryBus(broker, inbox_prefix="_INBOX")
        self.task = asyncio.create_task(run_service("gateway", Gateway, settings, bus, "g1", self.shutdown))
        await until(lambda: peers.find("g1"))
        beat = peers.find("g1")
        assert beat is not None
        assert not beat.ready
        for service in ("tokenizer", "detokenizer", "scheduler"):
            self.responder.bus.publish(
                f"{subjects.HEARTBEAT}.{service}.x", encode(Heartbeat(service, service, True, 0, 0, 0, {}))
            )
        await until(lambda: (beat := peers.find("g1")) and beat.ready)
        self.port = int(beat.load["port"])
        self.peers = peers

    async def beat(self, service: str, instance: str, **load: float) -> None:
        """Sends a heartbeat of a service that is ready."""
        beat = Heartbeat(service, instance, True, 0, 0, 0, load)
        self.responder.bus.publish(f"{subjects.HEARTBEAT}.{service}.{instance}", encode(beat))
        await self.responder.bus.flush()

    async def stop(self) -> None:
        """Ends the gateway as its process does: one that has drained ends by itself."""
        if not self.shutdown.drained:
            self.task.cancel()
        await asyncio.wait({self.task})


@contextmanager
def running(api_key: str = "", *, api_key_file: str = "", supervised: bool = False) -> Iterator[Running]:
    thread = LoopThread()
    gateway = Running(supervised=supervised)
    gateway.thread = thread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeater, "INTERVAL", 600)  # that it is ready must be announced: no later beat will tell
        patch.setattr(peers, "SILENCE", 600)  # the only heartbeat of each instance counts, however slow the test is
        thread.run(gateway.start(api_key, api_key_file))
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


def test_the_first_request_waits_for_a_tokenizer_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    publish, sent = MemoryBus.publish, list[str]()

    def note(bus: MemoryBus, subject: str, *arguments: Any, **options: Any) -> None:
        sent.append(subject)
        publish(bus, subject, *arguments, **options)

    monkeypatch.setattr(MemoryBus, "publish", note)
    with (
        running() as gateway,
        openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        gateway.thread.run(until(lambda: subjects.MODELS in sent))
        gateway.thread.run(gateway.responder.leave())
        answer = pool.submit(client.completions.create, model="", prompt="x")
        gateway.thread.run(until(lambda: sent.count(f"{subjects.GENERATE}.{MODEL}") > 1 or answer.done()))
        gateway.thread.run(gateway.responder.start())
        assert answer.result(20).choices[0].text == TEXT


def test_openais_client_of_responses_works_unchanged() -> None:
    with (
        running(api_key="secret") as gateway,
        openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="secret", max_retries=0) as client,
    ):
        ask: Any = partial(client.responses.create, model=MODEL, max_output_tokens=5)
        whole = ask(input="x", instructions="Be brief.", metadata={"a": "b"}, store=False)
        assert (whole.output_text, whole.status, whole.metadata) == (TEXT, "incomplete", {"a": "b"})
        assert whole.usage is not None
        assert whole.usage.output_tokens == 2
        turns = [*[{"role": "user", "content": "x"}, *whole.output], {"role": "user", "content": "more"}]
        assert ask(input=turns).output_text == TEXT
        sent = gateway.responder.requests
        assert sent[0].messages is not None
        assert [message.role for message in sent[0].messages] == ["system", "user"]
        assert [message.role for message in sent[1].messages or ()] == ["user", "assistant", "user"]
        events = list(ask(input="x", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == TEXT
        gateway.responder.script = lambda request: [*deltas(), final("r", deltas(), "stop"), None]
        with client.responses.stream(model=MODEL, input="x") as stream:
            assert stream.get_final_response().output_text == TEXT
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            ask(input="x", previous_response_id="resp_1")
        with pytest.raises(openai.BadRequestError, match="input_image"):
            ask(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}])
        gateway.responder.script = lambda request: [*deltas()[:2], Internal("a fault"), None]
        with pytest.raises(openai.APIError, match="a fault"):
            list(ask(input="x", stream=True))


def test_anthropics_client_works_unchanged() -> None:
    with (
        running(api_key="secret") as gateway,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key="secret", max_retries=0) as client,
    ):
        hello: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hello!"}]
        ask: Any = partial(client.messages.create, model=MODEL, max_tokens=2, messages=hello)
        whole = ask(
            system="Be brief.", stop_sequences=["x"], extra_body={"temperature": 0.5}, metadata={"user_id": "me"}
        )
        assert isinstance(whole.content[0], anthropic.types.TextBlock)
        assert (whole.content[0].text, whole.stop_reason, whole.usage.output_tokens) == (TEXT, "max_tokens", 2)
        assert gateway.responder.requests[0].sampling.stop == ["x"]
        kinds = [event.type for event in ask(stream=True)]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        with client.messages.stream(model=MODEL, max_tokens=5, messages=hello) as stream:
            assert "".join(stream.text_stream) == TEXT
            assert stream.get_final_message().usage.input_tokens == 3
        assert client.messages.count_tokens(model=MODEL, messages=hello).input_tokens == 3
        assert [model.id for model in client.models.list()] == [MODEL]
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            ask(messages=[{"role": "user", "content": [image]}])
        with pytest.raises(anthropic.NotFoundError, match="no model other"):
            ask(model="other")
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        gateway.responder.script = lambda request: [Overloaded("busy", 1000), None]
        with pytest.raises(anthropic.RateLimitError, match="busy"):
            ask()
        gateway.responder.script = lambda request: [*deltas()[:2], Internal("a fault"), None]
        with pytest.raises(anthropic.APIError, match="a fault"):
            list(ask(stream=True))


def test_the_official_clients_do_not_repeat_a_request_that_ran_out_of_its_time() -> None:
    """They would compute all of it again, under another id."""
    with running() as gateway:
        gateway.responder.script = lambda request: [DeadlineExceeded("timeout_ms has passed"), None]
        url = f"http://127.0.0.1:{gateway.port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client, pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model=MODEL, prompt="x")
        assert caught.value.status_code == 408
        with anthropic.Anthropic(base_url=url, api_key="-") as other, pytest.raises(anthropic.APIStatusError) as failed:
            other.messages.create(model=MODEL, max_tokens=2, messages=[{"role": "user", "content": "Hello!"}])
        assert failed.value.status_code == 408
        assert len(gateway.responder.requests) == 2


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_an_ended_gateway_listens_no_more() -> None:
    with running() as gateway, socket.create_connection(("127.0.0.1", gateway.port)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gateway.port)).close()


@contextmanager
def connection(gateway: Running) -> Iterator[Callable[[str], tuple[int, str]]]:
    """Opens an HTTP connection, which stays open between requests as far as the server allows it.

    Yields a function that sends a request for text or a GET, and returns the status and the header `Connection`.
    """
    client = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE)

    def ask(path: str) -> tuple[int, str]:
        if path.startswith("/v1"):
            body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 5})
            client.request("POST", path, body, {"Content-Type": "application/json"})
        else:
            client.request("GET", path)
        with client.getresponse() as response:
            response.read()
            return response.status, response.getheader("Connection", "")

    with closing(client):
        yield ask


ENDS = ("", "/", "//", "%2F", "%0A", ";/", "%00", "%20", "?a=b")
"""What may stand behind a path."""


def test_no_spelling_of_a_path_lets_a_tenant_pass_for_the_operator(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:alice-key-0123456789\n")

    def status(method: str, path: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        client.request(method, path, b"{}" if method == "POST" else None, headers)
        with client.getresponse() as response:
            response.read()
            return response.status

    with (
        running(api_key="secret", api_key_file=str(keys)) as gateway,
        closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE)) as client,
    ):
        for path in OPERATOR_PATHS:
            method = "POST" if path.startswith("/v1") else "GET"
            assert status(method, path, "secret") in {200, 400}
            spellings = (path, f"/%{ord(path[1]):x}{path[2:]}", f"/{path}", f"/.{path}", path.replace("/", "//"))
            for spelling in map("".join, product(spellings, ENDS)):
                assert status(method, spelling, "alice-key-0123456789") in {403, 404}, spelling


def ask_once(gateway: Running, path: str) -> tuple[int, str]:
    """Returns the status and the header `Connection` of a request over a new connection."""
    with connection(gateway) as ask:
        return ask(path)


def drain(gateway: Running, signal: Callable[[Shutdown], None]) -> None:
    """Sends the gateway a signal; returns when its heartbeat says that it drains."""

    async def signalled() -> None:
        signal(gateway.shutdown)
        await until(lambda: (beat := gateway.peers.find("g1")) is not None and beat.draining)

    gateway.thread.run(signalled())


def test_an_idle_gateway_ends_at_once() -> None:
    with running() as gateway:
        drain(gateway, Shutdown.signal)
        gateway.thread.run(asyncio.wait_for(asyncio.shield(gateway.task), PATIENCE))


def test_a_draining_gateway_serves_until_its_successor_is_ready() -> None:
    with running(supervised=True) as gateway, connection(gateway) as ask:
        assert ask("/v1/completions") == (200, "")
        drain(gateway, Shutdown.signal)
        assert ask("/health") == (200, "")
        gateway.thread.run(gateway.beat("gateway", "elsewhere", port=1.0))
        assert ask_once(gateway, "/v1/completions") == (200, "")
        gateway.thread.run(gateway.beat("gateway", "g2", port=float(gateway.port)))
        while (answer := ask("/health")) == (200, ""):
            pass
        assert answer == (503, "close")
        gateway.thread.run(asyncio.wait_for(asyncio.shield(gateway.task), PATIENCE))


def test_a_draining_gateway_answers_requests_over_open_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LAST_IDLE_TIME", PATIENCE)  # however long the successor takes
    with running(supervised=True) as gateway, connection(gateway) as ask:
        assert ask("/v1/completions") == (200, "")
        drain(gateway, Shutdown.signal)
        gateway.thread.run(gateway.beat("gateway", "g2", port=float(gateway.port)))
        with suppress(ConnectionError):
            while True:  # until it has seen its successor, and listens no more
                ask_once(gateway, "/livez")
        assert ask("/v1/completions") == (200, "close")


def test_a_gateway_of_a_stopping_stack_refuses_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LAST_IDLE_TIME", PATIENCE)
    with running(supervised=True) as gateway, connection(gateway) as ask:
        assert ask("/v1/completions") == (200, "")
        drain(gateway, Shutdown.stop)
        assert ask("/v1/completions") == (503, "close")
        for spelling in ("/v1/completions/", "/v1/completions//", "/v1/completions%2f", "/v1/completions%0A"):
            assert ask_once(gateway, spelling) == (503, "close")
        assert ask_once(gateway, "/health") == (503, "close")
        assert ask_once(gateway, "/livez") == (200, "close")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="-", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="stopping") as caught:
                client.completions.create(model=MODEL, prompt="x")
            assert caught.value.response.headers["Retry-After"] == "1"
