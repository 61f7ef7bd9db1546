"""A server of the cluster dies or freezes in the middle of streams: they end once, as they would have ended."""

import asyncio
import os
import random
import signal
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.broker import Broker
from pagewire.shared.bus.streams import WORK_STREAM
from pagewire.shared.errors import BusError
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import Pipeline, running
from tests.support.processes import freeze
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.alone, pytest.mark.anyio]

PROMPTS = ["The morning train", "An old woman", "Two children", "How far is the sea?"]
REQUESTS = [
    (prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=7, ignore_eos=True))
    for prompt in PROMPTS
    for tokens, temperature in ((20, 0.0), (100, 0.8), (200, 0.0), (240, 0.8))
]


@dataclass(frozen=True)
class Read:
    """The text of a stream, and the longest seconds without a token before and after the first one."""

    text: str
    wait: float
    pause: float


@dataclass
class Load:
    """Streams that begin one after another, each checked against the undisturbed one."""

    client: AsyncClient
    expected: list[str]
    reads: list[Read] = field(default_factory=list)
    ending: bool = False

    async def run(self, first: int) -> None:
        """Runs streams until `ending`."""
        number = first
        while not self.ending:
            number = (number + 7) % len(REQUESTS)
            read = await stream(self.client, number)
            assert read.text == self.expected[number]
            self.reads.append(read)


async def undisturbed(client: AsyncClient) -> list[str]:
    """The texts of all requests."""
    return [read.text for read in await asyncio.gather(*(stream(client, i) for i in range(len(REQUESTS))))]


async def stream(client: AsyncClient, number: int) -> Read:
    """Reads a stream to its end."""
    texts, pauses, last = [], [], time.monotonic()
    async with asyncio.timeout(PATIENCE):
        async for delta in client.stream(*REQUESTS[number]):
            now = time.monotonic()
            pauses.append(now - last)
            texts.append(delta.text)
            last = now
        pauses.append(time.monotonic() - last)  # until the last frame
    return Read("".join(texts), pauses[0], max(pauses[1:]))


async def raft(pipeline: Pipeline) -> dict[str, Any]:
    """Waits until the work queue has a leader; returns what it says about the copies."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(BusError):
                info = await pipeline.bus.request(f"$JS.API.STREAM.INFO.{WORK_STREAM}", b"", timeout=1)
                if cluster := msgspec.json.decode(info.data).get("cluster"):
                    return dict(cluster)
            await asyncio.sleep(0.1)


async def leader(pipeline: Pipeline) -> Broker:
    """The server that leads the work queue."""
    name = (await raft(pipeline))["leader"]
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
    async with asyncio.timeout(PATIENCE):
        while not all(replica["current"] for replica in (await raft(pipeline))["replicas"]):
            pass


async def until_each_goes_on(load: Load, workers: int) -> None:
    """Returns once as many streams have ended as run at once, twice: so every one has, and another after it."""
    expected = len(load.reads) + 2 * workers
    await until(lambda: len(load.reads) >= expected)


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
        load = Load(pipeline.client, await undisturbed(pipeline.client))
        async with asyncio.TaskGroup() as tasks:
            for worker in range(workers):
                tasks.create_task(load.run(worker))
            for find in (leader, server_of_the_executor, follower):
                victim = await find(pipeline)
                os.kill(victim.pid, signal.SIGKILL)
                await until_each_goes_on(load, workers)
                await restart(pipeline, victim)
            victim = await leader(pipeline)
            await freeze(victim.pid)
            await until_each_goes_on(load, workers)
            os.kill(victim.pid, signal.SIGCONT)
            load.ending = True
        await pipeline.until_idle()
        await until_nothing_is_left(pipeline)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_sixty_four_streams_survive_twenty_losses(settings: Settings, number: signal.Signals) -> None:
    """Prints the figures that `docs/operations.md` states."""
    draw = random.Random(1)
    waits, pauses = [], []
    async with running(settings) as pipeline:
        load = Load(pipeline.client, await undisturbed(pipeline.client))
        async with asyncio.TaskGroup() as tasks:
            for worker in range(64):
                tasks.create_task(load.run(worker))
            for _ in range(20):
                before = len(load.reads)
                victim = draw.choice(pipeline.brokers)
                if number == signal.SIGSTOP:
                    await freeze(victim.pid)
                    await until_each_goes_on(load, 64)
                    os.kill(victim.pid, signal.SIGCONT)
                    await until_copied(pipeline)
                else:
                    os.kill(victim.pid, number)
                    await restart(pipeline, victim)
                await until_each_goes_on(load, 64)
                waits.append(max(read.wait for read in load.reads[before:]))
                pauses.append(max(read.pause for read in load.reads[before:]))
            load.ending = True
        await pipeline.until_idle()
        await until_nothing_is_left(pipeline)
    print(f"{number.name}, {len(load.reads)} streams, the longest per loss:", end=" ")
    for name, seconds in (("pause", pauses), ("wait for the first token", waits)):
        print(f"{name}: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s", end="; ")


async def until_nothing_is_left(pipeline: Pipeline) -> None:
    """Returns once the queues hold no work."""
    async with asyncio.timeout(PATIENCE):
        while (await pipeline.bus.store.queue_lengths("llama")).items:
            await pipeline.bus.flush()
