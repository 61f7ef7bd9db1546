"""Threads that share loops: every part is done once, whoever calls and however often."""

import threading
from pathlib import Path

import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels


def test_many_successive_small_loops_are_right() -> None:
    kernels = CpuKernels(build.load(), 4)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    packed = kernels.pack(torch.randn(2048, 64, generator=torch.Generator().manual_seed(1)))
    expected = CpuKernels(build.load(), 1).linear(x, packed)
    assert all(torch.equal(kernels.linear(x, packed), expected) for _ in range(2000))


def test_several_callers_at_once_get_right_products() -> None:
    """One of them has the helpers, the others do their work alone."""
    kernels = CpuKernels(build.load(), 3)
    weight = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
    packed = kernels.pack(weight)
    wrong: list[int] = []

    def call(seed: int) -> None:
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
        expected = CpuKernels(build.load(), 1).linear(x, packed)
        for _ in range(200):
            if not torch.equal(kernels.linear(x, packed), expected):
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


def test_a_caller_has_no_more_threads_than_it_asks_for() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    many, two = CpuKernels(build.load(), 5), CpuKernels(build.load(), 2)
    packed = many.pack(torch.randn(4096, 512, generator=torch.Generator().manual_seed(1)))
    expected = many.linear(x, packed)
    assert torch.equal(two.linear(x, packed), expected), "which tells the other helpers to stop"
    before = _cpu_seconds()
    for _ in range(100):
        assert torch.equal(two.linear(x, packed), expected)
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in _cpu_seconds().items()}
    assert sum(seconds > 0.02 for seconds in used.values()) <= 2, used
    before = _cpu_seconds()
    for _ in range(100):
        assert torch.equal(many.linear(x, packed), expected)
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in _cpu_seconds().items()}
    assert sum(seconds > 0 for seconds in used.values()) > 2, "the helpers are back"


def _cpu_seconds() -> dict[str, float]:
    """Returns the CPU time of each thread of this process so far."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}


def test_helpers_that_fell_asleep_help_again() -> None:
    kernels = CpuKernels(build.load(), 2)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    packed = kernels.pack(torch.randn(4096, 256, generator=torch.Generator().manual_seed(1)))
    expected = kernels.linear(x, packed)
    asleep = threading.Event()
    for _ in range(5):
        asleep.wait(0.02)  # longer than a helper looks out for work
        assert torch.equal(kernels.linear(x, packed), expected)
