"""The parent's side of a worker: starts it, asks it, ends it."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from signal import SIGPROF

import msgspec

from pagewire.services.tokenizer.chat.worker import LENGTH_BYTES, TOO_MUCH_MEMORY, Answer, frame

ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
"""All that a worker sees of the environment: the rest has passwords."""

_COMMAND = (sys.executable, "-P", "-m", "pagewire.services.tokenizer.chat.worker")
_answers = msgspec.msgpack.Decoder(Answer)


class WorkerDied(Exception):
    """A worker has ended instead of answering.

    Attributes:
        by_limit: a template has wanted too much computing time or memory.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.by_limit = exit_code in {-SIGPROF, TOO_MUCH_MEMORY}


class WorkerProcess:
    """A running worker.

    Attributes:
        pid: its process.
    """

    def __init__(self, process: Process, ended: "asyncio.Task[int]") -> None:
        self._process = process
        self._ended = ended
        self.pid = process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return not self._ended.done()

    async def ask(self, message: msgspec.Struct, within: float) -> Answer:
        """The answer to a message.

        Raises:
            TimeoutError: there is none after `within` seconds: the worker is of no use any more.
            WorkerDied
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within):
                self._process.stdin.write(frame(message))
                await self._process.stdin.drain()
                length = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES), "little")
                return _answers.decode(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerDied(await self._ended) from error


@asynccontextmanager
async def worker_process(on_end: Callable[[], None]) -> AsyncIterator[WorkerProcess]:
    """Starts a worker, which is killed when the block is left. `on_end` is called when it ends by itself.

    Raises:
        OSError: the system starts no process.
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
            await asyncio.wait({ended})  # all the same: it takes no time, and nobody would look after it
            raise
