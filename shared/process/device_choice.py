"""The device that the setting `device` means when it is auto: cuda where a supported GPU is, else cpu."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagewire.shared.settings.config import Settings

AUTO = "auto"
DRIVER_FILES: tuple[Path, ...] = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files of which one is there where a process may use an NVIDIA GPU: that of Linux, and that of Windows' subsystem."""
CHECK_TIME = 120.0
"""Seconds within which the check of the GPU must end: PyTorch takes some to load, from a cold disk many."""


class Choice(NamedTuple):
    """A device, and why it is the right one."""

    device: str
    reason: str


@cache
def choose() -> Choice:
    """Returns the device for this machine. The check of a GPU loads PyTorch, so it has a process of its own."""
    if not any(file.exists() for file in DRIVER_FILES):
        return Choice("cpu", "this machine has no NVIDIA driver")
    check = [sys.executable, "-P", "-m", "pagewire.services.executor.devices.cuda.machine"]
    try:
        done = subprocess.run(check, capture_output=True, text=True, timeout=CHECK_TIME, check=False)
    except subprocess.TimeoutExpired:
        return Choice("cpu", f"the check of the GPU took longer than {CHECK_TIME:.0f} s")
    last_line = (done.stdout.strip() or done.stderr.strip() or "the check of the GPU has ended").splitlines()[-1]
    return Choice("cpu" if done.returncode else "cuda", last_line)


def resolve(settings: Settings) -> Settings:
    """Returns the settings with a device that is not auto."""
    if settings.device != AUTO:
        return settings
    return msgspec.structs.replace(settings, device=choose().device)
