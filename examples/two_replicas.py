"""Spread requests over replicas, beside `pagewire serve --data-parallel-size 2`: python examples/two_replicas.py"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import nats

from pagewire import AsyncClient

REQUESTS = 24
FIRST_ANSWER = 30
"""Seconds in which the first executor answers, however busy its machine is."""
NEXT_ANSWER = 1
"""Seconds without an answer after which every executor has answered."""


async def replicas(url: str) -> AsyncIterator[dict[str, Any]]:
    """Yields the statistics of each executor, as every service of NATS answers them (ADR-32)."""
    connection = await nats.connect(url)
    inbox = connection.new_inbox()
    answers = await connection.subscribe(inbox)
    await connection.publish("$SRV.STATS.pagewire-executor", b"", reply=inbox)
    patience = FIRST_ANSWER
    try:
        while True:
            yield json.loads((await answers.next_msg(timeout=patience)).data)
            patience = NEXT_ANSWER
    except TimeoutError:
        await connection.close()


async def main() -> None:
    """Sends requests at once, then prints what each replica has computed."""
    url = os.environ.get("PAGEWIRE_NATS_URL", "nats://127.0.0.1:4222")
    async with AsyncClient(url) as client:
        await asyncio.gather(*(client.generate(f"{n} is a number", max_tokens=32) for n in range(REQUESTS)))
    async for replica in replicas(url):
        print(f"executor {replica['id']} has sampled {replica['metadata']['load.sampled']} tokens")


if __name__ == "__main__":
    asyncio.run(main())
