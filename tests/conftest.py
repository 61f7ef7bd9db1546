"""For every test: quiet threads, and logging as if nothing had been logged before."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

# The tests and the services that they start share two cores already.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def fresh_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A logger that was cached in one test would ignore the configuration of the next."""
    configure = structlog.configure

    def uncached(**options: Any) -> None:
        configure(**options | {"cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    structlog.reset_defaults()


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"
