"""The processes of an executor's ranks but the first: started before the executor's imports, which take seconds."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.shared.settings.environment import variable

COMMAND = (sys.executable, "-P", "-m", "pagewire.services.executor.devices.cpu.ranks")
"""Command line of a rank, without the file descriptor of its line to rank 0 and the process id of that."""
MAX_RANKS = 64
"""Most ranks of an executor, as in `kernels/cpu/cpp/collectives.hpp`."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that waits to be told which rank it is."""

    process: "subprocess.Popen[bytes]"
    end: socket.socket
    """Rank 0's end of the line between the two."""


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """The processes of all ranks but 0."""

    memory: int
    """File descriptor of the memory that all ranks share, empty at first."""
    processes: Sequence[RankProcess]

    @classmethod
    def start(cls, size: int) -> "RankProcesses":
        """Starts the processes beside this one, which is rank 0 of `size`. They end with the thread that calls this."""
        memory = os.memfd_create("pagewire-ranks")
        processes = []
        for _ in range(1, size):
            here, there = socket.socketpair()
            with there:
                command = (*COMMAND, str(there.fileno()), str(os.getpid()))
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(there.fileno(), memory))
            processes.append(RankProcess(process, here))
        return cls(memory, processes)


_early: list[RankProcesses] = []


def start_early(environment: Mapping[str, str]) -> None:
    """Starts the processes that an executor on a CPU will need, by the variables that its supervisor gives it."""
    size = environment.get(variable("tensor-parallel-size"), "")
    if environment.get(variable("device")) == "cpu" and size.isdecimal() and 1 < int(size) <= MAX_RANKS:
        _early.append(RankProcesses.start(int(size)))


def take(size: int) -> RankProcesses:
    """Returns the processes beside rank 0 of `size`, which may have been started early."""
    return _early.pop() if _early and len(_early[0].processes) == size - 1 else RankProcesses.start(size)
