"""Messages between rank 0 and another rank."""

import socket
from collections.abc import Iterator

import pytest

from pagewire.services.executor.devices.ranks.startup import Connection, Ready


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    here, there = socket.socketpair()
    with here, there:
        yield Connection(here), Connection(there)


def test_the_time_to_wait_for_a_message_bounds_nothing_else(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    with pytest.raises(TimeoutError):
        here.receive(Ready, timeout=0.01)
    assert here.end.gettimeout() is None
    there.send(Ready())
    assert here.receive(Ready, timeout=60.0) == Ready()
    assert here.end.gettimeout() is None
