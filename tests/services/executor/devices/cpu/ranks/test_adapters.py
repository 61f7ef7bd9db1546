"""Adapters of a device of three ranks, whose processes are real, against one of one rank."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.services.executor.adapter_loader import AdapterLoader, SequenceAdapter
from pagewire.services.executor.devices.protocol import Device
from pagewire.shared.adapters.files import AdapterFiles, read_files
from tests.services.executor.devices.cpu.ranks.test_ranked_device import add, opened, sampled, step, text
from tests.support.adapters import write_adapter
from tests.support.checkpoints import checkpoint
from tests.support.waiting import PATIENCE

RANKS = (4, 16, 64)


class Server:
    """A device with the loader of its adapters, as an executor has it."""

    def __init__(self, device: Device, folders: list[Path]) -> None:
        assert device.adapters is not None
        self.device, self.slots = device, device.adapters
        files = {str(number): read_files(folder) for number, folder in enumerate(folders)}
        files["broken"] = AdapterFiles(files["0"].config, files["0"].weights[:-7])
        self.loader = AdapterLoader(self.slots, files.__getitem__, max_rank=64, kept=1)

    def begin(self, slot: int, adapter: str) -> None:
        """A sequence whose adapter is loaded; of an empty name it has none."""
        add(self.device, slot, sampled(num_logprobs=4))
        if adapter:
            loaded = self.load(adapter)
            assert not loaded.lost
            self.slots.assign(slot, loaded)

    def load(self, adapter: str) -> SequenceAdapter:
        """An adapter once it is there, or cannot be had."""
        over = threading.Event()
        loaded = self.loader.load(adapter, over.set)
        assert loaded.ready or over.wait(PATIENCE)
        return loaded

    def values(self, *rows: Any) -> np.ndarray[Any, Any]:
        """The reported log-probabilities of a step."""
        report = step(self.device, *rows).logprobs
        assert report is not None
        return np.stack([report.ids.astype(np.float64), report.values])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """With one rank, and with three."""
    root = tmp_path_factory.mktemp("adapters")
    folders = [write_adapter(root / str(rank), checkpoint("llama"), rank=rank, seed=rank) for rank in RANKS]
    flags: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 64, "max_loras": 4}
    with closing(opened(1, **flags)) as alone, closing(opened(3, **flags)) as ranked:
        both = [Server(alone, folders), Server(ranked, folders)]
        yield both
        for server in both:
            server.loader.close()


def assert_alike(results: list[list[np.ndarray[Any, Any]]]) -> None:
    for expected, values in zip(*results, strict=True):
        np.testing.assert_array_equal(values[0], expected[0])
        np.testing.assert_allclose(values[1], expected[1], atol=1e-4)


def test_rows_with_adapters_and_without_share_steps(servers: list[Server]) -> None:
    results = []
    for server in servers:
        for slot, adapter in enumerate(("0", "", "1", "0")):
            server.begin(slot, adapter)
        values = [server.values(*((slot, 0, text(slot, 9), True) for slot in range(4)))]
        values += [server.values((slot, 9, [4], True), (1, 9, [5], True)) for slot in (0, 2, 3)]
        results.append(values)
        for slot in (0, 2, 3):
            server.slots.clear(slot)
    assert_alike(results)
    first = results[1][0].reshape(2, 4, -1)
    assert not np.allclose(first[1, 0], first[1, 2], atol=1e-2)


def test_adapters_are_loaded_and_replaced_and_freed_between_steps(servers: list[Server]) -> None:
    """One after the other in one slot, of which the loader keeps one."""
    results = []
    for server in servers:
        values = []
        for adapter in ("0", "1", "2", "", "1", "0", "2"):
            server.begin(0, adapter)
            values.append(server.values((0, 0, text(7, 12), True)))
            if adapter:
                server.slots.clear(0)
        results.append(values)
    assert_alike(results)
    marks = [value[1].round(3).tolist() for value in results[1][:4]]
    assert len({tuple(mark) for mark in marks}) == len(marks)
    np.testing.assert_array_equal(results[1][0], results[1][5])


def test_an_adapter_is_loaded_while_steps_run(servers: list[Server]) -> None:
    _, server = servers
    add(server.device, 1, sampled(num_logprobs=4))
    expected = server.values((1, 0, text(3, 6), True))
    loading = [server.loader.load(adapter, lambda: None) for adapter in ("0", "1", "2")]
    while not all(adapter.ready for adapter in loading):
        np.testing.assert_array_equal(server.values((1, 0, text(3, 6), True)), expected)
    assert not any(adapter.lost for adapter in loading)


def test_a_bad_adapter_ends_no_rank(servers: list[Server]) -> None:
    _, server = servers
    assert server.load("broken").lost
    server.begin(0, "2")
    server.values((0, 0, text(7, 12), True))
    server.slots.clear(0)
    assert not server.device.lost
