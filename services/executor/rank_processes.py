"""The processes of an executor's ranks but the first: started before the executor's imports, which take seconds."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.shared.settings.environment import variable

COMMANDS = {
    device: (sys.executable, "-P", "-m", f"pagewire.services.executor.devices.{device}.ranks")
    for device in ("cpu", "cuda")
}
"""Command line of a rank by device, without its arguments: see `run_rank`."""
MAX_RANKS = 64
"""Most ranks of an executor, as in `kernels/cpu/cpp/collectives.hpp`."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that waits to be told which rank it is."""

    process: "subprocess.Popen[bytes]"
    end: socket.socket
    """Rank 0's end of the connection between the two."""
    adapters: socket.socket
    """Rank 0's end of the connection for adapters."""
    adapters_descriptor: int
    """File descriptor of its other end, in the process."""


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """The processes of all ranks but 0."""

    device: str
    memory: int
    """File descriptor of the memory that all ranks share, empty at first."""
    store: int
    """File descriptor of an empty file without a name, through which ranks on GPUs find each other."""
    processes: Sequence[RankProcess]

    @classmethod
    def start(cls, device: str, size: int) -> "RankProcesses":
        """Starts the processes beside this one, which is rank 0 of `size`. They end with the thread that calls this."""
        memory, store = os.memfd_create("pagewire-ranks"), os.memfd_create("pagewire-store")
        processes = []
        for _ in range(1, size):
            (here, there), (adapters, others) = socket.socketpair(), socket.socketpair()
            with there, others:
                command = (*COMMANDS[device], str(there.fileno()), str(os.getpid()))
                kept = there.fileno(), others.fileno(), memory, store
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=kept)
                processes.append(RankProcess(process, here, adapters, others.fileno()))
        return cls(device, memory, store, processes)


_early: list[RankProcesses] = []


def start_early(environment: Mapping[str, str]) -> None:
    """Starts the processes that an executor will need, by the variables that its supervisor gives it."""
    device, size = environment.get(variable("device"), ""), environment.get(variable("tensor-parallel-size"), "")
    if device in COMMANDS and size.isdecimal() and 1 < int(size) <= MAX_RANKS:
        _early.append(RankProcesses.start(device, int(size)))


def take(device: str, size: int) -> RankProcesses:
    """Returns the processes beside rank 0 of `size`, which may have been started early."""
    if _early and (_early[0].device, len(_early[0].processes)) == (device, size - 1):
        return _early.pop()
    return RankProcesses.start(device, size)
