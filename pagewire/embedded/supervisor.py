"""Keeps a set of processes running: what ends is started again, and nothing is left behind."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process import PARENT

CONFIGURATION_REFUSED = 2
"""Exit code of a process that will not run with its settings, however often it is started."""

_log = structlog.get_logger()


class ServiceRefused(ConfigurationError):
    """A service cannot run with its settings. It has said why on standard error already."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run."""

    name: str
    """Different for each program of a supervisor."""
    command: tuple[str, ...]
    environment: Callable[[], Mapping[str, str]]
    """The whole environment of the next start."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Times of a supervisor, in seconds."""

    first_delay: float = 0.1
    """Before the first restart; doubled with each failure."""
    longest_delay: float = 5.0
    healthy: float = 10.0
    """A process that ran this long starts with the first delay again."""
    end: float = 10.0
    """From SIGTERM to SIGKILL."""


class Supervisor:
    """Runs programs until it is cancelled."""

    def __init__(self, programs: Sequence[Program], patience: Patience | None = None) -> None:
        self._programs = programs
        self._patience = patience or Patience()
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Starts every program and restarts those that end. When cancelled, ends them all before it returns.

        Raises:
            ConfigurationError: a program exits with code 2, or cannot be started at all.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for program in self._programs:
                    group.create_task(self._keep(program), name=program.name)
        except* ConfigurationError as errors:
            raise errors.exceptions[0] from None

    def kill(self, name: str) -> None:
        """Kills a program that does not answer any more; it is started again."""
        if (process := self._running.get(name)) is not None:
            _signal(process, signal.SIGKILL)

    async def _keep(self, program: Program) -> None:
        delay = self._patience.first_delay
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            code = await self._run_once(program)
            if code == CONFIGURATION_REFUSED:
                raise ServiceRefused(f"{program.name} cannot run with these settings: its own message is above")
            if loop.time() - started >= self._patience.healthy:
                delay = self._patience.first_delay
            _log.warning("process_ended", process=program.name, code=code, restart_in=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._patience.longest_delay)

    async def _run_once(self, program: Program) -> int:
        """Runs a program to its end; returns its exit code, negative for a signal."""
        environment = {**program.environment(), PARENT: str(os.getpid())}
        try:
            # A session of its own: Ctrl-C reaches the supervisor alone, which ends the others in order. Standard output
            # belongs to the user's command, so what a service prints goes to standard error.
            process = await asyncio.create_subprocess_exec(
                *program.command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=2, start_new_session=True
            )
        except OSError as error:
            raise ConfigurationError(f"cannot start {program.name}: {error.strerror}: {program.command[0]}") from error
        self._running[program.name] = process
        try:
            return await process.wait()
        finally:
            del self._running[program.name]
            await asyncio.shield(self._end(process))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._patience.end):
                await process.wait()
        except TimeoutError:
            _log.error("process_killed", pid=process.pid, after=self._patience.end)
            _signal(process, signal.SIGKILL)
            await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Not by asyncio's own `terminate`, which reaps a child that has just ended, so that its exit code is lost."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
