"""Waits until the services of a stack that takes no new requests have finished the accepted ones."""

import asyncio
from collections.abc import Iterable, Mapping

import structlog

from pagewire.embedded.programs import GATEWAY, ServiceProgram
from pagewire.shared.bus import Bus
from pagewire.shared.errors import BusError, NoResponders
from pagewire.shared.process import discovery

FRONT = (GATEWAY, "tokenizer")
"""The services that take requests from outside."""
DRAIN_ORDER = (
    {"tokenizer": "in_flight"},
    {"detokenizer": "streams", "scheduler": "requests"},
    {GATEWAY: "running"},
)
"""Figures of load that must be zero before the stack ends, by service, in the order in which the stack waits."""
INTERVAL = 0.05
"""Seconds between two requests for a figure of load."""
STATS_TIMEOUT = 1.0
"""Seconds within which a service must answer with its load."""

_log = structlog.get_logger()


async def wait_until_idle(
    bus: Bus, programs: Iterable[ServiceProgram], instances: Mapping[str, str], timeout: float
) -> None:
    """Returns when the programs, which drain, hold no request any more, at the latest after `timeout` seconds.

    `instances`: the current instance id of each program, by the program's name.
    """
    programs = list(programs)
    loads = [(each, figures[each.service]) for figures in DRAIN_ORDER for each in programs if each.service in figures]
    try:
        async with asyncio.timeout(timeout):
            for program, figure in loads:
                while await _load(bus, program, instances, figure):  # noqa: ASYNC110 - a load has no event
                    await asyncio.sleep(INTERVAL)
    except TimeoutError:
        _log.warning("not_drained_in_time", seconds=timeout)


async def _load(bus: Bus, program: ServiceProgram, instances: Mapping[str, str], figure: str) -> float:
    """Returns a figure of a service's load; 1 while a restarted service does not answer."""
    front = program.service in FRONT
    subject = f"$SRV.STATS.pagewire-{program.service}.{instances.get(program.name, '')}"
    try:
        stats = await bus.request(subject, b"", timeout=STATS_TIMEOUT)
    except NoResponders:
        return 0.0 if front else 1.0
    except BusError:
        return 1.0
    return discovery.load_of(stats.data, figure, draining=front)
