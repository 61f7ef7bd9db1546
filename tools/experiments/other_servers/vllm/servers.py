"""HTTP servers in processes of their own: Pagewire's and vLLM's, one after the other."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

COMMON = {
    "--served-model-name": "m",
    "--host": "127.0.0.1",
    "--dtype": "bfloat16",
    "--max-model-len": "4096",
    "--max-num-seqs": "128",
}
"""Arguments of both servers."""
PAGEWIRE = [sys.executable, "-m", "pagewire"]
"""The command of this checkout."""
READY_WITHIN = 600.0
"""Seconds that a server has to start."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
"""Environment of both."""


def executable(text: str) -> Path:
    """Returns the path of vLLM's executable.

    Raises:
        ArgumentTypeError: the file cannot be executed.
    """
    if not os.access(text, os.X_OK):
        raise ArgumentTypeError(f"{text} is no executable: install vLLM with setup_vllm_cpu.sh")
    return Path(text)


def turns(vllm: Path | None, model: Path, rounds: int, log: Path) -> Iterator[tuple[str, int, float]]:
    """Starts the servers in turn, `rounds` times each; who goes first alternates.

    Yields side, port and the seconds until it was ready, while the server runs. Without `vllm`, Pagewire runs alone.
    """
    commands = {"pagewire": PAGEWIRE} | ({"vllm": [str(vllm)]} if vllm else {})
    for turn in range(rounds):
        for side in list(commands)[:: -1 if turn % 2 else 1]:
            with serving(commands[side], model, log) as (port, seconds):
                yield side, port, seconds


@contextmanager
def serving(
    command: Sequence[str],
    model: Path,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, float]]:
    """Starts `serve` of `command` with a model, `COMMON`, `options` and variables; yields its port and the seconds
    until it was ready."""
    port = free_port()
    arguments = ["serve", str(model), "--port", str(port), *chain.from_iterable(COMMON.items()), *options]
    with server([*command, *arguments], port, log, environment) as seconds:
        yield port, seconds


@contextmanager
def server(command: list[str], port: int, log: Path, environment: Mapping[str, str] | None = None) -> Iterator[float]:
    """Starts a server in a process group of its own, with variables beside those of this process; yields the seconds
    until /health answered 200."""
    began = time.monotonic()
    with log.open("w") as out:
        variables = {**os.environ, **QUIET, **(environment or {})}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
    try:
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() - began > READY_WITHIN:
                raise SystemExit(f"{command[0]} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
