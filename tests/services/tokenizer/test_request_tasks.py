import asyncio

import pytest

from pagewire.services.tokenizer.request_tasks import RequestTasks

pytestmark = pytest.mark.anyio


class Failure(Exception):
    pass


async def fail() -> None:
    raise Failure


async def test_the_number_of_requests_is_bounded() -> None:
    gate = asyncio.Event()
    tasks = RequestTasks(max_requests=2)
    for _ in range(2):
        assert tasks.has_room(0)
        tasks.start(_wait(gate), 0, _never)
    assert not tasks.has_room(0)
    assert len(tasks) == 2
    gate.set()
    await tasks.drain(5)
    assert tasks.has_room(0)
    assert len(tasks) == 0


async def test_the_bytes_of_all_requests_are_bounded() -> None:
    gate = asyncio.Event()
    tasks = RequestTasks(max_bytes=100)
    tasks.start(_wait(gate), 60, _never)
    assert tasks.has_room(40)
    assert not tasks.has_room(41)
    gate.set()
    await tasks.drain(5)
    assert tasks.has_room(100)


async def test_an_error_is_reported_and_frees_its_place() -> None:
    errors: list[BaseException] = []
    tasks = RequestTasks(max_requests=1)
    tasks.start(fail(), 0, errors.append)
    await tasks.drain(5)
    assert [type(error) for error in errors] == [Failure]
    assert tasks.has_room(0)


async def test_a_drain_lets_quick_requests_end_and_cancels_late_ones() -> None:
    ended: list[str] = []
    gate = asyncio.Event()

    async def quick() -> None:
        await asyncio.sleep(0)
        ended.append("quick")

    async def late() -> None:
        try:
            await gate.wait()
        finally:
            ended.append("late")

    tasks = RequestTasks()
    tasks.start(late(), 0, _never)
    tasks.start(quick(), 0, _never)
    await tasks.drain(0.05)
    assert ended == ["quick", "late"]
    assert len(tasks) == 0


async def test_a_drain_without_requests_returns() -> None:
    await RequestTasks().drain(0)


async def _wait(gate: asyncio.Event) -> None:
    await gate.wait()


def _never(error: BaseException) -> None:
    raise AssertionError(error)
