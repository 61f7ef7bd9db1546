"""One browser and one scripted server for the tests of a module, and a fresh profile for each test."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.console.browser import Console, chromium, opened
from tests.console.scripted_server import Model, ScriptedServer, scripted_server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def module_server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(module_server: ScriptedServer) -> ScriptedServer:
    """The server of the module, with a model as new."""
    module_server.model.__init__()  # type: ignore[misc]
    module_server.gateway.responder.chat_format = None
    return module_server


@pytest.fixture
def model(server: ScriptedServer) -> Model:
    return server.model


@pytest.fixture
def view(browser: Browser, server: ScriptedServer) -> Iterator[Console]:
    """The console of the server, opened. What it does wrong fails the test."""
    with opened(browser, server.url, "document.querySelector('pw-settings select')?.value === 'tiny'") as page:
        yield page
