"""The figures of requests that the console of a gateway asks for."""

from pathlib import Path

import pytest

from pagewire.shared import subjects
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.recent_requests import RecentRequests
from tests.services.detokenizer.rig import HELLO, Rig, finish_hello, rig
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


async def ask(world: Rig) -> RecentRequests:
    answer = await world.client.request(subjects.RECENT_REQUESTS, b"", timeout=PATIENCE)
    return Decoder(RecentRequests).decode(answer.data)


async def test_running_and_ended_requests_are_listed(folder: Path) -> None:
    async with rig(folder) as world:
        await world.open()
        await finish_hello(world)
        second = await world.open(request_id="r2")
        await world.attach(request_id="r2", first_sequence=200)
        world.generate(HELLO[:2], sequence=200)
        await until(lambda: len(second.deltas) == 2)
        recent = await ask(world)
        ended, running = recent.requests
        assert (ended.request_id, ended.status, ended.tokens, ended.prompt_tokens) == ("r1", 200, len(HELLO), 5)
        assert ended.metrics is not None
        assert 0 < ended.began <= ended.first_token <= ended.ended
        assert (running.request_id, running.status, running.tokens, running.ended) == ("r2", 0, 2, 0)


async def test_a_cancelled_request_and_an_error_have_their_status(folder: Path) -> None:
    async with rig(folder) as world:
        first = await world.open()
        await world.cancel(first.accepted.cancel)
        second = await world.open(request_id="r2")
        await world.abort("r2", "overloaded", "busy")
        await second.error()
        await until(lambda: world.load["streams"] == 0)
        assert [figures.status for figures in (await ask(world)).requests] == [499, 429]


async def test_an_inbox_of_a_service_gets_no_answer(folder: Path) -> None:
    async with rig(folder) as world:
        answers: list[object] = []
        await world.bus.subscribe("elsewhere", answers.append)
        world.bus.publish(subjects.RECENT_REQUESTS, b"", reply="elsewhere")
        await ask(world)
        assert not answers
