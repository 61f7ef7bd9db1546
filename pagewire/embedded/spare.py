"""A process that has imported services and waits to become one: `python -m pagewire.embedded.spare SERVICE ...`.

Imports take most of a service's start. This process has no connection, no model and no threads of its own; on standard
input it has a socket, from which it learns the module to run, the environment and the descriptors.
"""

import fcntl
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence

import msgspec

from pagewire.shared.process.lean_imports import leave_out_unused
from pagewire.shared.process.linux_process import die_with_parent, show_command

MAX_MESSAGE = 1 << 20
"""Maximum bytes of the message."""
MAX_DESCRIPTORS = 16
UNUSED_NUMBER = 1000
"""Number from which on descriptors are free: below, one that has arrived may have the number that another one needs."""


class Start(msgspec.Struct):
    """The message to a spare process, with its descriptors beside it."""

    command: tuple[str, ...]
    """Command line of the program, which ends with a module."""
    environment: Mapping[str, str]
    descriptors: tuple[int, ...]
    """Numbers that the descriptors have in the program."""


def send(connection: socket.socket, start: Start) -> None:
    """Sends a start to a spare process.

    Raises:
        OSError: the process has ended, or the message is too large.
    """
    socket.send_fds(connection, [msgspec.json.encode(start)], start.descriptors)


def main(services: Sequence[str]) -> None:
    """Imports services and becomes the program that comes by standard input; ends with it if none comes."""
    die_with_parent()
    leave_out_unused()
    for service in services:
        importlib.import_module(f"pagewire.services.{service}.service")
    importlib.import_module("pagewire.shared.process.runtime")
    with socket.socket(fileno=0) as connection:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not data:
            return
        unused = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, UNUSED_NUMBER) for descriptor in descriptors]
    os.open(os.devnull, os.O_RDONLY)  # becomes standard input, the lowest free number
    start = msgspec.json.decode(data, type=Start)
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(unused, start.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(start.environment)
    show_command(start.command)
    sys.argv = ["", *start.command[start.command.index("-m") + 2 :]]
    runpy.run_module(start.command[start.command.index("-m") + 1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
