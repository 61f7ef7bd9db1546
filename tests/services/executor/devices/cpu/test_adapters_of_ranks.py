"""Ranks that each have a part of every adapter compute what one rank computes with the whole ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.collectives import SharedMemoryCollectives
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.adapters.cut import cut_adapter
from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.services.executor.adapters.targets import served_targets
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.devices.protocol import Capacity, StepBatch
from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.shard import ALONE, Shard
from pagewire.shared.adapters.files import read_files
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.sampling_parameters import record
from tests.support.adapters import FAMILY_TARGETS, TARGETS, write_adapter
from tests.support.checkpoints import CONTEXT, VOCABULARY, checkpoint
from tests.support.shared_ranks import on_each, shared_ranks

BLOCK = 8
LENGTH = 11
RANKS = (4, 24, 16)
"""Ranks of the adapters; the last changes attention alone."""
FAMILIES = ["llama", "llama-biased", "qwen3", "gemma3", "phi3", "gpt2", "gpt-neox", "opt", "olmo2", "qwen3-moe"]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(build.load(), 1)


def folders(root: Path, name: str) -> list[Path | None]:
    """No adapter, then each, and the first of them again."""
    targets = FAMILY_TARGETS.get(name, TARGETS)
    written = [
        write_adapter(
            root / str(rank),
            checkpoint(name),
            rank=rank,
            targets=targets[:2] if rank == RANKS[-1] else targets,
            seed=rank,
        )
        for rank in RANKS
    ]
    return [None, *written, written[0]]


def compute(
    name: str,
    kernels: CpuKernels,
    adapters: Sequence[Path | None],
    bits: int | None = None,
    ranks: SharedMemoryCollectives | None = None,
) -> Tensor:
    """The logits of a row per adapter, in steps that all of them share: a chunk of a prompt, then a token."""
    shard = ALONE if ranks is None else Shard(ranks.rank, ranks.size)
    config, packing = read_config(checkpoint(name)), CpuPacking(kernels, bits) if bits else None
    plain = load_model(checkpoint(name), config, "float32", packing, None, shard, ranks)
    targets, part = served_targets(plain, config), plain.part
    model = CompiledLM(plain, kernels, CONTEXT)
    windows, rows, entries = model.spec.groups.windows, len(adapters), -(-LENGTH // BLOCK)
    capacity = Capacity(rows * entries * len(windows), BLOCK, rows, CONTEXT, VOCABULARY, windows=windows)
    own, slots = CpuAdapters(kernels, targets, model.numbers, torch.float32), CpuSlots(capacity)
    backend = CompiledBackend(kernels, model.spec, capacity, torch.float32, own)
    loaded: dict[Path, SequenceAdapter] = {}
    for slot, folder in enumerate(adapters):
        blocks = range(slot * entries * len(windows), (slot + 1) * entries * len(windows))
        slots.add(slot, blocks, record(), (), None)
        if folder is not None:
            if folder not in loaded:
                adapter = read_adapter(read_files(folder), targets, 64)
                loaded[folder] = SequenceAdapter()
                loaded[folder].put(own.pack(adapter if part is None else cut_adapter(adapter, part)))
            own.assign(slot, loaded[folder])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows, LENGTH))
    hidden = []
    with torch.inference_mode():
        for first, count in ((0, LENGTH - 1), (LENGTH - 1, 1)):
            number = np.arange(rows)
            tokens = ids[:, first : first + count].ravel()
            batch = StepBatch(number, 0 * number + first, 0 * number + count, tokens, np.ones(rows, np.bool_))
            attend = backend.attention(batch, slots)
            hidden.append(model.forward(torch.from_numpy(tokens), torch.from_numpy(batch.positions), attend))
        return model.logits(torch.cat(hidden)).clone()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_several_ranks_give_the_logits_of_one_with_a_mix_of_adapters(
    kernels: CpuKernels, name: str, size: int, tmp_path: Path
) -> None:
    adapters = folders(tmp_path, name)
    expected = compute(name, kernels, adapters)
    assert (expected - compute(name, kernels, [None] * len(adapters))).abs().max() > 0.1
    for logits in on_each(shared_ranks(kernels, size), lambda ranks: compute(name, kernels, adapters, None, ranks)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(dim=1), expected.argmax(dim=1))


@pytest.mark.parametrize("bits", [8, 4])
def test_parts_of_adapters_fit_parts_of_integer_weights(kernels: CpuKernels, bits: int, tmp_path: Path) -> None:
    """These are cut between groups of 32 inputs, and each rank rounds its own inputs to eight bits."""
    adapters = folders(tmp_path, "llama")
    expected = compute("llama", kernels, adapters, bits)
    effect = (expected - compute("llama", kernels, [None] * len(adapters), bits)).abs().mean()
    for logits in on_each(shared_ranks(kernels, 2), lambda ranks: compute("llama", kernels, adapters, bits, ranks)):
        assert (logits - expected).abs().mean() < 0.05 * effect
