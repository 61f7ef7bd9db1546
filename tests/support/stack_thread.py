"""A stack for tests that block: its supervisor runs on a thread of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.client.sync import LoopThread
from pagewire.embedded.stack import Stack
from pagewire.shared.settings.config import Settings


@contextmanager
def stack_url(settings: Settings) -> Iterator[str]:
    """Runs a stack, and gives the URL of its gateway."""
    thread = LoopThread()
    stack = Stack(settings)
    thread.run(stack.__aenter__())
    try:
        yield thread.run(stack.ready()).http
    finally:
        thread.run(stack.__aexit__(None, None, None))
        thread.close()
