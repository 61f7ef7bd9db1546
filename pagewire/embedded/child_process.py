"""Signals to the processes that a supervisor or a broker has started."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress


def send_signal(process: Process, number: signal.Signals) -> None:
    """Sends a signal to a process unless it has ended.

    asyncio's own `terminate` would reap a child that has just ended and lose its exit code.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def end(process: Process, number: signal.Signals, within: float) -> bool:
    """Has a process end by a signal; returns whether it was killed because it did not end `within` so many seconds."""
    send_signal(process, number)
    try:
        async with asyncio.timeout(within):
            await process.wait()
    except TimeoutError:
        send_signal(process, signal.SIGKILL)
        await process.wait()
        return True
    return False
