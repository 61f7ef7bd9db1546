"""Adapters on the GPU device give the tokens that they give on the CPU, in whatever mix and place."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels.triton.layers.low_rank import ROWS, most_tiles
from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.services.executor.devices.cuda.adapters import gather
from pagewire.services.executor.devices.protocol import AdapterSlots
from pagewire.shared.adapters.files import read_files
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.sampling_parameters import record
from tests.services.executor.devices.cuda.twins import GREEDY, Host, Text, batch_of, compiled_device, cuda_device
from tests.support.adapters import FAMILY_TARGETS, TARGETS, write_adapter
from tests.support.checkpoints import VOCABULARY, checkpoint

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
RANKS = (4, 24, 64)


def folders(root: Path, name: str) -> list[Path | None]:
    """No adapter, then one of each rank; the first of them changes attention alone."""
    targets = FAMILY_TARGETS.get(name, TARGETS)
    written: list[Path | None] = [None]
    for rank in RANKS:
        own = targets[:2] if rank == RANKS[0] else targets
        path = root / str(rank)
        written.append(write_adapter(path, checkpoint(name), rank=rank, alpha=4 * rank, targets=own, seed=rank))
    return written


def texts(adapters: list[Path | None], count: int, most: int) -> list[Text]:
    """Texts that begin alike, and so would differ in nothing without their adapters."""
    random = torch.Generator().manual_seed(3)
    prompt = torch.randint(VOCABULARY, (18,), generator=random).tolist()
    owned = [adapters[index % len(adapters)] for index in range(count)]
    return [Text(prompt[: 18 - index // 4], 18 - index // 4 + most, adapter=own) for index, own in enumerate(owned)]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen3", "gpt2", "phi3", "gpt-neox", "opt", "qwen3-moe")
        ),
    ],
)
def test_tokens_equal_the_cpus(name: str, tmp_path: Path) -> None:
    adapters = folders(tmp_path, name)
    expected = Host(compiled_device(name), seed=1, preempt=0).run(texts(adapters, 4, 3))
    assert len({tuple(tokens) for tokens in expected}) == len(adapters)
    device = cuda_device(name, captured=False, max_loras=len(RANKS))
    assert Host(device, seed=2, preempt=0.15).run(texts(adapters, 4, 3)) == expected


@pytest.mark.full
def test_tokens_equal_the_cpus_in_longer_runs_of_captured_steps(tmp_path: Path) -> None:
    adapters = folders(tmp_path, "llama")
    expected = Host(compiled_device("llama"), seed=1, preempt=0).run(texts(adapters, 10, 8))
    assert Host(cuda_device("llama", max_loras=len(RANKS)), seed=2).run(texts(adapters, 10, 8)) == expected


def put(adapters: AdapterSlots, slot: int, folder: Path) -> None:
    loaded = SequenceAdapter()
    loaded.put(adapters.pack(read_adapter(read_files(folder), adapters.targets, 64)))
    adapters.assign(slot, loaded)


def test_more_adapters_than_places_take_turns(tmp_path: Path) -> None:
    """One after the other in one place, then a step without any, in graphs that all read the same memory."""
    prompt = [7, 300, 41, 5, 88]
    tokens = []
    for device in (compiled_device("llama"), cuda_device("llama", captured=False, max_loras=1)):
        slots = device.adapters
        assert slots is not None
        sampled = []
        for turn in range(3):
            for folder in folders(tmp_path, "llama"):
                device.add(0, [9 + turn], record(num_logprobs=1))
                if folder is not None:
                    put(slots, 0, folder)
                step = device.launch(batch_of((0, 0, prompt[turn:], True)))
                step.wait()
                assert step.logprobs is not None
                sampled.append(step.logprobs.values)
                device.remove(0)
                if folder is not None:
                    slots.clear(0)
        tokens.append(np.concatenate(sampled))
    cpu, cuda = tokens
    np.testing.assert_allclose(cuda, cpu, atol=1e-4)
    assert len(np.unique(cpu.round(4))) == len(cpu), "each adapter has its effect"


def test_a_step_with_more_adapters_than_places_is_refused(tmp_path: Path) -> None:
    device = cuda_device("llama", captured=False, max_loras=1)
    assert device.adapters is not None
    for slot, folder in enumerate(folders(tmp_path, "llama")[1:3]):
        assert folder is not None
        device.add(slot, [slot], GREEDY)
        put(device.adapters, slot, folder)
    with pytest.raises(ConfigurationError, match="2 adapters, and there is room for 1: give max-loras"):
        device.launch(batch_of((0, 0, [7], True), (1, 0, [8], True)))


def test_a_step_larger_than_any_graph_leaves_the_graphs_inputs_valid(tmp_path: Path) -> None:
    prompt, folder = [7, 300, 41, 5, 88, 17, 3, 99, 12, 64], folders(tmp_path, "llama")[2]
    assert folder is not None
    device = cuda_device("llama", captured=False, max_loras=2)
    assert device.adapters is not None
    device.add(0, [3], GREEDY)
    alone = device.launch(batch_of((0, 0, prompt[:4], True))).wait().tolist()
    device.add(1, [4], GREEDY)
    put(device.adapters, 1, folder)
    device.launch(batch_of((1, 0, prompt[:4], True))).wait()
    device.add(2, [5], GREEDY)
    device.launch(batch_of((2, 0, prompt, True))).wait()
    device.add(0, [3], GREEDY)
    assert device.launch(batch_of((0, 0, prompt[:4], True))).wait().tolist() == alone


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=70))
def test_each_token_with_an_adapter_is_in_one_tile_of_it(places: list[int]) -> None:
    tiles, tokens = gather(np.array(places, np.int64), most_tiles(len(places), 6))
    adapter_of = [-1] * len(places)
    for place, begin, end in tiles.tolist():
        assert (place < 0) or 0 < end - begin <= ROWS
        for token in tokens[begin:end].tolist() if place >= 0 else ():
            assert adapter_of[token] == -1
            adapter_of[token] = place
    assert adapter_of == places
