"""A detokenizer is killed, frozen, revived or terminated in the middle of streams: every one ends once, exactly.

The clients are bare: they read their inboxes and do nothing else. One of our own client runs beside them.
"""

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.broker import Broker
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared import subjects
from pagewire.shared.models.model_folder import served_name
from pagewire.shared.settings.config import Settings
from tests.support.bare_reader import BareReader
from tests.support.checkpoints import checkpoint
from tests.support.processes import processes
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.anyio]

TOKENS = 160
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.9, "seed": 3, "n": 3},
    {"temperature": 0.0, "stop": ["zq", "ee e"]},
    {"beam_width": 3, "n": 2, "max_tokens": 24},
)
REPORTING = 8
"""Streams that report log-probabilities."""
FAULTS = ("kill", "freeze", "revive", "terminate")
REVIVE_AFTER = 2.2
"""Seconds: longer than others wait for a silent service, and shorter than the supervisor does before it kills it."""


def requests(count: int) -> Iterator[dict[str, Any]]:
    """Requests of all kinds; every third one is not a stream."""
    for number, sampling in zip(range(count), itertools.cycle(SAMPLING), strict=False):
        yield {
            "prompt": f"The train number {number} ",
            "stream": bool(number % 3),
            "timeout_ms": 120_000,
            "sampling": {"max_tokens": TOKENS, "ignore_eos": True, **sampling},
        }


async def strike(fault: str) -> None:
    """Does to one of the detokenizers what `fault` says."""
    victim = processes("detokenizer")[0]
    match fault:
        case "kill":
            os.kill(victim, signal.SIGKILL)
        case "terminate":
            os.kill(victim, signal.SIGTERM)
        case "freeze":
            os.kill(victim, signal.SIGSTOP)
        case "revive":
            os.kill(victim, signal.SIGSTOP)
            await asyncio.sleep(REVIVE_AFTER)
            with suppress(ProcessLookupError):  # the supervisor was faster
                os.kill(victim, signal.SIGCONT)


class World:
    """A running pipeline with one or two detokenizers, and what all requests get undisturbed."""

    def __init__(self, stacks: list[Stack], client: AsyncClient, bare: Client, model: str) -> None:
        self._stacks = stacks
        self._client = client
        self._bare = bare
        self._model = model

    async def ready(self) -> None:
        """Waits until every service is ready."""
        for stack in self._stacks:
            await stack.ready()

    async def run(self, count: int, fault: str = "") -> tuple[list[object], list[BareReader], float]:
        """Returns the answers, who got them, and the time of the fault, which comes when a fifth of the tokens is
        there."""
        readers = [BareReader(self._bare, self._model, request) for request in requests(count)]
        ours = asyncio.create_task(self._stream())
        for reader in readers:
            await reader.send()
        at = 0.0
        if fault:
            await until(lambda: sum(reader.tokens for reader in readers) > count * TOKENS // 5)
            at = time.monotonic()
            await strike(fault)
        async with asyncio.timeout(PATIENCE):
            answers: list[object] = [await reader.answer() for reader in readers]
        answers.append(await ours)
        return answers, readers, at

    async def report(self, fault: str = "") -> list[list[tuple[int, float]]]:
        """Returns each token of some streams with its log-probability; the fault comes after a fifth of them."""
        reports: list[list[tuple[int, float]]] = [[] for _ in range(REPORTING)]

        async def read(number: int) -> None:
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
            async for delta in self._client.stream(f"The train number {number} ", sampling):
                assert delta.logprobs is not None
                pairs = zip(delta.token_ids, delta.logprobs, strict=True)
                reports[number] += [(token, entries[token].logprob) for token, entries in pairs]

        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as streams:
            for number in range(REPORTING):
                streams.create_task(read(number))
            if fault:
                await until(lambda: sum(map(len, reports)) > REPORTING * TOKENS // 5)
                await strike(fault)
        return reports

    async def _stream(self) -> str:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        return "".join([delta.text async for delta in self._client.stream("An old woman", sampling)])


@asynccontextmanager
async def world(detokenizers: int) -> AsyncIterator[World]:
    async with AsyncExitStack() as close:
        broker = await close.enter_async_context(Broker(port=0))
        settings = Settings(
            model=str(checkpoint("llama")),
            dtype="float32",
            num_kv_blocks=1600,
            max_num_seqs=48,
            log_level="error",
            nats_url=broker.url,
            nats_user=broker.user,
            nats_password=broker.password,
        )
        stacks = [await close.enter_async_context(Stack(settings, PIPELINE))]
        for _ in range(detokenizers - 1):
            stacks.append(await close.enter_async_context(Stack(settings, ("detokenizer",))))
        for stack in stacks:
            await stack.ready()
        client = await close.enter_async_context(AsyncClient(broker.url))
        bare = await nats.connect(broker.url)
        try:
            yield World(stacks, client, bare, subjects.model_token(served_name(settings)))
        finally:
            await bare.close()


async def check(reports: World, count: int, faults: tuple[str, ...]) -> None:
    expected, readers, _ = await reports.run(count)
    assert not any(reader.problems for reader in readers)
    for fault in faults:
        answers, readers, at = await reports.run(count, fault)
        assert [reader.problems for reader in readers if reader.problems] == [], fault
        assert answers == expected, fault
        adopted = [reader for reader in readers if reader.accepted > 1]
        pauses = [pause for reader in adopted if (pause := reader.pause(at))] or [0.0]
        repeated = sum(reader.repeated for reader in readers)
        print(
            f"{fault}: {len(adopted)} of {count} streams were adopted, {repeated} deltas came again,"
            f" pause {statistics.median(pauses):.2f} s at the median, {max(pauses):.2f} s at most"
        )
        await reports.ready()


@pytest.mark.parametrize("detokenizers", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_every_stream_ends_once_and_exactly(detokenizers: int) -> None:
    async with world(detokenizers) as reports:
        await check(reports, 40, FAULTS)


async def test_log_probabilities_that_the_successor_lacks_are_generated_again() -> None:
    async with world(2) as reports:
        expected = await reports.report()
        for fault in ("kill", "terminate"):
            for other, stream in zip(await reports.report(fault), expected, strict=True):
                assert [token for token, _ in other] == [token for token, _ in stream], fault
                assert [value for _, value in other] == pytest.approx([value for _, value in stream], abs=1e-4), fault
            await reports.ready()


@pytest.mark.full
@pytest.mark.parametrize("detokenizers", [1, 2])
async def test_every_one_of_many_streams_ends_once_and_exactly(detokenizers: int) -> None:
    async with world(detokenizers) as reports:
        await check(reports, 256, FAULTS * 2)
