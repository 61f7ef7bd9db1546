"""The process of a rank other than 0: it is told what to load, shows that it lives, and ends with rank 0."""

import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from pagewire.services.executor.devices.protocol import Int64
from pagewire.services.executor.devices.ranks.startup import Connection, Ready, Start
from pagewire.shared.process.linux_process import die_with
from pagewire.shared.telemetry import logs

HEARTBEAT_INTERVAL = 0.1
"""Seconds between two heartbeats."""


def run_rank(follow: Callable[[Connection, Start], None]) -> None:
    """Runs `follow` when rank 0 has said what to load.

    The arguments of the process are the file descriptor of its connection to rank 0 and the process id of that.
    """
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # all processes of a terminal get them; rank 0 drains, and ends this one
    connection = Connection(socket.socket(fileno=descriptor))
    with suppress(EOFError):  # rank 0 has ended, or needs no other rank
        start = connection.receive(Start)
        logs.configure(start.settings, service="executor", rank=str(start.rank))
        follow(connection, start)


def say_ready(connection: Connection, heartbeats: Int64, rank: int) -> None:
    """Tells rank 0 that this one is ready, and shows from now on that the process is not stopped, until it ends."""
    threading.Thread(target=_count_heartbeats, args=(heartbeats, rank), daemon=True).start()
    connection.send(Ready())


def _count_heartbeats(heartbeats: Int64, rank: int) -> None:
    never = threading.Event()
    while not never.wait(HEARTBEAT_INTERVAL):
        heartbeats[rank] += 1
