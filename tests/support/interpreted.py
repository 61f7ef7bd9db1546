"""The device `cuda` on a machine without a GPU: the same kernels under Triton's interpreter, and gloo for NCCL."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

import tests.kernels.conftest  # noqa: F401  # before Triton is imported
from pagewire.services.executor import devices, rank_processes
from pagewire.services.executor.devices.cuda import open as opening
from pagewire.services.executor.devices.cuda import part
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.part import CudaPart
from pagewire.services.executor.devices.cuda.ranks import follower, leader
from pagewire.services.executor.devices.ranks.startup import Measured
from pagewire.services.executor.steps import in_flight_steps
from tests.support.host_runtime import HostRuntime

GPUS = 4
ROOM = 1 << 40
"""Bytes that a pool may have: the settings name the blocks."""


def _measure(loaded: CudaPart) -> Measured:
    """Stands for the measured memory, without a step of padding."""
    return Measured(ROOM, ROOM, loaded.block_bytes)


@contextmanager
def interpreted() -> Iterator[None]:
    """Lets `--device cuda` run where there is no GPU, without measuring and without graphs."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as patches:
        for module in (opening, leader, follower):
            patches.enter_context(patch.object(module, "CudaRuntime", lambda _number=0: HostRuntime()))
        for module in (opening, part):
            patches.enter_context(patch.object(module, "capability", lambda: (9, 0)))
        patches.enter_context(patch.object(torch.cuda, "device_count", lambda: GPUS))
        patches.enter_context(patch.object(CudaPart, "measure", _measure))
        patches.enter_context(patch.object(CudaDevice, "capture", lambda _: None))
        patches.enter_context(patch.object(devices, "_open_cuda", opening.open_cuda))
        command = (sys.executable, "-m", "tests.support.interpreted_rank")
        patches.enter_context(patch.dict(rank_processes.COMMANDS, {"cuda": command}))
        patches.enter_context(patch.object(in_flight_steps, "STEP_SECONDS", math.inf))  # the interpreter is slow
        patches.enter_context(patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}))
        yield
