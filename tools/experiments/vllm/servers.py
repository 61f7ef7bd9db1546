"""HTTP servers in processes of their own: Pagewire's, and that of vLLM beside it."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMMON = {
    "--served-model-name": "m",
    "--host": "127.0.0.1",
    "--dtype": "bfloat16",
    "--max-model-len": "4096",
    "--max-num-seqs": "128",
}
"""Arguments of both servers."""
READY_WITHIN = 600.0
"""Seconds that a server has to start."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
"""Environment of both."""


@contextmanager
def server(command: list[str], port: int, log: Path) -> Iterator[float]:
    """Starts a server in a process group of its own; yields the seconds until /health answered 200."""
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | QUIET, start_new_session=True
        )
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
