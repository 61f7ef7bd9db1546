import asyncio
import errno
import os
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pagewire.embedded.spares import Spares
from pagewire.embedded.supervisor import Program, RestartPolicy, Supervisor
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.linux_process import INSTANCE
from tests.support.processes import alive
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

QUICK = RestartPolicy(first_delay=0.02, longest_delay=0.08, healthy=60, end=0.5)


def program(folder: Path, body: str, name: str = "worker") -> Program:
    """A process that notes its id in a new file, then runs `body`."""
    source = f"""
        import os, pathlib, signal, sys, time
        folder = pathlib.Path({str(folder)!r})
        (folder / f"{name}-{{time.monotonic_ns()}}").write_text(str(os.getpid()))
    """
    code = textwrap.dedent(source) + textwrap.dedent(body)
    return Program(name, (sys.executable, "-S", "-c", code), environment)


def environment() -> Mapping[str, str]:
    return os.environ


def pids(folder: Path) -> list[int]:
    return [int(text) for path in sorted(folder.iterdir()) if (text := path.read_text())]


def start_times(folder: Path) -> list[int]:
    """When each process has started, in nanoseconds."""
    return [int(path.name.partition("-")[2]) for path in sorted(folder.iterdir())]


def starts_by_name(folder: Path) -> Mapping[str, int]:
    """The number of starts of each program."""
    return Counter(path.name.partition("-")[0] for path in folder.iterdir())


def has_started(folder: Path, name: str, times: int) -> bool:
    return starts_by_name(folder)[name] == times


def test_only_crashes_right_after_each_other_make_the_delay_grow() -> None:
    policy, delay, delays = RestartPolicy(), 0.0, []
    for ran in (60.0, 60.0, 6.0, *[1.0] * 8, 60.0):
        delay = policy.next_delay(delay, ran)
        delays.append(delay)
    assert delays == [0.02, 0.02, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0, 0.02]


async def test_a_program_that_ends_is_restarted(tmp_path: Path) -> None:
    supervisor = asyncio.create_task(Supervisor([program(tmp_path, "sys.exit(1)")], QUICK).run())
    await until(lambda: len(pids(tmp_path)) >= 4)
    supervisor.cancel()
    await asyncio.wait({supervisor})
    stamps = start_times(tmp_path)
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    assert gaps[0] > 0.02e9
    assert gaps[2] > 0.08e9, "the delay doubles"


async def test_a_healthy_run_resets_the_delay(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay=0.01, longest_delay=60, healthy=0.0, end=0.5)
    supervisor = asyncio.create_task(Supervisor([program(tmp_path, "sys.exit(0)")], policy).run())
    await until(lambda: len(pids(tmp_path)) >= 12)
    supervisor.cancel()
    await asyncio.wait({supervisor})


async def test_refused_settings_end_everything(tmp_path: Path) -> None:
    programs = [
        program(tmp_path, "time.sleep(60)", name="other"),
        program(tmp_path, "time.sleep(0.1); sys.exit(2)", name="refusing"),
    ]
    with pytest.raises(ConfigurationError, match="refusing"):
        await Supervisor(programs, QUICK).run()
    assert not any(alive(pid) for pid in pids(tmp_path))


async def test_the_reason_of_a_refusal_is_passed_on(tmp_path: Path) -> None:
    body = "os.write(int(os.environ['PAGEWIRE_REFUSAL']), b'too many slots'); sys.exit(2)"
    with pytest.raises(ConfigurationError, match=r"^too many slots$"):
        await Supervisor([program(tmp_path, body)], QUICK).run()


@pytest.mark.parametrize("name", ["pipe", "start"])
async def test_a_program_is_tried_again_while_the_machine_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    owner: Any = os if name == "pipe" else Spares
    work, failures = getattr(owner, name), [errno.EAGAIN, errno.EMFILE]

    def scarce(*arguments: Any) -> Any:
        if failures:
            raise OSError(failures.pop(), "no room")
        return work(*arguments)

    monkeypatch.setattr(owner, name, scarce)
    supervisor = asyncio.create_task(Supervisor([program(tmp_path, "time.sleep(60)")], QUICK).run())
    await until(lambda: pids(tmp_path) or supervisor.done())
    assert not supervisor.done()
    supervisor.cancel()
    await asyncio.wait({supervisor})


async def test_a_missing_command_is_named() -> None:
    with pytest.raises(ConfigurationError, match="/nowhere/to/be"):
        await Supervisor([Program("worker", ("/nowhere/to/be",), environment)], QUICK).run()


@pytest.mark.parametrize("body", ["time.sleep(60)", "signal.signal(signal.SIGUSR1, signal.SIG_IGN); time.sleep(60)"])
async def test_cancelling_ends_every_process(tmp_path: Path, body: str) -> None:
    """One that ignores the signal is killed after the deadline."""
    programs = [program(tmp_path, body, name) for name in ("one", "two")]
    supervisor = asyncio.create_task(Supervisor(programs, QUICK).run())
    await until(lambda: len(pids(tmp_path)) >= 2)
    supervisor.cancel()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait({supervisor})
    assert not any(alive(pid) for pid in pids(tmp_path))


async def test_a_killed_program_is_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor([program(tmp_path, "time.sleep(60)")], QUICK)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(pids(tmp_path)) == 1)
    supervisor.kill("worker")
    supervisor.kill("nobody")
    await until(lambda: len(pids(tmp_path)) == 2)
    running.cancel()
    await asyncio.wait({running})


async def test_the_end_of_a_program_is_reported_before_its_restart(tmp_path: Path) -> None:
    ended: list[tuple[str, int]] = []

    def on_ended(name: str, instance: str) -> None:
        ended.append((name, len(pids(tmp_path))))

    supervisor = Supervisor([program(tmp_path, "time.sleep(60)")], QUICK, on_ended)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(pids(tmp_path)) == 1)
    supervisor.kill("worker")
    await until(lambda: len(pids(tmp_path)) == 2)
    running.cancel()
    await asyncio.wait({running})
    assert ended == [("worker", 1)]


async def test_a_successor_starts_while_its_predecessor_drains(tmp_path: Path) -> None:
    body = """
        (folder / f"predecessor-{os.getpid()}").write_text(os.environ.get("PAGEWIRE_PREDECESSORS", "none"))
        time.sleep(60)
    """

    def named() -> Mapping[str, str]:
        return {**os.environ, INSTANCE: f"i{len(starts())}"}

    def starts() -> list[Path]:
        return sorted(tmp_path.glob("predecessor-*"), key=lambda path: path.stat().st_mtime_ns)

    ended: list[tuple[str, str]] = []
    worker = replace(program(tmp_path, body), environment=named)
    supervisor = Supervisor([worker], QUICK, lambda name, instance: ended.append((name, instance)))
    running = asyncio.create_task(supervisor.run())
    await until(lambda: starts() and starts()[0].read_text())
    old = int(starts()[0].name.partition("-")[2])
    supervisor.replace("worker", "another")
    supervisor.replace("worker", "i0")
    supervisor.replace("worker", "i0")
    await until(lambda: len(starts()) == 2 and starts()[1].read_text())
    assert [path.read_text() for path in starts()] == ["none", str(old)]
    assert (alive(old), supervisor.instances, ended) == (True, {"worker": "i1"}, [])
    supervisor.replace("worker", "i1")
    await until(lambda: len(starts()) == 3 and starts()[2].read_text())
    started = [int(path.name.partition("-")[2]) for path in starts()]
    assert starts()[2].read_text() == f"{old},{started[1]}"
    for pid in started[:2]:
        os.kill(pid, signal.SIGTERM)
    await until(lambda: len(ended) == 2)
    assert sorted(ended) == [("worker", "i0"), ("worker", "i1")]
    assert alive(started[2])
    running.cancel()
    await asyncio.wait({running})
    assert len(starts()) == 3, "the end of a process that drains is no failure"


async def test_a_process_that_has_a_successor_and_does_not_end_is_killed(tmp_path: Path) -> None:
    policy = RestartPolicy(drain=0.1)
    supervisor = Supervisor([program(tmp_path, "time.sleep(60)")], policy)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(pids(tmp_path)) == 1)
    supervisor.replace("worker", "")
    await until(lambda: len(pids(tmp_path)) == 2 and not alive(pids(tmp_path)[0]))
    running.cancel()
    await asyncio.wait({running})


async def test_a_stopped_program_drains_and_is_not_started_again(tmp_path: Path) -> None:
    other = program(tmp_path, "time.sleep(60)", "other")
    supervisor = Supervisor([program(tmp_path, "time.sleep(60)"), other], QUICK)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(pids(tmp_path)) == 2)
    supervisor.stop("worker")  # the signal ends a program that does not handle it
    await until(lambda: sum(map(alive, pids(tmp_path))) == 1)
    supervisor.kill("other")
    await until(lambda: len(pids(tmp_path)) == 3)
    assert starts_by_name(tmp_path) == {"worker": 1, "other": 2}
    running.cancel()
    await asyncio.wait({running})


async def test_a_stopped_program_may_be_started_again(tmp_path: Path) -> None:
    """Also while it drains: then its next process starts when that one has ended."""
    body = """
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit())
        (folder / f"ready-{time.monotonic_ns()}").touch()
        signal.pause()
    """
    worker = program(tmp_path, body)
    supervisor = Supervisor([worker, program(tmp_path, "time.sleep(60)", "other")], QUICK)
    running = asyncio.create_task(supervisor.run())
    for count in (1, 2):
        await until(partial(has_started, tmp_path, "ready", count))
        supervisor.stop("worker")
        supervisor.start(worker)
    await until(lambda: starts_by_name(tmp_path)["worker"] == 3)
    supervisor.stop("worker", signal.SIGKILL)
    await until(lambda: "worker" not in supervisor.instances)
    supervisor.start(worker)
    await until(lambda: starts_by_name(tmp_path)["worker"] == 4)
    running.cancel()
    await asyncio.wait({running})


async def test_a_refusal_ends_only_its_program_if_the_owner_says_so(tmp_path: Path) -> None:
    refusals: list[tuple[str, str]] = []
    body = "os.write(int(os.environ['PAGEWIRE_REFUSAL']), b'no such model')\nsys.exit(2)"
    programs = [program(tmp_path, body), program(tmp_path, "time.sleep(60)", "other")]
    supervisor = Supervisor(programs, QUICK, on_refused=lambda name, reason: refusals.append((name, reason)))
    running = asyncio.create_task(supervisor.run())
    await until(lambda: refusals == [("worker", "no such model")])
    assert not running.done()
    assert starts_by_name(tmp_path)["worker"] == 1
    running.cancel()
    await asyncio.wait({running})


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """The programs ask the kernel to kill them with their parent, as every service does."""
    source = f"""
        import asyncio, os, sys
        from pagewire.embedded.supervisor import Program, Supervisor
        code = '''
        import os, pathlib, time
        from pagewire.shared.process.linux_process import die_with_parent
        die_with_parent()
        pathlib.Path({str(tmp_path)!r}, str(os.getpid())).write_text(str(os.getpid()))
        time.sleep(60)
        '''
        import textwrap
        command = (sys.executable, "-c", textwrap.dedent(code))
        asyncio.run(Supervisor([Program(name, command, lambda: os.environ) for name in ("one", "two")]).run())
    """
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(source))
    try:
        await until(lambda: len(pids(tmp_path)) == 2)
    finally:
        supervisor.kill()
        await supervisor.wait()
    await until(lambda: not any(alive(pid) for pid in pids(tmp_path)))
