import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pagewire.embedded.programs import ServiceProgram
from pagewire.embedded.spares import Spares
from pagewire.embedded.supervisor import Program, RestartPolicy, Supervisor
from pagewire.shared.settings.config import Settings
from tests.support.processes import alive
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="spare processes need Linux")]

POLICY = RestartPolicy(first_delay=0.02, end=0.5, spare=0.0)
SPARE = (sys.executable, "-P", "-m", "pagewire.embedded.spare")
WORKER = """
import json, os, pathlib, sys, time
what = {
    "pid": os.getpid(), "arguments": sys.argv[1:], "extra": os.environ["EXTRA"], "name": __name__,
    "shown": pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode().split("\\0"),
    "inherited": os.read(int(os.environ["PIPE"]), 4).decode(),
    "descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
}
path = pathlib.Path(os.environ["FOLDER"], str(time.monotonic_ns()))
path.with_suffix(".part").write_text(json.dumps(what))
path.with_suffix(".part").rename(path)
time.sleep(600)
"""


def reports(folder: Path) -> list[dict[str, Any]]:
    """Returns what each process of the worker has seen, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("reports/*[0-9]"))]


def spare_processes() -> list[int]:
    """Returns the ids of the spare processes that this process has started."""
    ids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"pagewire.embedded.spare" in (path / "cmdline").read_bytes():
                ids.append(int(path.name))
    return ids


@asynccontextmanager
async def supervised(folder: Path) -> AsyncIterator[Supervisor]:
    """Runs a worker that has a spare process."""
    (folder / "a_worker.py").write_text(WORKER)
    (folder / "reports").mkdir()
    reader, writer = os.pipe()

    def environment() -> Mapping[str, str]:
        os.write(writer, b"data")
        paths = os.pathsep.join([str(folder), *sys.path])
        return {**os.environ, "PYTHONPATH": paths, "FOLDER": str(folder / "reports"), "EXTRA": "x", "PIPE": str(reader)}

    command = (sys.executable, "-P", "-m", "a_worker", "--one")
    supervisor = Supervisor([Program("worker", command, environment, (reader,), SPARE)], POLICY)
    running = asyncio.create_task(supervisor.run())
    try:
        await until(lambda: len(reports(folder)) == 1)
        await until(spare_processes)
        yield supervisor
    finally:
        running.cancel()
        await asyncio.wait({running})
        os.close(reader)
        os.close(writer)


async def restart(supervisor: Supervisor, folder: Path) -> dict[str, Any]:
    """Kills the worker; returns what its next process has seen."""
    starts = len(reports(folder))
    supervisor.kill("worker")
    await until(lambda: len(reports(folder)) > starts)
    return reports(folder)[-1]


async def restart_in_spare(supervisor: Supervisor, folder: Path) -> dict[str, Any]:
    """Kills the worker until it has started in a spare process, as soon as one is waiting; returns what it has seen."""
    while True:
        spares = spare_processes()
        report = await restart(supervisor, folder)
        if report["pid"] in spares:
            return report


async def test_a_program_that_is_killed_goes_on_in_the_spare_process(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        second = await restart_in_spare(supervisor, tmp_path)
        assert second["pid"] == supervisor.pid("worker")
        same = ("arguments", "extra", "name", "shown", "inherited", "descriptors", "threads")
        assert [second[key] for key in same] == [reports(tmp_path)[0][key] for key in same]


async def test_a_spare_process_that_is_used_or_killed_is_replaced(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        await restart_in_spare(supervisor, tmp_path)
        await until(spare_processes)
        (spare,) = spare_processes()
        os.kill(spare, signal.SIGKILL)
        await until(lambda: any(pid != spare for pid in spare_processes()))
        assert alive(reports(tmp_path)[-1]["pid"]), "the program does not end with the spare process"
        await restart_in_spare(supervisor, tmp_path)


async def test_without_a_spare_process_a_program_starts_by_its_command(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        (spare,) = spare_processes()
        os.kill(spare, signal.SIGKILL)
        supervisor.kill("worker")
        await until(lambda: len(reports(tmp_path)) == 2)
        assert reports(tmp_path)[1]["shown"] == reports(tmp_path)[0]["shown"]


async def test_spare_processes_end_with_the_supervisor(tmp_path: Path) -> None:
    async with supervised(tmp_path):
        processes = spare_processes()
    assert not any(map(alive, processes))


def test_only_executors_have_a_spare_process_with_pytorch() -> None:
    settings = Settings(model="m")
    spares = {
        service: ServiceProgram(service, service, settings).spare for service in ("executor", "tokenizer", "gateway")
    }
    assert spares["tokenizer"] == spares["gateway"] != spares["executor"]


async def test_a_machine_without_room_for_a_spare_process_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []
    again = asyncio.Event()

    async def refuse(*_: object, **__: object) -> None:
        attempts.append("attempt")
        if len(attempts) > 1:
            again.set()
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    keeping = asyncio.create_task(Spares(0.0).keep(SPARE, {}))
    async with asyncio.timeout(PATIENCE):
        await again.wait()
    keeping.cancel()
