"""HTTP over TLS: the server's certificate, and those of clients."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
import trustme
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.bench._common.event_stream import post
from pagewire.services.gateway.http import http_protocol, server
from pagewire.services.gateway.http.http_protocol import ConnectionLimits, Connections
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.listener import listen
from pagewire.shared.settings.config import Settings
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Files:
    """Certificates on disk."""

    authority: trustme.CA
    settings: Settings
    """With the server's certificate and its key."""
    authority_file: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(folder / "cert.pem", append=True)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    settings = Settings(ssl_certfile=str(folder / "cert.pem"), ssl_keyfile=str(folder / "key.pem"))
    return Files(authority, settings, str(folder / "ca.pem"))


async def scheme(scope: Scope, receive: Receive, send: Send) -> None:
    answer = Response(f"data: {msgspec.json.encode({'scheme': scope['scheme']}).decode()}\n\n")
    await answer(scope, receive, send)


@asynccontextmanager
async def serving(settings: Settings, limits: ConnectionLimits | None = None) -> AsyncIterator[tuple[str, Connections]]:
    listener = listen("127.0.0.1", 0)
    connections = Connections(limits or ConnectionLimits())
    task = asyncio.create_task(server.Server(scheme, listener, connections, server.tls_context(settings)).run())
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}/", connections
    finally:
        task.cancel()
        await asyncio.wait({task})


def trusting(files: Files) -> ssl.SSLContext:
    context = ssl.create_default_context()
    files.authority.configure_trust(context)
    return context


async def test_a_client_that_trusts_the_authority_is_served(files: Files) -> None:
    async with serving(files.settings) as (url, connections), httpx.AsyncClient(verify=trusting(files)) as client:
        for _ in range(3):
            assert "https" in (await client.get(url)).text
        assert len(connections.open) == 1
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(url)


async def test_clients_of_the_benchmarks_take_https_urls(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", files.authority_file)
    async with serving(files.settings) as (url, _):
        assert [event async for event in post(url, {}, api_key="key")] == [{"scheme": "https"}]


async def test_only_clients_of_a_trusted_authority_are_served(files: Files) -> None:
    settings = msgspec.structs.replace(files.settings, ssl_ca_certs=files.authority_file)
    trusted, unknown = trusting(files), trusting(files)
    files.authority.issue_cert("client@example.org").configure_cert(trusted)
    trustme.CA().issue_cert("client@example.org").configure_cert(unknown)
    async with serving(settings) as (url, _):
        async with httpx.AsyncClient(verify=trusted) as client:
            assert (await client.get(url)).status_code == 200
        for context in (trusting(files), unknown):
            async with httpx.AsyncClient(verify=context) as client:
                with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                    await client.get(url)


async def test_a_handshake_that_takes_too_long_is_cut_off(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "CHECK_INTERVAL", 0.01)
    async with serving(files.settings, ConnectionLimits(header_time=0.2, close_time=0.2)) as (url, connections):
        port = int(url.rstrip("/").rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01")
        assert await reader.read() == b""
        writer.close()
        # Behind the handshake the same limits hold as without TLS.
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(files))
        writer.write(b"GET / HT")
        assert (await reader.read(12)) == b"HTTP/1.1 408"
        writer.close()
        await until(lambda: not connections.open)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ssl_certfile": ""}, "need --ssl-certfile"),
        ({"ssl_certfile": "/nowhere.pem"}, "/nowhere.pem"),
        ({"ssl_keyfile": __file__}, "test_tls.py"),
        ({"ssl_keyfile": ""}, "cert.pem"),
        ({"ssl_ca_certs": __file__}, "test_tls.py"),
        ({"ssl_ca_certs": "/nowhere.pem"}, "No such file"),
    ],
)
def test_unusable_tls_files_are_refused(files: Files, change: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        server.tls_context(msgspec.structs.replace(files.settings, **change))


def test_a_key_with_a_passphrase_is_refused(files: Files, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    plain = Path(files.settings.ssl_keyfile).read_text()
    key.write_text(plain.replace("-----\n", "-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\n", 1))
    with pytest.raises(ConfigurationError, match="cannot be used"):
        server.tls_context(msgspec.structs.replace(files.settings, ssl_keyfile=str(key)))
