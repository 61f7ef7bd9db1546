"""The socket at which a command of the same user has a running stack serve one more model.

The socket is in a folder that only this user may open, and named after the HTTP port. A command sends one line of JSON
and gets one back.
"""

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from pagewire.shared.errors import BusUnavailable, ConfigurationError, PagewireError
from pagewire.shared.settings.config import Settings

LINE_LIMIT = 1 << 20
"""Maximum bytes of a line: a chat template may be part of the settings."""

_log = structlog.get_logger()


class Addition(msgspec.Struct, frozen=True):
    """A command to a stack: serve one more model."""

    settings: Settings


class Added(msgspec.Struct, frozen=True):
    """The answer, once the model can be used or was refused."""

    model: str = ""
    """Name of the model in requests; empty if it was refused."""
    refusal: str = ""


Add = Callable[[Settings], Awaitable[str]]
"""Serves a model; returns its name in requests."""


@asynccontextmanager
async def control_socket(port: int | None, add: Add) -> AsyncIterator[None]:
    """Takes commands during the block for the stack with this HTTP port; none without a port.

    If there can be no socket, the log says why.
    """
    if port is None:
        yield
        return
    path, answering = _path(port), set[asyncio.Task[None]]()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(add, reader, writer))
        answering.add(task)
        task.add_done_callback(answering.discard)

    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_private(path.parent)
        path.unlink(missing_ok=True)  # of a stack that was killed, or of one with the port at another address
        server = await asyncio.start_unix_server(on_connection, path, limit=LINE_LIMIT)
    except (OSError, ConfigurationError) as error:
        _log.warning("no_control_socket", path=str(path), reason=str(error))
        yield
        return
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in list(answering):
            task.cancel()
        if answering:
            await asyncio.wait(answering)


async def add_model(port: int, settings: Settings) -> str:
    """Has the stack with this HTTP port serve a model; returns the model's name in requests when it is ready.

    Raises:
        ConfigurationError: the stack refuses the model or a setting.
        BusUnavailable: no stack of this user has the port, or it has ended.
    """
    path = _path(port)
    try:
        _check_private(path.parent)
        reader, writer = await asyncio.open_unix_connection(path, limit=LINE_LIMIT)
    except OSError as error:
        raise BusUnavailable(f"no `pagewire serve` of this user has the HTTP port {port}: give its --port") from error
    try:
        writer.write(msgspec.json.encode(Addition(settings)) + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    if not line:
        raise BusUnavailable("the stack has ended")
    added = msgspec.json.decode(line, type=Added)
    if added.refusal:
        raise ConfigurationError(added.refusal)
    return added.model


async def _answer(add: Add, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one command. If the command ends before, the model is not added."""
    try:
        try:
            addition = msgspec.json.decode(await reader.readline(), type=Addition)
            added = await _add_while_connected(add, addition.settings, reader)
        except PagewireError as error:
            added = Added(refusal=str(error))
        except (ValueError, OSError) as error:  # a line that is too long, or no such command
            added = Added(refusal=f"the command cannot be read: {error}")
        writer.write(msgspec.json.encode(added) + b"\n")
    finally:
        writer.close()


async def _add_while_connected(add: Add, settings: Settings, reader: asyncio.StreamReader) -> Added:
    adding = asyncio.ensure_future(add(settings))
    end = asyncio.create_task(reader.read())
    try:
        await asyncio.wait({adding, end}, return_when=asyncio.FIRST_COMPLETED)
        return Added(adding.result()) if adding.done() else Added(refusal="the command has ended")
    finally:
        for task in (adding, end):
            task.cancel()
        await asyncio.wait({adding, end})


def _path(port: int) -> Path:
    return Path(tempfile.gettempdir(), f"pagewire-{os.getuid()}", f"{port}.sock")


def _check_private(folder: Path) -> None:
    """Checks that nobody else can have put a socket into the folder.

    Raises:
        ConfigurationError: somebody can.
        FileNotFoundError: there is no such folder.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigurationError(f"{folder} is not a folder that only its owner may open: remove it")
