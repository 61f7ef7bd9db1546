"""Services with another wire version, which join those of a stack and leave again, as in an update."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

import pagewire
from pagewire.shared.errors import Unavailable
from pagewire.shared.process.linux_process import die_with
from pagewire.shared.settings.config import Settings, to_environment
from pagewire.shared.settings.environment import PREFIX
from pagewire.shared.wire_version import WIRE_VERSION

START_TIMEOUT = 120.0
"""Seconds within which the other services must be ready."""
SHARED, FILE = "shared", "wire_version.py"
"""Folder and name of the file that sets the wire version."""
LINE = "WIRE_VERSION = {}\n"
"""The line that sets it."""


@contextmanager
def newer_package() -> Iterator[Path]:
    """Yields a folder with this package, whose wire version is one higher; all other files are links."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(pagewire.__file__).parent
        shared = Path(folder, here.name, SHARED)
        shared.mkdir(parents=True)
        for original, copy in ((here, shared.parent), (here / SHARED, shared)):
            for file in original.iterdir():
                if file.name not in {SHARED, FILE, "__pycache__"}:
                    (copy / file.name).symlink_to(file.resolve())
        source = (here / SHARED / FILE).read_text()
        (shared / FILE).write_text(source.replace(LINE.format(WIRE_VERSION), LINE.format(WIRE_VERSION + 1)))
        yield Path(folder)


async def serve_beside(package: Path, settings: Settings, seconds: float) -> None:
    """Serves the model of these settings, on the broker that they name, for some time beside other services.

    Returns once these services have finished what they accepted, and have ended.

    Raises:
        Unavailable: they were not ready in time.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment = inherited | to_environment(msgspec.structs.replace(settings, port=0)) | {"PYTHONPATH": str(package)}
    command = (sys.executable, "-P", "-m", "pagewire", "serve")
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, preexec_fn=partial(die_with, os.getpid())
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            line = await process.stdout.readline()
        if not line.startswith(b"ready"):
            raise Unavailable("the services of another version have not started: see their log")
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
