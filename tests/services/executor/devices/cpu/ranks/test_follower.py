"""The process of a rank, run in this one until it loads its part."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.collectives import memory_bytes
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.ranks import follower
from pagewire.services.executor.devices.ranks.startup import Connection, Loaded, Start
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint


@pytest.fixture
def memory() -> Iterator[int]:
    """The shared memory of the ranks."""
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, memory_bytes(CpuKernels(build.load(), 1), 2))
    yield descriptor
    os.close(descriptor)


def test_a_rank_loads_on_all_of_its_threads(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigurationError(f"on {torch.get_num_threads()} threads")

    monkeypatch.setattr(follower, "load_part", refuse)
    monkeypatch.setattr(follower, "use_batch_scheduling", lambda: None)
    before, (here, there) = torch.get_num_threads(), socket.socketpair()
    start = Start(Settings(tensor_parallel_size=2), str(checkpoint("llama")), 1, before + 1, memory, -1, -1)
    with here, there:
        try:
            follower.follow(Connection(there), start)
        finally:
            torch.set_num_threads(before)
        assert Connection(here).receive(Loaded).refusal == f"on {before + 1} threads"
