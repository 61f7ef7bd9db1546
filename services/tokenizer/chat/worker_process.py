"""The parent's side of a worker process: starts it, exchanges messages, and kills it."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from signal import SIGPROF

import msgspec

from pagewire.services.tokenizer.chat.worker import LENGTH_BYTES, TOO_MUCH_MEMORY, Answer, frame
from pagewire.shared.process.linux_process import seconds_without_core

ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
"""Environment variables that a worker gets; the others may contain passwords."""
STARVATION_CHECK = 0.2
"""Seconds for which a late worker is watched: one that waits for a core for half of them is not late by itself."""

_COMMAND = (sys.executable, "-P", "-m", "pagewire.services.tokenizer.chat.worker")
_answers = msgspec.msgpack.Decoder(Answer)


class WorkerDied(Exception):
    """A worker ended before it answered.

    Attributes:
        by_limit: whether a template exceeded the limit of CPU time or memory.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.by_limit = exit_code in {-SIGPROF, TOO_MUCH_MEMORY}


class WorkerProcess:
    """A running worker.

    Attributes:
        pid: process id.
    """

    def __init__(self, process: Process, ended: "asyncio.Task[int]") -> None:
        self._process = process
        self._ended = ended
        self.pid = process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is not known to have ended."""
        return not self._ended.done()

    async def ask(self, message: msgspec.Struct, within: float) -> Answer:
        """Sends a message and returns the answer.

        Raises:
            TimeoutError: there is no answer after `within` seconds, beside those in which the worker has waited for a
                core; the worker cannot be used any more.
            WorkerDied: the worker ended.
        """
        exchange = asyncio.create_task(self._exchange(message))
        try:
            await asyncio.wait({exchange}, timeout=within)
            while not exchange.done():
                core_wait = seconds_without_core(self.pid)
                await asyncio.wait({exchange}, timeout=STARVATION_CHECK)  # an answer may have come meanwhile
                if not exchange.done() and seconds_without_core(self.pid) - core_wait < STARVATION_CHECK / 2:
                    raise TimeoutError
            return exchange.result()
        finally:
            exchange.cancel()

    async def _exchange(self, message: msgspec.Struct) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(frame(message))
            await self._process.stdin.drain()
            length = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES), "little")
            return _answers.decode(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerDied(await self._ended) from error


@asynccontextmanager
async def worker_process(on_end: Callable[[], None]) -> AsyncIterator[WorkerProcess]:
    """Starts a worker as a context manager, which kills it at the end. `on_end` is called when the worker ends.

    Raises:
        OSError: the process cannot be started.
    """
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, str(os.getpid()), stdin=PIPE, stdout=PIPE, env=environment
    )
    ended = asyncio.create_task(process.wait())
    ended.add_done_callback(lambda _: on_end())
    try:
        yield WorkerProcess(process, ended)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await asyncio.wait({ended})  # a killed process ends at once, and must be reaped
            raise
