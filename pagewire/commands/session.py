"""Shared by the commands: running until the end or a signal, and connecting to a running or a temporary stack."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from pagewire.client.async_client import AsyncClient
from pagewire.commands.stack_at_port import at_port
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import BusUnavailable, Unavailable
from pagewire.shared.models import model_folder
from pagewire.shared.security import credentials
from pagewire.shared.settings.config import Settings, nats_urls
from pagewire.shared.telemetry import logs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a command. The last one, of a terminal that closes, does not where it is ignored (`nohup`)."""
CONNECT_TIMEOUT = 1.0
"""Seconds within which a running stack must answer."""


def run(work: Coroutine[Any, Any, int], settings: Settings, *, until_stopped: bool = False) -> int:
    """Runs a command and returns its exit code. A signal of `SIGNALS` cancels the command.

    The exit code is then 128 and the number of the signal, or 0 where the command runs `until_stopped`.
    """
    logs.configure(settings, service="supervisor")

    async def until_signal() -> int:
        task = asyncio.create_task(work)
        arrived: list[int] = []

        def on_signal(number: int) -> None:
            arrived.append(number)
            task.cancel()

        _on_signals(on_signal)
        try:
            return await task
        except asyncio.CancelledError:
            return 0 if until_stopped or not arrived else 128 + arrived[0]

    return asyncio.run(until_signal())


def first_signal() -> asyncio.Event:
    """Returns an event that the next signal sets instead of cancelling the command; a second one cancels it.

    The command's own task must call it.
    """
    command, arrived = asyncio.current_task(), asyncio.Event()
    assert command is not None

    def on_signal(_: int) -> None:
        (command.cancel if arrived.is_set() else arrived.set)()

    _on_signals(on_signal)
    return arrived


def _on_signals(handler: Callable[[int], None]) -> None:
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, handler, number)


def piped_text() -> str | None:
    """Returns the text on standard input, without its last line break; None: a person at a terminal would type it."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")


def model_of(settings: Settings) -> str:
    """Returns the served name of the settings' model; empty when they name no model."""
    return model_folder.served_name(settings) if settings.model or settings.served_model_name else ""


def quiet(settings: Settings, **changes: Any) -> Settings:
    """Returns settings that log only errors, unless a level is set, so that a command's output stays readable."""
    level = "error" if settings.log_level == "info" else settings.log_level
    return msgspec.structs.replace(settings, log_level=level, **changes)


def client_of(settings: Settings) -> AsyncClient:
    """Returns a client of the stack at the settings' address."""
    return AsyncClient(
        nats_urls(settings),
        api_key=settings.api_key,
        tenant=settings.tenant,
        model=model_of(settings),
        connect_timeout=CONNECT_TIMEOUT,
        user=credentials.of_command(settings),
        tls=credentials.tls(settings),
    )


@asynccontextmanager
async def connect(settings: Settings) -> AsyncIterator[AsyncClient]:
    """Connects to the stack at the settings' address; if none is running, starts one for the block.

    Raises:
        BusUnavailable: the broker at the setting `nats-url` does not answer.
        ConfigurationError: a setting is invalid.
    """
    async with AsyncExitStack() as exits:
        try:
            client = await exits.enter_async_context(client_of(await at_port(settings)))
            await client.models()
        except (BusUnavailable, Unavailable):
            if settings.nats_url:
                raise
            await exits.aclose()
            print("no stack is running: starting one", file=sys.stderr)
            # Nobody else uses that stack, so it needs no tenants.
            own = Stack(msgspec.structs.replace(settings, nats_port=0, api_key_file=""), PIPELINE)
            address = await (await exits.enter_async_context(own)).ready()
            client = await exits.enter_async_context(AsyncClient(address.nats, api_key=settings.api_key))
        yield client
