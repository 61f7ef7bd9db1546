"""TLS with a NATS server: the server proves who it is, and so does the client where the server wants it."""

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pagewire import AsyncClient
from pagewire.embedded.broker import find_server
from pagewire.shared.bus import nats
from pagewire.shared.errors import BusUnavailable, ConfigurationError, Unavailable
from pagewire.shared.security import credentials
from pagewire.shared.settings.config import Settings
from tests.support.certificates import Authority, Identity
from tests.support.waiting import PATIENCE
from tests.support.wire import FakeServer

pytestmark = pytest.mark.anyio


@contextmanager
def server(folder: Path, identity: Identity, ca: Path | None = None) -> Iterator[str]:
    """A server with TLS; with `ca` it wants a certificate of its clients. Gives host and port."""
    tls = {"cert_file": str(identity.certificate), "key_file": str(identity.key)}
    if ca is not None:
        tls |= {"ca_file": str(ca), "verify": True}  # type: ignore[dict-item]
    config, log = folder / "nats.conf", folder / "log"
    store = {"store_dir": str(folder / "store")}
    config.write_text(json.dumps({"host": "127.0.0.1", "port": -1, "tls": tls, "jetstream": store}))
    with log.open("w") as output, subprocess.Popen([find_server(), "--config", config], stderr=output) as process:
        try:
            while (match := re.search(r"Listening for client connections on .*:(\d+)", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                time.sleep(0.01)
            yield f"127.0.0.1:{match[1]}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mutual"])
def address(request: pytest.FixtureRequest, folder: Path, authority: Authority) -> Iterator[str]:
    with ExitStack() as stack:
        here = folder / str(request.param)
        here.mkdir()
        yield stack.enter_context(server(here, authority.issue("127.0.0.1"), authority.file if request.param else None))


def settings(authority: Authority, identity: Identity | None = None) -> Settings:
    if identity is None:
        return Settings(nats_tls_ca=str(authority.file))
    return Settings(
        nats_tls_ca=str(authority.file), nats_tls_cert=str(identity.certificate), nats_tls_key=str(identity.key)
    )


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_service_connects_over_tls_and_stores(address: str, authority: Authority, scheme: str) -> None:
    tls = credentials.tls(settings(authority, authority.issue("service")))
    bus = await nats.connect(f"{scheme}://{address}", name="test", create_streams=True, tls=tls)
    await bus.store.check()
    await bus.close()


async def test_a_client_connects_over_tls(address: str, authority: Authority) -> None:
    tls = credentials.tls(settings(authority, authority.issue("client")))
    async with AsyncClient(f"tls://{address}", tls=tls) as client:
        with pytest.raises(Unavailable, match="no tokenizer"):
            await client.models()


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_server_of_another_authority_is_refused(address: str, folder: Path, scheme: str) -> None:
    for tls in (credentials.tls(settings(Authority(folder, "other"))), None):
        with pytest.raises(
            ConfigurationError, match=r"no TLS with the NATS server at 127\.0\.0\.1:\d+: .*verify failed"
        ):
            await nats.connect(f"{scheme}://{address}", name="test", tls=tls)


async def test_a_server_with_another_name_is_refused(folder: Path, authority: Authority) -> None:
    here = folder / "name"
    here.mkdir()
    with (
        server(here, authority.issue("elsewhere.example")) as address,
        pytest.raises(ConfigurationError, match="IP address mismatch"),
    ):
        await nats.connect(f"tls://{address}", name="test", tls=credentials.tls(settings(authority)))


async def test_a_server_that_wants_a_certificate_gets_one_or_refuses(folder: Path, authority: Authority) -> None:
    here = folder / "wants"
    here.mkdir()
    stranger = Authority(here, "stranger").issue("service")
    with server(here, authority.issue("127.0.0.1"), authority.file) as address:
        for identity in (None, stranger):
            # The server refuses it after the client's own handshake, so what is seen of it depends on the moment.
            with pytest.raises((BusUnavailable, ConfigurationError), match=r"certificate|unknown ca"):
                await nats.connect(f"tls://{address}", name="test", tls=credentials.tls(settings(authority, identity)))


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_no_password_goes_to_a_server_without_tls(authority: Authority, scheme: str) -> None:
    """Somebody between could take out what the server says of TLS."""
    tls = credentials.tls(settings(authority))
    async with FakeServer() as wire, asyncio.timeout(PATIENCE):
        address = wire.url.removeprefix("nats://")
        for context in (tls, None) if scheme == "tls" else (tls,):
            with pytest.raises(ConfigurationError, match="the server does not offer it"):
                await nats.connect(f"{scheme}://{address}", name="test", user="u", password="secret", tls=context)
        assert wire.commands == []


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, authority: Authority) -> None:
    identity = authority.issue("service")
    empty = tmp_path / "empty"
    empty.touch()
    for wrong, reason in [
        (Settings(nats_tls_cert=str(identity.certificate)), "belong together"),
        (Settings(nats_tls_key=str(identity.key)), "belong together"),
        (Settings(nats_tls_ca=str(tmp_path / "none")), "nats-tls-ca .*No such file"),
        (Settings(nats_tls_ca=str(empty)), "nats-tls-ca"),
        (Settings(nats_tls_cert=str(empty), nats_tls_key=str(identity.key)), "nats-tls-cert"),
        (Settings(nats_tls_cert=str(identity.certificate), nats_tls_key=str(authority.file)), "nats-tls-key"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            credentials.tls(wrong)
    assert credentials.tls(Settings()) is None
