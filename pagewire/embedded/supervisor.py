"""Keeps a set of processes running: restarts those that end, and ends all of them with itself."""

import asyncio
import errno
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from pagewire.embedded.child_process import end, send_signal
from pagewire.embedded.spares import Spares
from pagewire.shared.errors import ConfigurationError, PagewireError
from pagewire.shared.process.linux_process import (
    END_NOW,
    INSTANCE,
    PARENT,
    PREDECESSORS,
    REFUSAL,
    STOP,
    cpu_seconds,
    seconds_without_core,
)
from pagewire.shared.process.polling import poll

CONFIGURATION_REFUSED = 2
"""Exit code of a process with invalid settings, which is not restarted."""
NOT_STARTED = 1
"""Stands for the exit code of a process for which the machine had no room: it is tried again."""
SCARCE = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of a machine that has no room for a process, and may have some later."""
MAX_REASON = 4096
"""Maximum bytes of the reason for which a process refuses its settings; a pipe holds them."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run."""

    name: str
    """Name, unique within a supervisor."""
    command: tuple[str, ...]
    environment: Callable[[], Mapping[str, str]]
    """Returns the complete environment for the next start, with the instance id."""
    descriptors: tuple[int, ...] = ()
    """File descriptors that the process inherits."""
    spare: tuple[str, ...] = ()
    """Command of a process that imports ahead what the program needs, and becomes it; empty: there is none."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The delays of restarts and kills, in seconds."""

    first_delay: float = 0.02
    """Delay before the first restart; it doubles with each failure."""
    longest_delay: float = 2.0
    """Maximum delay before a restart."""
    healthy: float = 5.0
    """Run time after which the next delay is `first_delay` again: a program that cannot run ends sooner."""
    end: float = 10.0
    """Time from the signal to end at once to SIGKILL."""
    drain: float = 45.0
    """Time from the start of a successor to SIGKILL."""
    spare: float = 10.0
    """Time after which a spare process replaces one that was used, or starts for the first time."""

    def next_delay(self, last: float, ran: float) -> float:
        """Returns the delay after a run of `ran` seconds; `last` is the delay before that run, 0 before the first."""
        if not last or ran >= self.healthy:
            return self.first_delay
        return min(2 * last, self.longest_delay)


class _Run:
    """One process of a program.

    Attributes:
        instance: its instance id.
        predecessors: the processes of the program that drained when this one was started.
        process: the operating system's process; None before it has started.
        draining: set when the process is about to end: its end is no failure.
    """

    def __init__(self, predecessors: Sequence[Process]) -> None:
        self.predecessors = predecessors
        self.instance = ""
        self.process: Process | None = None
        self.draining = asyncio.Event()


def _raise(_: str, reason: str) -> None:
    raise ConfigurationError(reason)


class Supervisor:
    """Runs programs until it is cancelled.

    Attributes:
        instances: the instance id of the latest process of each program, by the program's name.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        policy: RestartPolicy | None = None,
        on_ended: Callable[[str, str], None] = lambda name, instance: None,
        on_refused: Callable[[str, str], None] = _raise,
    ) -> None:
        """Starts nothing yet.

        Args:
            programs: the first programs; `start` adds others.
            policy: the delays of restarts and kills.
            on_ended: called with the name and the instance id of each process that has ended. If it raises a
                PagewireError, all others end.
            on_refused: called with the name of a program that exits with code 2, and its reason. The program is not
                started again, and if a PagewireError is raised, all others end. By default one is raised.
        """
        self.instances: dict[str, str] = {}
        self._on_ended = on_ended
        self._on_refused = on_refused
        self._programs = programs
        self._policy = policy or RestartPolicy()
        self._spares = Spares(self._policy.spare)
        self._spare_tasks: dict[tuple[str, ...], asyncio.Task[None]] = {}
        """The tasks that keep spare processes, by the commands of these."""
        self._group: asyncio.TaskGroup | None = None
        """The tasks that keep programs running; None before `run`."""
        self._keeping: dict[str, asyncio.Task[None]] = {}
        """The task of each program, by its name."""
        self._latest: dict[str, _Run] = {}
        self._stopped: set[str] = set()
        """Names of the programs that are not started again."""

    async def run(self) -> None:
        """Starts every program and restarts those that end. When cancelled, ends all of them before it returns.

        Raises:
            ConfigurationError: a program cannot be started.
            PagewireError: `on_refused` or `on_ended` has raised it.
        """
        try:
            async with asyncio.TaskGroup() as self._group:
                for program in self._programs:
                    self.start(program)
        except* PagewireError as errors:
            raise errors.exceptions[0] from None

    def start(self, program: Program) -> None:
        """Starts a program while `run` runs, also one that was stopped: if it still drains, when it has ended."""
        assert self._group is not None, "the supervisor does not run"
        self._stopped.discard(program.name)
        keeping = self._keeping.get(program.name)
        if keeping is None or keeping.done():
            work = self._keep_running(program, self._group)
            self._keeping[program.name] = self._group.create_task(work, name=program.name)
        if program.spare and program.spare not in self._spare_tasks:
            work = self._spares.keep(program.spare, program.environment())
            self._spare_tasks[program.spare] = self._group.create_task(work)

    def pid(self, name: str) -> int | None:
        """Returns the id of the latest process of a program, None while that does not run."""
        run = self._latest.get(name)
        if run is None or run.process is None or run.process.returncode is not None:
            return None
        return run.process.pid

    def seconds_without_core(self, name: str) -> float:
        """Returns for how long the latest process of a program has waited for a core; 0 while that does not run."""
        pid = self.pid(name)
        return 0.0 if pid is None else seconds_without_core(pid)

    def cpu_seconds(self, name: str) -> float:
        """Returns for how long the latest process of a program has computed; 0 while that does not run."""
        pid = self.pid(name)
        return 0.0 if pid is None else cpu_seconds(pid)

    def kill(self, name: str) -> None:
        """Kills a program, which is then restarted."""
        self.send_signal(name, signal.SIGKILL)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to the latest process of a program."""
        run = self._latest.get(name)
        if run is not None and run.process is not None:
            send_signal(run.process, number)

    def replace(self, name: str, instance: str) -> None:
        """Starts a successor of a process that drains. Nothing happens if that was done, or if the program stops."""
        run = self._latest.get(name)
        if run is not None and run.instance == instance and name not in self._stopped:
            run.draining.set()

    def stop(self, name: str, number: signal.Signals = STOP) -> None:
        """Has a program drain, or with `END_NOW` end at once, and does not start it again."""
        self._stopped.add(name)
        self.send_signal(name, number)

    async def ended(self, names: Sequence[str], within: float) -> None:
        """Waits until stopped programs have ended, and kills those that have not `within` so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await poll(lambda: not any(map(self.pid, names)))
        for name in names:
            self.kill(name)

    async def _keep_running(self, program: Program, group: asyncio.TaskGroup) -> None:
        delay = 0.0
        draining: list[Process] = []
        loop = asyncio.get_running_loop()
        while program.name not in self._stopped:
            started = loop.time()
            draining = [process for process in draining if process.returncode is None]
            run = self._latest[program.name] = _Run(draining)
            running = group.create_task(self._run_once(program, run))
            if await self._drains(run, running):
                draining = [*draining, run.process] if run.process is not None else draining
                _log.info("process_replaced", process=program.name, instance=run.instance)
                group.create_task(self._end_drained(run, running))
                continue
            code, reason = await running
            if program.name in self._stopped:
                break
            if code == CONFIGURATION_REFUSED:
                self._on_refused(program.name, reason or f"{program.name} cannot run with these settings: see the log")
                return
            delay = self._policy.next_delay(delay, loop.time() - started)
            _log.warning("process_ended", process=program.name, code=code, restart_in=delay)
            await asyncio.sleep(delay)
        self.instances.pop(program.name, None)

    async def _drains(self, run: _Run, running: "asyncio.Task[tuple[int, str]]") -> bool:
        """Waits until a process drains or has ended; returns whether it drains."""
        draining = asyncio.create_task(run.draining.wait())
        try:
            await asyncio.wait({draining, running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
        return not running.done()

    async def _end_drained(self, run: _Run, running: "asyncio.Task[tuple[int, str]]") -> None:
        """Kills a process that has a successor and does not end in time."""
        await asyncio.wait({running}, timeout=self._policy.drain)
        if not running.done() and run.process is not None:
            _log.error("process_killed", pid=run.process.pid, after=self._policy.drain)
            send_signal(run.process, signal.SIGKILL)

    async def _run_once(self, program: Program, run: _Run) -> tuple[int, str]:
        """Runs a program until it ends; returns its exit code, negative for a signal, and the reason of a refusal.

        Raises:
            ConfigurationError: the command cannot be started.
        """
        try:
            return await self._run_piped(program, run)
        except OSError as error:
            if error.errno not in SCARCE:
                reason = f"cannot start {program.name}: {error.strerror}: {program.command[0]}"
                raise ConfigurationError(reason) from error
            _log.warning("process_not_started", process=program.name, reason=error.strerror)
            return NOT_STARTED, ""

    async def _run_piped(self, program: Program, run: _Run) -> tuple[int, str]:
        reader, writer = os.pipe()
        try:
            os.set_blocking(reader, False)
            code = await self._run_process(program, run, writer)
            self._on_ended(program.name, run.instance)
            with suppress(BlockingIOError):  # nothing was written: this process holds the other end
                return code, os.read(reader, MAX_REASON).decode(errors="replace")
            return code, ""
        finally:
            os.close(reader)
            os.close(writer)

    async def _run_process(self, program: Program, run: _Run, refusal: int) -> int:
        environment = {**program.environment(), PARENT: str(os.getpid()), REFUSAL: str(refusal)}
        if run.predecessors:
            environment[PREDECESSORS] = ",".join(str(process.pid) for process in run.predecessors)
        run.instance = self.instances[program.name] = environment.get(INSTANCE, "")
        descriptors = refusal, *program.descriptors
        run.process = process = await self._spares.start(program.command, program.spare, environment, descriptors)
        if program.name in self._stopped:
            send_signal(process, signal.SIGTERM)  # it has just started, so that it has nothing to finish
        try:
            return await process.wait()
        finally:
            await asyncio.shield(self._end(process))

    async def _end(self, process: Process) -> None:
        if process.returncode is None and await end(process, END_NOW, self._policy.end):
            _log.error("process_killed", pid=process.pid, after=self._policy.end)
