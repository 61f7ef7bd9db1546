"""`pagewire` as its users run it: in processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import PATIENCE

COMMAND = (sys.executable, "-P", "-m", "pagewire")


@dataclass(frozen=True)
class Served:
    """A running `pagewire serve`."""

    process: "subprocess.Popen[str]"
    http: str
    nats: str
    models: tuple[str, ...] = ()
    """Names of the models, where there are several."""

    def processes(self) -> list[int]:
        """The processes that it started."""
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def find_all(self, name: str) -> set[int]:
        """The processes of a service, of all models."""
        processes = set()
        for pid in self.processes():
            with suppress(FileNotFoundError, ProcessLookupError):
                if f"services.{name}" in Path(f"/proc/{pid}/cmdline").read_text():
                    processes.add(pid)
        return processes

    def find(self, name: str, model: str = "") -> int | None:
        """The process of a service, None while none runs. `model`: the served name, where there are several; a process
        that waited to become a service shows none."""
        for pid in self.find_all(name):
            with suppress(FileNotFoundError, ProcessLookupError):
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
                if not model or f"PAGEWIRE_SERVED_MODEL_NAME={model}" in environment:
                    return pid
        return None

    def service(self, name: str, model: str = "") -> int:
        """The process of a service that runs."""
        pid = self.find(name, model)
        assert pid is not None, f"no {name} runs"
        return pid


@contextmanager
def serving(*flags: str, command: Sequence[str] = COMMAND, cwd: Path | None = None, **environ: str) -> Iterator[Served]:
    """Runs a stack on free ports; whatever is left of it at the end is killed."""
    serve = [*command, "serve", "--port", "0", "--nats-port", "0", "--log-level", "warning", *flags]
    process = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=cwd, env={**os.environ, **environ})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), line
        _, http, nats, *models = line.split()
        yield Served(process, http, nats, tuple(models))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()


def run(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """One command, to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        stdin=subprocess.DEVNULL,
    )
