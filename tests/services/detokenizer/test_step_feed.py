from pathlib import Path

import pytest

from pagewire.shared.messages import unpack
from pagewire.shared.messages.abort import AbortReason
from pagewire.shared.messages.step import Finish
from tests.services.detokenizer.rig import HELLO, rig
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class TestLostSteps:
    """No token is applied across a gap, and no gap stays."""

    async def test_steps_that_the_bus_lost_are_requested_again(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            for position, token in enumerate(HELLO):
                last = Finish.LENGTH if position == len(HELLO) - 1 else Finish.NONE
                world.step((100, position, token, last), lost=position in {1, 2, 5})
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO
            assert [d.start for d in reader.deltas] == list(range(len(HELLO)))
            assert world.replays

    async def test_a_heartbeat_shows_that_the_last_step_was_lost(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            world.generate(HELLO[:2])
            world.step((100, 2, HELLO[2], Finish.LENGTH), lost=True)
            world.beat(2)
            await reader.end()
            assert len(reader.deltas) == 3

    async def test_steps_that_the_executor_lost_are_requested_from_the_scheduler(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            other = await world.open(request_id="r2")
            await world.attach()
            await world.attach(request_id="r2", first_sequence=200)
            world.step((100, 0, HELLO[0], Finish.NONE), (200, 0, HELLO[0], Finish.NONE))
            world.step((100, 1, HELLO[1], Finish.NONE), lost=True)
            world.ring.clear()
            world.step((100, 2, HELLO[2], Finish.NONE), (200, 1, HELLO[1], Finish.LENGTH))
            world.step((100, 3, HELLO[3], Finish.NONE))
            await other.end()
            await until(lambda: world.aborted)
            assert world.aborted == [([100], AbortReason.LOST_TOKENS)]
            world.step((100, 4, HELLO[4], Finish.NONE))
            await world.attach((HELLO[:4],), step=2)
            await until(lambda: len(reader.deltas) == 5)
            world.step((100, 5, HELLO[5], Finish.LENGTH))
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO[:6]

    async def test_work_that_the_scheduler_does_not_know_any_more_returns_to_its_queue(self, folder: Path) -> None:
        async with rig(folder) as world:
            ack = await world.store_item()
            await world.open()
            await world.attach(ack=ack, scheduler="gone")
            world.step((100, 0, HELLO[0], Finish.NONE))
            world.step((100, 2, HELLO[2], Finish.NONE))
            (item,) = await world.broker.store.pull_work("m", 1, expires=5)
            assert item.deliveries == 2

    async def test_an_executor_that_is_gone_leaves_the_rest_to_the_scheduler(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach(executor="gone")
            world.step((100, 0, HELLO[0], Finish.NONE), executor="gone")
            world.step((100, 2, HELLO[2], Finish.NONE), step=2, executor="gone")
            await until(lambda: len(reader.deltas) == 1)
            answer = await world.attach(([],), term=2)
            assert unpack(answer.tokens[0]) == HELLO[:1]
            world.step((100, 1, HELLO[1], Finish.LENGTH), term=2, step=0)
            await reader.end()
            assert len(reader.deltas) == 2
