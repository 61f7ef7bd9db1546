"""Services are restarted one by one, and the whole stack is stopped, under load: no stream is lost, cut or doubled."""

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.client.stream import Stream
from pagewire.embedded.address import Address
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import DeadlineExceeded, Overloaded, PagewireError, Unavailable
from pagewire.shared.settings.config import Settings
from tests.pagewire.serving import Served, serving
from tests.support.checkpoints import checkpoint
from tests.support.processes import freeze, processes
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.anyio]

STREAMS = 64
STOPPED = 192
"""Streams that run when the whole stack is stopped."""
TOKENS = 200
SAMPLING = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = ["The morning train", "An old woman", "Two children", "How far is the sea?", "One", "A stone bridge"]
ROLLING = ("tokenizer", "scheduler", "executor", "detokenizer", "gateway")
"""The services that are restarted, in this order."""


def settings(**changes: object) -> Settings:
    defaults = {"model": str(checkpoint("llama")), "dtype": "float32", "num_kv_blocks": 2000, "log_level": "error"}
    return Settings(**{**defaults, "port": 0, "nats_port": 0, "max_num_seqs": STREAMS, **changes})  # type: ignore[arg-type]


async def refusal_of(client: AsyncClient) -> Unavailable:
    """The refusal of a request over NATS by a stack that stops. Until the tokenizer stops, a request is accepted and
    waits, or is refused because its wait would be too long."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await client.generate(PROMPTS[0], SAMPLING, timeout=1)
            except (DeadlineExceeded, Overloaded):
                continue
            except Unavailable as refused:
                return refused


async def until_stopping(served: Served) -> None:
    """Returns once `/health` says that the server stops; a frozen executor alone is another reason for a 503."""
    async with asyncio.timeout(PATIENCE):
        while "stopping" not in await asyncio.to_thread(health, served):
            pass


def health(served: Served) -> str:
    """Returns the text of `/health`."""
    try:
        with urllib.request.urlopen(f"{served.http}/health", timeout=PATIENCE) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


async def over_http(address: Address, prompt: str, on_text: Callable[[], None] = lambda: None) -> str:
    """The text of one stream over a connection of its own."""
    host, _, port = address.http.removeprefix("http://").partition(":")
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    try:
        return await read_text(reader, on_text)
    finally:
        writer.close()


async def read_text(reader: asyncio.StreamReader, on_text: Callable[[], None]) -> str:
    """The text of a response with events."""
    text, line = "", (await reader.readline()).decode()
    assert " 200 " in line, line + (await reader.read(2000)).decode()
    while line != "data: [DONE]\n":
        line = (await reader.readline()).decode()
        assert line, "the connection was closed before the end"
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            on_text()
    return text


async def over_nats(client: AsyncClient, prompt: str, on_text: Callable[[], None] = lambda: None) -> str:
    """The text of a new stream."""
    return await text_of(client.stream(prompt, SAMPLING), on_text)


async def text_of(stream: Stream, on_text: Callable[[], None] = lambda: None) -> str:
    """The text of a stream."""
    text, tokens = "", 0
    async for delta in stream:
        text += delta.text
        tokens += len(delta.token_ids)
        on_text()
    assert tokens == TOKENS
    return text


@dataclass
class Load:
    """Streams that begin again whenever they have ended, until `stop` is called."""

    ask: list[Callable[[str, Callable[[], None]], Awaitable[str]]]
    expected: dict[str, str]
    ended: int = 0
    pause: float = 0.0
    """Longest time that any stream waited for its next text, in seconds, since it was set to 0."""
    running: bool = True
    failed: list[Exception] = field(default_factory=list)

    async def run(self, number: int) -> None:
        ask, prompt = self.ask[number % len(self.ask)], PROMPTS[number % len(PROMPTS)]
        last = time.monotonic()

        def on_text() -> None:
            nonlocal last
            now = time.monotonic()
            self.pause, last = max(self.pause, now - last), now

        while self.running:
            try:
                text = await ask(prompt, on_text)
                assert text == self.expected[prompt]
            except (PagewireError, AssertionError, OSError) as error:
                self.failed.append(error)
                return
            self.ended += 1


@asynccontextmanager
async def load(address: Address, client: AsyncClient, streams: int) -> AsyncIterator[Load]:
    """Runs streams over NATS and HTTP during the block, and to their end after it."""
    expected = {prompt: await over_nats(client, prompt) for prompt in PROMPTS}
    background = Load([lambda *a: over_nats(client, *a), lambda *a: over_http(address, *a)], expected)
    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(background.run(number))
        try:
            await until(lambda: background.ended >= streams or background.failed)
            yield background
        finally:
            background.running = False
    assert background.failed == []


async def restart(stack: Stack, service: str, running: Load) -> None:
    """Ends a service and returns once its successor is ready and the old process has ended."""
    (old,) = processes(service)
    os.kill(old, signal.SIGTERM)
    await until(lambda: processes(service) not in ([], [old]) or running.failed)
    await until(lambda: old not in processes(service) or running.failed)
    await stack.ready()


async def test_a_rolling_restart_loses_nothing() -> None:
    async with Stack(settings()) as stack:
        address = await stack.ready()
        async with AsyncClient(address.nats) as client, load(address, client, STREAMS) as running:
            for service in ROLLING:
                running.pause = 0.0
                await restart(stack, service, running)
                enough = running.ended + STREAMS
                await until(lambda enough=enough: running.ended > enough or running.failed)  # type: ignore[misc]
                print(f"{service}: longest pause {running.pause:.2f} s")
                assert running.failed == [], service


class Many:
    """Streams over NATS and HTTP, half each, of a `pagewire serve`."""

    def __init__(self, served: Served, client: AsyncClient, count: int) -> None:
        self.begun = 0
        address = Address(served.nats, served.http)
        self.prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
        self.tasks = [
            asyncio.create_task(
                over_http(address, prompt, self._begin()) if number % 2 else over_nats(client, prompt, self._begin())
            )
            for number, prompt in enumerate(self.prompts)
        ]

    def _begin(self) -> Callable[[], None]:
        first = True

        def on_text() -> None:
            nonlocal first
            self.begun += first
            first = False

        return on_text


def serve() -> AbstractContextManager[Served]:
    flags = ("--dtype", "float32", "--num-kv-blocks", "2000", "--max-num-seqs", str(STOPPED))
    return serving("--model", str(checkpoint("llama")), *flags)


async def test_a_stopped_stack_ends_accepted_requests_and_refuses_new_ones() -> None:
    with serve() as served:
        async with AsyncClient(served.nats) as client:
            expected = {prompt: await over_nats(client, prompt) for prompt in PROMPTS}
            many = Many(served, client, STOPPED)
            await until(lambda: many.begun == STOPPED or any(task.done() for task in many.tasks))
            (executor,) = processes("executor", served.process.pid)
            await freeze(executor)
            # The tokens of all other streams may exist by now, and the stack would end with the last of these streams.
            late = client.stream(PROMPTS[0], SAMPLING)
            last = asyncio.create_task(text_of(late))
            await until(lambda: late.prompt_tokens is not None or last.done())
            assert not last.done()
            served.process.send_signal(signal.SIGTERM)
            await until_stopping(served)
            refused = await asyncio.gather(
                refusal_of(client),
                over_http(Address(served.nats, served.http), PROMPTS[0]),
                return_exceptions=True,
            )
            with suppress(ProcessLookupError):  # it was silent for so long that it has been replaced
                os.kill(executor, signal.SIGCONT)
            assert isinstance(refused[0], Unavailable)
            assert "stopping" in str(refused[0])
            assert isinstance(refused[1], AssertionError)
            assert "503" in str(refused[1])
            assert await asyncio.gather(*many.tasks) == [expected[prompt] for prompt in many.prompts]
            assert await last == expected[PROMPTS[0]]
        assert served.process.wait(10) == 0


async def test_a_second_signal_ends_a_stack_at_once() -> None:
    with serve() as served:
        async with AsyncClient(served.nats) as client:
            many = Many(served, client, STOPPED)
            await until(lambda: many.begun)
            served.process.send_signal(signal.SIGTERM)
            await until_stopping(served)
            served.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(served.process.wait, 10) == 0
            for task in many.tasks:
                task.cancel()
            await asyncio.wait(many.tasks)
