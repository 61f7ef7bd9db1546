"""`pagewire bench attack` with few requests, and with all of them in `make test-all`."""

from collections.abc import AsyncIterator

import pytest

from pagewire.bench import attack
from pagewire.bench._common.stack import resident_bytes
from pagewire.bench.attack import FLOODS, Flood, Growth, Siege, flood, honest_request, siege, sieges
from pagewire.embedded.address import Address
from pagewire.embedded.stack import Stack
from pagewire.shared.settings.config import Settings

pytestmark = [pytest.mark.anyio, pytest.mark.alone]

ALLOWED_GROWTH = 50
"""MB."""


@pytest.fixture(scope="module")
async def stack() -> AsyncIterator[Address]:
    async with Stack(Settings(model="bundled", device="sim:zero", port=0, nats_port=0, log_level="error")) as stack:
        address = await stack.ready()
        await honest_request(address.http)
        yield address


@pytest.mark.parametrize("each", FLOODS, ids=lambda each: f"{each.name} over {each.transport}")
@pytest.mark.parametrize("requests", [24, pytest.param(1000, marks=[pytest.mark.full])])
async def test_large_refused_requests_leave_the_memory_as_it_was(stack: Address, each: Flood, requests: int) -> None:
    before = resident_bytes()
    await flood(each, stack.http, stack.nats, requests)
    growth = {service: (resident_bytes()[service] - before[service]) / 1e6 for service in attack.WATCHED}
    assert max(growth.values()) < ALLOWED_GROWTH, growth
    await honest_request(stack.http)


@pytest.mark.parametrize(("kind", "connections", "start", "dripping"), sieges(slow=300, idle=2000))
async def test_connections_that_only_take_room_delay_no_request(
    stack: Address, kind: str, connections: int, start: bytes, dripping: bytes
) -> None:
    before = resident_bytes()["gateway"]
    async with siege(stack.http, connections, start, dripping):
        for _ in range(3):
            await honest_request(stack.http)
        assert (resident_bytes()["gateway"] - before) / 1e6 < ALLOWED_GROWTH, kind


def test_the_tables_have_memory_and_its_growth() -> None:
    growth = Growth("not JSON (HTTP)", "gateway", 1000, 61.6, 65.2, 80.8)
    assert attack.floods_table([growth])[2] == "| not JSON (HTTP) | gateway | 1000 | 62 | 65 | 81 | +16 |"
    assert attack.sieges_table([Siege("idle", 2000, 4.4, 12.0)])[2] == "| idle | 2000 | 4 | +12 |"
