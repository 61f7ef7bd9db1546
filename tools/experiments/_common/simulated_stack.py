"""Runs the services on simulated devices, under clients that always have a request open."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pagewire import AsyncClient
from pagewire.bench._common.stack import counters, difference
from pagewire.bench.shapes import write_folder
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.settings.config import Settings

WARM_UP = 5.0
"""Seconds before anything is counted: all clients have begun."""
Talk = Callable[[AsyncClient, int], Coroutine[None, None, None]]
"""Sends the requests of the client with a given number, one after the other without end."""


async def closed_loop(
    shape: str, talk: Talk, clients: int, seconds: float, **settings: Any
) -> tuple[float, list[dict[str, float]]]:
    """Returns the seconds that were counted, and what each executor counted in them, for a model of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(shape, Path(folder))
        whole = Settings(model=folder, nats_port=0, log_level="error", **settings)
        async with Stack(whole, PIPELINE) as stack, asyncio.TaskGroup() as tasks:
            url = (await stack.ready()).nats
            async with AsyncClient(url) as client:
                talking = [tasks.create_task(talk(client, number)) for number in range(clients)]
                try:
                    await asyncio.sleep(WARM_UP)
                    before, began = await counters(url), time.monotonic()
                    await asyncio.sleep(seconds)
                    after, ended = await counters(url), time.monotonic()
                finally:
                    for task in talking:
                        task.cancel()
                    await asyncio.wait(talking)
    return ended - began, [difference(*pair) for pair in zip(after, before, strict=True)]
