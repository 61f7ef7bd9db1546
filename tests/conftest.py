"""For every test: quiet threads, and logging as if nothing had been logged before."""

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from xdist.scheduler import LoadScopeScheduling

from pagewire import AsyncClient
from pagewire.shared.process import device_choice
from tests.support.progress import Progress
from tests.support.waiting import PATIENCE

# The tests and the services that they start share two cores already.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests do the same on a machine with a GPU; those that need it name it.
os.environ["PAGEWIRE_DEVICE"] = "cpu"
device_choice.DRIVER_FILES = ()


class Scheduler(LoadScopeScheduling):  # type: ignore[misc]  # its package has no types
    """Gives workers one test at a time, but a module whose tests share a fixture as a whole: it is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _shares(Path(str(self.config.rootpath), file)) else nodeid


@functools.cache
def _shares(file: Path) -> bool:
    return 'scope="module"' in file.read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    """Chooses how tests are divided among workers; `--dist` only says that they are."""
    return Scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest tests first, each part in random order: no worker is left with one of them at the end."""
    items.sort(key=lambda item: "pipeline" not in item.path.parts)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shows progress, but not in a worker, and gives requests a deadline that no machine is too slow for.

    Imports for the collection of tests leave no garbage to search for.
    """
    defaults = AsyncClient.stream.__kwdefaults__
    assert defaults is not None
    defaults["timeout"] = PATIENCE
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(terminal.write_line))
    gc.disable()


def pytest_collection_finish() -> None:
    """Spares what was imported from every later search, and the first test from the logging that imports configured."""
    structlog.reset_defaults()
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio; those with an async fixture of their module share its loop."""
    return "asyncio"


@pytest.fixture(autouse=True)
def fresh_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A logger that was cached in one test would ignore the configuration of the next."""
    configure = structlog.configure

    def uncached(**options: Any) -> None:
        configure(**options | {"cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    structlog.reset_defaults()
