"""Clients that leave a request, which somebody may send again."""

import asyncio
from pathlib import Path

import pytest

from pagewire.services.detokenizer import leaving_clients
from pagewire.shared.messages.abort import AbortReason
from pagewire.shared.messages.client_headers import LEAVES
from pagewire.shared.messages.open import OpenState
from pagewire.shared.messages.step import Finish
from tests.services.detokenizer.rig import HELLO, Reader, Rig, finish_hello, rig
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def leave(world: Rig, reader: Reader) -> None:
    world.client.publish(reader.accepted.cancel, b"", headers={LEAVES: reader.inbox})


async def test_a_request_that_is_sent_again_in_time_goes_on(folder: Path) -> None:
    async with rig(folder) as world:
        first = await world.open()
        await world.attach()
        world.generate(HELLO[:2])
        await until(lambda: len(first.deltas) == 2)
        leave(world, first)
        again = await world.reader()
        await world.open_for(again)
        world.generate(HELLO[2:], Finish.LENGTH, start=2)
        await again.end()
        assert [delta.start for delta in again.deltas] == list(range(len(HELLO)))
        assert len(first.deltas) == 2


async def test_a_client_that_leaves_late_does_not_end_the_request_that_was_sent_again(folder: Path) -> None:
    async with rig(folder) as world:
        first, again = await world.open(), await world.reader()
        await world.open_for(again)
        leave(world, first)
        await finish_hello(world)
        await again.end()
        assert first.deltas == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_clients, "REPEAT_WITHIN", 0.0)
    monkeypatch.setattr("pagewire.services.detokenizer.service.KEEP_ALIVE_INTERVAL", 0.01)


async def test_a_request_that_nobody_sends_again_is_cancelled(folder: Path, impatient: None) -> None:
    async with rig(folder) as world:
        first = await world.open()
        await world.attach()
        leave(world, first)
        await until(lambda: world.load["streams"] == 0)
        await until(lambda: world.aborted)
        assert world.aborted == [([100], AbortReason.CANCELLED)]


async def test_a_request_that_is_sent_again_too_late_runs_again(folder: Path, impatient: None) -> None:
    async with rig(folder) as world:
        first = await world.open()
        await world.attach()
        world.generate(HELLO[:2])
        await until(lambda: len(first.deltas) == 2)
        leave(world, first)
        await until(lambda: world.load["streams"] == 0)
        late = await world.resume(first.accepted.resume, 2)
        again = await world.reader()
        assert await world.open_for(again) == OpenState.OPENED
        await finish_hello(world)
        assert [choice.finish_reason for choice in (await again.end()).choices] == ["length"]
        assert [delta.start for delta in again.deltas] == list(range(len(HELLO)))
        assert late.frames == []


async def test_who_knows_no_secret_removes_no_client(folder: Path) -> None:
    async with rig(folder) as world:
        first = await world.open()
        subject = first.accepted.cancel.rpartition(".")[0] + "." + "0" * 32
        world.client.publish(subject, b"", headers={LEAVES: first.inbox})
        await asyncio.sleep(0)
        await finish_hello(world)
        await first.end()
