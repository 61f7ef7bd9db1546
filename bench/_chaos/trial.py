"""One trial: all requests at once, and faults when every one of them is under way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from pagewire.bench._chaos.checks import Seen
from pagewire.bench._chaos.faults import POLL, Arena
from pagewire.bench._chaos.figures import Ended, examine
from pagewire.bench._chaos.readers import DEADLINE, Reader, open_reader
from pagewire.bench._chaos.requests import Request
from pagewire.bench._chaos.schedule import Fault
from pagewire.embedded.address import Address
from pagewire.shared.errors import ConfigurationError

Begun = Callable[[Sequence[Request], Sequence[Seen]], Awaitable[None]]
"""Waits until the requests, each of which has `Seen` so much, are so far that the faults may happen."""


@asynccontextmanager
async def open_readers(requests: Sequence[Request], address: Address, deadline: float) -> AsyncIterator[list[Reader]]:
    """Opens a reader for each request, which has `deadline` seconds."""
    async with AsyncExitStack() as exits:
        readers = []
        for request in requests:
            reader = await open_reader(request.transport, address, deadline)
            exits.push_async_callback(reader.close)
            readers.append(reader)
        yield readers


async def answers(address: Address, requests: Sequence[Request], deadline: float = DEADLINE) -> dict[int, Seen]:
    """Returns the undisturbed answer to each request, by number, all asked at once; nothing is cancelled.

    Raises:
        ConfigurationError: a request has failed without any fault.
    """
    expected = {request.number: Seen() for request in requests}
    async with open_readers(requests, address, deadline) as readers, asyncio.TaskGroup() as tasks:
        for request, reader in zip(requests, readers, strict=True):
            tasks.create_task(reader.read(replace(request, cancel_after=0), expected[request.number]))
    for request in requests:
        seen = expected[request.number]
        if seen.hung or seen.error or seen.refusals:
            raise ConfigurationError(f"{request} fails without any fault: {seen.error or seen.refusals or 'no end'}")
    return expected


async def streams_begun(requests: Sequence[Request], seen: Sequence[Seen]) -> None:
    """Waits until each stream has brought a part of its text."""
    timed = [its for request, its in zip(requests, seen, strict=True) if request.timed]
    while not all(its.begun or its.ended for its in timed):  # noqa: ASYNC110 - many things end it
        await asyncio.sleep(POLL / 4)


async def disturb(
    stack: Arena,
    requests: Sequence[Request],
    expected: Mapping[int, Seen],
    faults: Sequence[Fault],
    begun: Begun = streams_begun,
    deadline: float = DEADLINE,
) -> list[Ended]:
    """Sends all requests, lets the faults happen at once when all have `begun`, and judges the answers."""
    seen = [Seen() for _ in requests]
    async with open_readers(requests, stack.address, deadline) as readers, asyncio.TaskGroup() as tasks:
        for request, reader, its in zip(requests, readers, seen, strict=True):
            tasks.create_task(reader.read(request, its))
        await begun(requests, seen)
        applied = await stack.apply(*faults)
    return [
        examine(request, expected[request.number], its, applied) for request, its in zip(requests, seen, strict=True)
    ]
