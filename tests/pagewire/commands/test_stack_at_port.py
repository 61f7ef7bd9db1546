import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from pagewire.commands.stack_at_port import at_port
from pagewire.shared.errors import BusUnavailable, ConfigurationError
from pagewire.shared.settings.config import FIELDS, Settings
from tests.support.processes import free_port

pytestmark = pytest.mark.anyio


@contextmanager
def gateway(body: bytes) -> Iterator[int]:
    """An HTTP server that answers everything with these bytes, if the key is right; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer secret" and self.path == "/version"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


async def test_a_port_chooses_the_broker_of_its_stack() -> None:
    with gateway(json.dumps({"version": "1", "nats": "nats://127.0.0.1:5000"}).encode()) as port:
        assert (await at_port(Settings(port=port, api_key="secret"))).nats_url == "nats://127.0.0.1:5000"
        with pytest.raises(ConfigurationError, match="needs a key: set --api-key"):
            await at_port(Settings(port=port))
        with pytest.raises(ConfigurationError, match="takes another key: set --api-key"):
            await at_port(Settings(port=port, api_key="wrong"))


@pytest.mark.parametrize("body", [b"{}", b"<html>", b'{"version": "0.1"}'])
async def test_another_program_on_the_port_is_no_stack(body: bytes) -> None:
    with gateway(body) as port, pytest.raises(BusUnavailable, match=f"127.0.0.1:{port}"):
        await at_port(Settings(port=port, api_key="secret"))


async def test_a_port_without_a_program_is_no_stack() -> None:
    with pytest.raises(BusUnavailable, match="--port"):
        await at_port(Settings(port=free_port(), host="0.0.0.0"))


async def test_the_default_port_needs_no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(b'{"nats": "nats://127.0.0.1:5000"}') as port:
        monkeypatch.setitem(FIELDS, "port", SimpleNamespace(default=port))
        for key, url in (("secret", "nats://127.0.0.1:5000"), ("wrong", "")):
            assert (await at_port(Settings(port=port, api_key=key))).nats_url == url


@pytest.mark.parametrize(
    "settings", [Settings(port=0), Settings(port=1, nats_port=5000), Settings(port=1, nats_url="nats://a")]
)
async def test_without_a_port_or_with_a_broker_nothing_is_asked(settings: Settings) -> None:
    assert await at_port(settings) is settings
