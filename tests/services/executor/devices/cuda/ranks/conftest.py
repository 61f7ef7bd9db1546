"""The ranks are processes without GPUs."""

from collections.abc import Iterator

import pytest

from tests.support.interpreted import interpreted


@pytest.fixture(scope="module", autouse=True)
def no_gpus() -> Iterator[None]:
    with interpreted():
        yield
