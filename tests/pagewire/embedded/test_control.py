"""The socket by which a command has a running stack serve one more model."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.embedded.control import add_model, control_socket
from pagewire.shared.errors import BusUnavailable, ConfigurationError
from pagewire.shared.settings.config import Settings
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

PORT = 8000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def served(settings: Settings) -> str:
    return settings.model


async def test_a_command_has_a_model_served() -> None:
    async with control_socket(PORT, served):
        assert await add_model(PORT, Settings(model="m", chat_template="x" * 100_000)) == "m"


async def test_the_refusal_of_a_model_is_the_error_of_the_command() -> None:
    async def refused(_: Settings) -> str:
        raise ConfigurationError("it does not fit")

    async with control_socket(PORT, refused):
        with pytest.raises(ConfigurationError, match="it does not fit"):
            await add_model(PORT, Settings())


async def test_a_port_without_a_stack_is_named() -> None:
    async with control_socket(PORT, served):
        with pytest.raises(BusUnavailable, match="port 8001"):
            await add_model(8001, Settings())
    with pytest.raises(BusUnavailable, match="port 8000"):
        await add_model(PORT, Settings())


async def test_a_stack_without_a_gateway_has_no_socket(folder: Path) -> None:
    async with control_socket(None, served):
        assert not os.listdir(folder)


async def until_cancelled(began: asyncio.Event, ended: asyncio.Event) -> str:
    began.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()
    return ""


@pytest.mark.parametrize("ends", ["command", "stack"])
async def test_a_model_is_not_added_when_the_command_or_the_stack_ends(ends: str) -> None:
    began, ended = asyncio.Event(), asyncio.Event()
    add: Callable[[Settings], asyncio.Future[str]] = lambda _: asyncio.ensure_future(until_cancelled(began, ended))  # noqa: E731
    async with asyncio.timeout(PATIENCE):
        async with control_socket(PORT, add):
            command = asyncio.create_task(add_model(PORT, Settings()))
            await began.wait()
            if ends == "command":
                command.cancel()
                await ended.wait()
        await ended.wait()
        await asyncio.wait({command})
    assert command.cancelled() or isinstance(command.exception(), BusUnavailable)


async def test_a_socket_in_a_folder_of_others_is_not_used(folder: Path) -> None:
    async with control_socket(PORT, served):
        (name,) = os.listdir(folder)
        (folder / name).chmod(0o777)
        with pytest.raises(ConfigurationError, match="only its owner"):
            await add_model(PORT, Settings())
    async with control_socket(PORT, served):
        assert not os.listdir(folder / name)
