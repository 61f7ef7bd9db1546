"""Keeps a set of processes running: restarts those that end, and ends all of them with itself."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process import PARENT, REFUSAL

CONFIGURATION_REFUSED = 2
"""Exit code of a process with invalid settings, which is not restarted."""
LONGEST_REASON = 4096
"""Bytes that are read of the reason that such a process gives; a pipe holds them all."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run."""

    name: str
    """Name, unique within a supervisor."""
    command: tuple[str, ...]
    environment: Callable[[], Mapping[str, str]]
    """Returns the complete environment for the next start."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When processes are restarted and killed; all times in seconds."""

    first_delay: float = 0.1
    """Delay before the first restart; it doubles with each failure."""
    longest_delay: float = 2.0
    """Maximum delay before a restart."""
    healthy: float = 5.0
    """Run time after which the next delay is the first one again: a program that cannot run ends sooner."""
    end: float = 10.0
    """Time from SIGTERM to SIGKILL."""

    def next_delay(self, last: float, ran: float) -> float:
        """Returns the delay after a run of `ran` seconds; `last` is the delay before that run, 0 before the first."""
        if not last or ran >= self.healthy:
            return self.first_delay
        return min(2 * last, self.longest_delay)


class Supervisor:
    """Runs programs until it is cancelled."""

    def __init__(
        self,
        programs: Sequence[Program],
        policy: RestartPolicy | None = None,
        on_ended: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`on_ended` is called with the name of each program that ends by itself, before it is restarted."""
        self._on_ended = on_ended
        self._programs = programs
        self._policy = policy or RestartPolicy()
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Starts every program and restarts those that end. When cancelled, ends all of them before it returns.

        Raises:
            ConfigurationError: a program exits with code 2 or cannot be started.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for program in self._programs:
                    group.create_task(self._keep_running(program), name=program.name)
        except* ConfigurationError as errors:
            raise errors.exceptions[0] from None

    def pid(self, name: str) -> int | None:
        """Returns the process id of a program, None while it does not run."""
        process = self._running.get(name)
        return None if process is None else process.pid

    def kill(self, name: str) -> None:
        """Kills a program, which is then restarted."""
        if (process := self._running.get(name)) is not None:
            _signal(process, signal.SIGKILL)

    async def _keep_running(self, program: Program) -> None:
        delay = 0.0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            code, reason = await self._run_once(program)
            self._on_ended(program.name)
            if code == CONFIGURATION_REFUSED:
                raise ConfigurationError(reason or f"{program.name} cannot run with these settings: see the log")
            delay = self._policy.next_delay(delay, loop.time() - started)
            _log.warning("process_ended", process=program.name, code=code, restart_in=delay)
            await asyncio.sleep(delay)

    async def _run_once(self, program: Program) -> tuple[int, str]:
        """Runs a program until it ends; returns its exit code, negative for a signal, and the reason of a refusal."""
        reader, writer = os.pipe()
        try:
            os.set_blocking(reader, False)
            code = await self._run_process(program, writer)
            with suppress(BlockingIOError):  # nothing was written: this process holds the other end
                return code, os.read(reader, LONGEST_REASON).decode(errors="replace")
            return code, ""
        finally:
            os.close(reader)
            os.close(writer)

    async def _run_process(self, program: Program, refusal: int) -> int:
        environment = {**program.environment(), PARENT: str(os.getpid()), REFUSAL: str(refusal)}
        try:
            # In its own session, so that Ctrl-C reaches only the supervisor, which then ends the programs. Standard
            # output belongs to the user's command, so a program's output goes to standard error.
            process = await asyncio.create_subprocess_exec(
                *program.command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                pass_fds=(refusal,),
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
            async with asyncio.timeout(self._policy.end):
                await process.wait()
        except TimeoutError:
            _log.error("process_killed", pid=process.pid, after=self._policy.end)
            _signal(process, signal.SIGKILL)
            await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Sends a signal. asyncio's own `terminate` would reap a child that has just ended and lose its exit code."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
