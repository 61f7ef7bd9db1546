"""A server of the cluster dies or freezes in the middle of streams: they end once, as they would have ended."""

import asyncio
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, field

import msgspec
import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.broker import Broker
from pagewire.shared.bus.nats_store import WORK_STREAM
from pagewire.shared.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import Pipeline, running
from tests.support.waiting import until

pytestmark = [pytest.mark.alone, pytest.mark.anyio]

PROMPTS = ["The morning train", "An old woman", "Two children", "How far is the sea?"]
REQUESTS = [
    (prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=7, ignore_eos=True))
    for prompt in PROMPTS
    for tokens, temperature in ((20, 0.0), (100, 0.8), (200, 0.0), (240, 0.8))
]


@dataclass
class Load:
    """Streams that begin one after another, each checked against the undisturbed one.

    Attributes:
        pauses: for each stream, the longest time without a token, in seconds.
    """

    client: AsyncClient
    wanted: list[str]
    pauses: list[float] = field(default_factory=list)
    ending: bool = False

    async def run(self, first: int) -> None:
        """Runs streams until `ending`."""
        number = first
        while not self.ending:
            number = (number + 7) % len(REQUESTS)
            text, pause = await stream(self.client, number)
            assert text == self.wanted[number]
            self.pauses.append(pause)


async def stream(client: AsyncClient, number: int) -> tuple[str, float]:
    """Returns the text of a request and the longest time without a token."""
    text, longest, last = "", 0.0, time.monotonic()
    async with asyncio.timeout(60):
        async for delta in client.stream(*REQUESTS[number]):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            text += delta.text
    return text, longest


async def leader(pipeline: Pipeline) -> Broker:
    """The server that leads the work queue."""
    info = await pipeline.bus.request(f"$JS.API.STREAM.INFO.{WORK_STREAM}", b"", timeout=5)
    name = msgspec.json.decode(info.data)["cluster"]["leader"]
    return next(broker for broker in pipeline.brokers if broker.name == name)


async def server_of_the_executor(pipeline: Pipeline) -> Broker:
    """The server that the executor is connected to."""
    address = pipeline.buses["executor"].address
    return next(broker for broker in pipeline.brokers if broker.url.endswith(address))


async def follower(pipeline: Pipeline) -> Broker:
    """A server that does not lead the work queue."""
    leading = await leader(pipeline)
    return next(broker for broker in pipeline.brokers if broker is not leading)


async def until_copied(pipeline: Pipeline) -> None:
    """Returns once every server has all that is stored."""
    async with asyncio.timeout(30):
        while True:
            info = await pipeline.bus.request(f"$JS.API.STREAM.INFO.{WORK_STREAM}", b"", timeout=5)
            replicas = msgspec.json.decode(info.data)["cluster"]["replicas"]
            if len(replicas) == len(pipeline.brokers) - 1 and all(replica["current"] for replica in replicas):
                return
            await asyncio.sleep(0.1)


async def until_each_goes_on(load: Load, workers: int) -> None:
    """Returns once as many streams have ended as run at once, twice: so every one has, and another after it."""
    wanted = len(load.pauses) + 2 * workers
    await until(lambda: len(load.pauses) >= wanted, timeout=60)


async def restart(pipeline: Pipeline, broker: Broker) -> None:
    await broker.wait()
    await broker.start()
    await until_copied(pipeline)


@pytest.fixture
def settings() -> Settings:
    return Settings(
        model=str(checkpoint("llama")), dtype="float32", num_kv_blocks=2000, nats_cluster=3, log_level="error"
    )


async def test_streams_survive_the_loss_of_any_server(settings: Settings) -> None:
    workers = 8
    async with running(settings) as pipeline:
        wanted = [text for text, _ in await asyncio.gather(*(stream(pipeline.client, i) for i in range(len(REQUESTS))))]
        load = Load(pipeline.client, wanted)
        async with asyncio.TaskGroup() as tasks:
            for worker in range(workers):
                tasks.create_task(load.run(worker))
            for find in (leader, server_of_the_executor, follower):
                victim = await find(pipeline)
                os.kill(victim.pid, signal.SIGKILL)
                await until_each_goes_on(load, workers)
                await restart(pipeline, victim)
            victim = await leader(pipeline)
            os.kill(victim.pid, signal.SIGSTOP)
            await until_each_goes_on(load, workers)
            os.kill(victim.pid, signal.SIGCONT)
            load.ending = True
        await pipeline.until_idle()
        await until_nothing_is_left(pipeline)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_sixty_four_streams_survive_twenty_kills(settings: Settings) -> None:
    """Prints the pauses, which `docs/operations.md` states."""
    draw = random.Random(1)
    async with running(settings) as pipeline:
        wanted = [text for text, _ in await asyncio.gather(*(stream(pipeline.client, i) for i in range(len(REQUESTS))))]
        load = Load(pipeline.client, wanted)
        worst: list[float] = []
        async with asyncio.TaskGroup() as tasks:
            for worker in range(64):
                tasks.create_task(load.run(worker))
            for _ in range(20):
                before = len(load.pauses)
                victim = draw.choice(pipeline.brokers)
                os.kill(victim.pid, signal.SIGKILL)
                await restart(pipeline, victim)
                await until_each_goes_on(load, 64)
                worst.append(max(load.pauses[before:]))
            load.ending = True
        await pipeline.until_idle()
        await until_nothing_is_left(pipeline)
    print(f"{len(load.pauses)} streams; the longest pause per kill: median {statistics.median(worst):.1f} s, ", end="")
    print(f"longest {max(worst):.1f} s; median of all streams {statistics.median(load.pauses):.2f} s")


async def until_nothing_is_left(pipeline: Pipeline) -> None:
    """Returns once the queues hold no work."""
    async with asyncio.timeout(10):
        while await pipeline.bus.store.nonempty_queues("llama"):
            await pipeline.bus.flush()
