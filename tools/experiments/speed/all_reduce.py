"""Measures the all-reduce of ranks that share memory: its time, and the CPU time of a rank."""

import argparse
import mmap
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.collectives import SharedMemoryCollectives, memory_bytes
from pagewire.kernels.cpu.kernels import CpuKernels

PROGRAM = "python -m tools.experiments all_reduce"
RANK = "--rank"
"""Flag of a process that this program starts."""
NUMBERS = (576, 2048, 8192, 65536, 1 << 20)
"""Float32 numbers of an all-reduce: hidden states of one token up to those of 512."""
REPEATS = 2000


@dataclass(frozen=True)
class Cost:
    """The mean cost of an all-reduce."""

    ranks: int
    numbers: int
    microseconds: float
    cpu_microseconds: float
    """CPU time of one rank, waits included."""
    switches: float
    """How often a rank has given its core up, to sleep or for another process."""


def main(arguments: list[str]) -> int:
    """Prints a table, and writes it if that is asked for."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(RANK, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=-1, help=argparse.SUPPRESS)
    add_output(parser)
    options = parser.parse_args(arguments)
    kernels = CpuKernels(build.load(), 1)
    if options.rank:
        _run(kernels, options.memory, options.rank, options.ranks)
        return 0
    memory = os.memfd_create("ranks")
    os.ftruncate(memory, memory_bytes(kernels, options.ranks))
    command = [sys.executable, "-m", "tools.experiments", "all_reduce", "--ranks", str(options.ranks)]
    command += ["--memory", str(memory)]
    others = [subprocess.Popen([*command, RANK, str(rank)], pass_fds=[memory]) for rank in range(1, options.ranks)]
    try:
        costs = _run(kernels, memory, 0, options.ranks)
    finally:
        for other in others:
            other.wait()
    rows = (f"{c.numbers} | {c.microseconds:.1f} | {c.cpu_microseconds:.1f} | {c.switches:.2f}" for c in costs)
    print(*markdown("numbers | µs | CPU µs of a rank | core given up", rows), sep="\n")
    write(options.output, PROGRAM, arguments, costs=[asdict(cost) for cost in costs])
    return 0


def _run(kernels: CpuKernels, memory: int, rank: int, size: int) -> list[Cost]:
    """Returns the cost of each number of `NUMBERS`, which all ranks measure together."""
    shared = mmap.mmap(memory, memory_bytes(kernels, size))
    collectives, costs = SharedMemoryCollectives(kernels, shared, rank, size), []
    for numbers in NUMBERS:
        x, repeats = torch.zeros(numbers), max(100, min(REPEATS, REPEATS * 8192 // numbers))
        collectives.all_reduce(x)
        switches = _switches()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            collectives.all_reduce(x)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        microseconds = round(seconds / repeats * 1e6, 1), round(cpu / repeats * 1e6, 1)
        costs.append(Cost(size, numbers, *microseconds, round((_switches() - switches) / repeats, 3)))
    return costs


def _switches() -> int:
    """Returns how often this process has given up its core by itself, to sleep or to wait for another."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
