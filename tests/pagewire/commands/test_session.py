"""Commands use the stack that runs, or one of their own where none does; what fails later is no reason for another."""

import asyncio
import os
import signal
from types import TracebackType
from typing import Any

import pytest

from pagewire.commands import session
from pagewire.shared.errors import BusUnavailable, ConfigurationError, Unavailable
from pagewire.shared.settings.config import Settings

pytestmark = pytest.mark.anyio


class Client:
    """A client of a stack that runs, unless `absent`."""

    def __init__(self, absent: Exception | None = None) -> None:
        self.absent = absent
        self.open = False

    async def __aenter__(self) -> "Client":
        self.open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open = False

    async def models(self) -> list[Any]:
        if self.absent is not None:
            raise self.absent
        return []


class OwnStack(Exception):
    """A stack would be started."""


def with_client(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    def start(*_: object) -> None:
        raise OwnStack

    monkeypatch.setattr(session, "client_of", lambda _: client)
    monkeypatch.setattr(session, "Stack", start)


@pytest.mark.parametrize("error", [Unavailable("the server is stopping"), BusUnavailable("the connection is lost")])
async def test_a_request_that_fails_starts_no_stack(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    client = Client()
    with_client(monkeypatch, client)

    async def command() -> None:
        async with session.connect(Settings()):
            assert client.open
            raise error

    with pytest.raises(type(error), match=str(error)):
        await command()
    assert not client.open


@pytest.mark.parametrize("error", [Unavailable("no tokenizer answers"), BusUnavailable("nobody listens")])
async def test_without_a_stack_one_is_started(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    client = Client(absent=error)
    with_client(monkeypatch, client)
    with pytest.raises(OwnStack):
        async with session.connect(Settings()):
            pass
    assert not client.open
    with pytest.raises(type(error)):
        async with session.connect(Settings(nats_url="nats://127.0.0.1:1")):
            pass


async def test_a_stack_that_needs_a_key_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(_: Settings) -> Settings:
        raise ConfigurationError("it needs a key")

    with_client(monkeypatch, Client())
    monkeypatch.setattr(session, "at_port", refused)
    with pytest.raises(ConfigurationError, match="needs a key"):
        async with session.connect(Settings(port=8101)):
            pass


@pytest.mark.parametrize(("until_stopped", "code"), [(True, 0), (False, 128 + signal.SIGTERM)])
def test_a_signal_is_an_end_only_of_a_command_that_runs_until_it_is_stopped(until_stopped: bool, code: int) -> None:
    async def command() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.get_running_loop().create_future()
        return 0

    assert session.run(command(), Settings(), until_stopped=until_stopped) == code
