"""Keeps processes that have imported services, so that a service that has ended starts again without its imports."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence

import structlog

from pagewire.embedded.child_process import send_signal
from pagewire.embedded.spare import Start, send
from pagewire.shared.process.linux_process import PARENT

Command = tuple[str, ...]

_log = structlog.get_logger()


class _Spare:
    """A process that waits."""

    def __init__(self, process: Process, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self.taken = asyncio.Event()


class Spares:
    """At most one waiting process for each command of spare processes."""

    def __init__(self, delay: float) -> None:
        """`delay`: seconds from a start of a program until its next spare process begins to import."""
        self._delay = delay
        self._waiting: dict[Command, _Spare] = {}

    async def keep(self, command: Command, environment: Mapping[str, str]) -> None:
        """Keeps a process waiting until cancelled, and replaces it once it is taken or has ended. Only on Linux."""
        environment = {**environment, PARENT: str(os.getpid())}
        while sys.platform == "linux":
            await asyncio.sleep(self._delay)  # the imports would delay the start of what is being started
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours:
                with theirs:
                    try:
                        process = await asyncio.create_subprocess_exec(
                            *command, env=environment, stdin=theirs.fileno(), stdout=2, start_new_session=True
                        )
                    except OSError as error:  # the machine has no room for it, and nothing waits for it
                        _log.warning("spare_process_not_started", reason=str(error))
                        continue
                await self._wait(command, _Spare(process, ours))

    async def _wait(self, command: Command, spare: _Spare) -> None:
        """Offers a process until it is taken or has ended."""
        self._waiting[command] = spare
        ended, taken = asyncio.create_task(spare.process.wait()), asyncio.create_task(spare.taken.wait())
        try:
            await asyncio.wait({ended, taken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.pop(command, None)
            taken.cancel()
            if spare.taken.is_set():
                ended.cancel()
            else:
                send_signal(spare.process, signal.SIGKILL)
                await asyncio.shield(ended)

    async def start(
        self,
        command: Command,
        spare_command: Command,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> Process:
        """Starts a program: has a spare process become it if one waits, else runs its command.

        Raises:
            OSError: the command cannot be run.
        """
        spare = self._waiting.pop(spare_command, None)
        if spare is not None and spare.process.returncode is None:
            try:
                send(spare.connection, Start(command, dict(environment), tuple(descriptors)))
            except OSError as error:
                _log.warning("spare_process_unusable", reason=str(error))
            else:
                spare.taken.set()
                return spare.process
        # In its own session, so that Ctrl-C reaches only the supervisor, which then ends the programs. Standard output
        # belongs to the user's command, so a program's output goes to standard error.
        return await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=DEVNULL, stdout=2, start_new_session=True, pass_fds=descriptors
        )
