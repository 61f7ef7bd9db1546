"""What commands share: running to the end or to a signal, and a client of a stack that runs or is started for it."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from pagewire.client.async_client import AsyncClient
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared import logs, model_folder
from pagewire.shared.config import Settings
from pagewire.shared.errors import BusUnavailable, Unavailable

CONNECT_WITHIN = 1.0
"""Seconds in which a running stack must answer: it is on this machine, or named by the settings."""


def run(work: Coroutine[Any, Any, int], settings: Settings) -> int:
    """Exit code of a command. SIGINT and SIGTERM cancel it: it ends what it started, and the code is 0."""
    logs.configure(settings, service="supervisor")

    async def until_signal() -> int:
        task = asyncio.create_task(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 0

    return asyncio.run(until_signal())


def url_of(settings: Settings) -> str:
    """The broker that the settings name, or the default one."""
    return settings.nats_url or f"nats://127.0.0.1:{settings.nats_port}"


def model_of(settings: Settings) -> str:
    """The served name that the settings mean; empty when they name no model."""
    return model_folder.served_name(settings) if settings.model or settings.served_model_name else ""


def quiet(settings: Settings, **changes: Any) -> Settings:
    """The settings of a command that is about its output: only errors in the log, unless another level is set."""
    level = "error" if settings.log_level == "info" else settings.log_level
    return msgspec.structs.replace(settings, log_level=level, **changes)


@asynccontextmanager
async def connect(settings: Settings) -> AsyncIterator[AsyncClient]:
    """A client of the stack that runs at the address in the settings, or of one that is started for the block.

    Raises:
        BusUnavailable: `nats-url` names a broker, and it does not answer.
        ConfigurationError: a setting cannot be used.
    """
    try:
        async with AsyncClient(
            url_of(settings), api_key=settings.api_key, model=model_of(settings), connect_timeout=CONNECT_WITHIN
        ) as client:
            await client.models()
            yield client
            return
    except (BusUnavailable, Unavailable):
        if settings.nats_url:
            raise
    print("no stack is running: starting one", file=sys.stderr)
    async with Stack(msgspec.structs.replace(settings, nats_port=0), PIPELINE) as stack:
        address = await stack.ready()
        async with AsyncClient(address.nats, api_key=settings.api_key) as client:
            yield client
