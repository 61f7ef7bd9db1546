"""Results of a thread arrive on the event loop, in order and together."""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagewire.services.executor.outputs.result_queue import ResultQueue
from tests.services.executor.fakes import PATIENCE


@pytest.mark.anyio
async def test_results_of_a_thread_arrive_in_order() -> None:
    seen: list[int] = []
    done = asyncio.Event()

    def deliver(number: int) -> None:
        seen.append(number)
        if number == 999:
            done.set()

    results = ResultQueue(asyncio.get_running_loop(), deliver)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: deque(map(results.put, range(1000))))
        async with asyncio.timeout(PATIENCE):
            await done.wait()
    assert seen == list(range(1000))


def test_results_share_a_wake_up() -> None:
    class Loop:
        def __init__(self) -> None:
            self.calls = 0

        def call_soon_threadsafe(self, callback: object) -> None:
            self.calls += 1

    loop = Loop()
    results = ResultQueue(loop, print)  # type: ignore[arg-type]
    for number in range(5):
        results.put(number)
    assert loop.calls == 1


@pytest.mark.anyio
async def test_delivery_runs_on_the_loops_thread_and_again_after_a_pause() -> None:
    arrivals: asyncio.Queue[str] = asyncio.Queue()
    results = ResultQueue(asyncio.get_running_loop(), arrivals.put_nowait)
    with ThreadPoolExecutor(1) as thread:
        async with asyncio.timeout(PATIENCE):
            for word in ("first", "second"):
                thread.submit(results.put, word)
                assert await arrivals.get() == word
