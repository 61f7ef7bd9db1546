"""Read an answer token by token, and cancel it half-way, beside `pagewire serve`: python examples/stream.py"""

import asyncio
from contextlib import aclosing

from pagewire import AsyncClient

ENOUGH = 16
"""Tokens after which the reader has read enough."""


async def main() -> None:
    """Prints the first tokens of a long text; leaving the block cancels the rest."""
    async with AsyncClient() as client:
        count = 0
        answer = client.stream("Once upon a time", max_tokens=1000, ignore_eos=True)
        async with aclosing(aiter(answer)) as deltas:
            async for delta in deltas:
                print(delta.text, end="", flush=True)
                count += len(delta.token_ids)
                if count >= ENOUGH:
                    break
    print(f"\ncancelled after {count} tokens")


if __name__ == "__main__":
    asyncio.run(main())
