"""Loading adapters off the step loop: what sequences see of an adapter that cannot be had."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typing_extensions import override

from pagewire.services.executor.adapter_loader import AdapterLoader
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import targets_of
from pagewire.services.executor.devices.protocol import AdapterSlots, LoadedAdapter
from pagewire.services.executor.models.registry import build_model
from pagewire.shared.adapters.files import AdapterFiles, read_files
from pagewire.shared.errors import ConfigurationError, DeviceLost
from pagewire.shared.models.model_folder import read_config
from tests.support.adapters import write_adapter
from tests.support.checkpoints import checkpoint
from tests.support.waiting import PATIENCE


class Failing(AdapterSlots):
    """Slots of a device that packs no adapter."""

    def __init__(self, error: Exception) -> None:
        self.targets = targets_of(build_model(read_config(checkpoint("llama"))))
        self.error = error
        self.tried = threading.Event()

    @override
    def pack(self, adapter: Adapter) -> Adapter:
        self.tried.set()
        raise self.error

    @override
    def assign(self, slot: int, adapter: LoadedAdapter) -> None:
        """Does nothing."""

    @override
    def clear(self, slot: int) -> None:
        """Does nothing."""


class Packing(Failing):
    """Slots of a device that packs adapters as they are."""

    @override
    def pack(self, adapter: Adapter) -> Adapter:
        return adapter


@contextmanager
def loading(slots: Failing, folder: Path) -> Iterator[AdapterLoader]:
    files = read_files(write_adapter(folder, checkpoint("llama")))
    loader = AdapterLoader(slots, lambda _: files, max_rank=64, kept=1)
    yield loader
    loader._thread.shutdown()


@pytest.mark.parametrize("error", [ConfigurationError("rank 1 cannot hold the adapter"), MemoryError(), ValueError()])
def test_an_adapter_that_cannot_be_packed_is_lost_to_its_sequences(error: Exception, tmp_path: Path) -> None:
    over = threading.Event()
    with loading(Failing(error), tmp_path) as loader:
        adapter = loader.load("a", over.set)
        assert adapter.ready or over.wait(PATIENCE)
        assert adapter.lost


def test_no_sequence_fails_with_a_rank_that_is_lost_while_it_loads(tmp_path: Path) -> None:
    """The executor ends, and another one runs the sequence."""
    slots = Failing(DeviceLost())
    with loading(slots, tmp_path) as loader:
        adapter = loader.load("a", lambda: None)
        assert slots.tried.wait(PATIENCE)
    assert not adapter.ready


def test_an_adapter_in_use_is_not_loaded_again(tmp_path: Path) -> None:
    """A GPU has a place for each adapter of a step: two copies of one would take two."""
    with loading(Packing(ValueError()), tmp_path) as loader:
        running = loader.load("a", lambda: None)
        loader.load("b", lambda: None)
        assert loader.load("a", lambda: None) is running


def test_an_adapter_that_no_sequence_waits_for_any_more_is_not_fetched(tmp_path: Path) -> None:
    """The broker has a minute for each part of one."""
    files = read_files(write_adapter(tmp_path, checkpoint("llama")))
    fetched: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def fetch(digest: str) -> AdapterFiles:
        fetched.append(digest)
        begun.set()
        assert go_on.wait(PATIENCE)
        return files

    loader = AdapterLoader(Packing(ValueError()), fetch, max_rank=64, kept=3)
    loader.load("a", lambda: None)
    assert begun.wait(PATIENCE)
    gone, shared = loader.load("b", lambda: None), loader.load("c", lambda: None)
    loader.load("c", lambda: None)
    gone.forget()
    shared.forget()
    go_on.set()
    loader._thread.shutdown()
    assert fetched == ["a", "c"]
    assert gone.lost
    assert not shared.lost
