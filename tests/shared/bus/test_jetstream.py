"""A stream of a cluster without a leader is described by another server, as if nothing were wrong."""

from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pagewire.shared.bus import Headers, Message
from pagewire.shared.bus.jetstream import Error, LeaderSearch, refusal, reply_of
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import StorageRefused

LED, LEADERLESS = {"cluster": {"leader": "one"}}, {"cluster": {"name": "c"}}
ELECTING = {"error": {"code": 503, "err_code": 10008, "description": "unavailable"}}


class Answering(MemoryBus):
    """A connection that answers requests in this order."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        super().__init__(MemoryBroker())
        self.answers = list(answers)

    @override
    async def request(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
        return Message(subject, msgspec.json.encode(self.answers.pop(0)))


@pytest.mark.parametrize(("answer", "leaderless"), [({}, False), (LED, False), (LEADERLESS, True), (ELECTING, True)])
def test_a_reply_says_whether_there_is_a_leader(answer: dict[str, Any], *, leaderless: bool) -> None:
    assert reply_of(msgspec.json.encode(answer)).leaderless == leaderless


def test_a_server_that_is_unavailable_is_no_fault_of_the_settings() -> None:
    assert isinstance(refusal("S", Error("not now", 503, 10039)), StorageRefused)


@pytest.mark.anyio
async def test_the_search_ends_with_a_leader() -> None:
    async def create() -> None:
        raise AssertionError

    bus = Answering(LEADERLESS, ELECTING, LED)
    await LeaderSearch(bus, ["S"], create).find("S", 0.0)
    assert bus.answers == []
