"""The compiled layers of all ranks together compute what one rank computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.collectives import SharedMemoryCollectives
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.shard import ALONE, Shard
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.sampling_parameters import NOT_FINITE, record
from tests.support.checkpoints import CONFIGS, CONTEXT, VOCABULARY, checkpoint
from tests.support.shared_ranks import on_each, shared_ranks

BLOCK = 8
LENGTH = 21


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(build.load(), 1)


class Result(NamedTuple):
    hidden: Tensor
    logits: Tensor
    best: Int64 | None
    fused: bool


def compute(
    folder: Path, kernels: CpuKernels, chunks: Sequence[int], ranks: SharedMemoryCollectives | None = None
) -> Result:
    """The hidden states and logits of a text that is computed in chunks."""
    shard = ALONE if ranks is None else Shard(ranks.rank, ranks.size)
    plain = load_model(folder, read_config(folder), "float32", None, None, shard, ranks)
    model = CompiledLM(plain, kernels, CONTEXT)
    windows = model.spec.groups.windows
    entries = -(-CONTEXT // BLOCK)
    capacity = Capacity(entries * len(windows), BLOCK, 1, CONTEXT, VOCABULARY, windows=windows)
    backend, slots = CompiledBackend(kernels, model.spec, capacity, torch.float32), CpuSlots(capacity)
    slots.add(0, range(entries * len(windows)), record(), (), None)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, LENGTH)
    hidden, first = [], 0
    with torch.inference_mode():
        for chunk in chunks:
            slot, computed, length = (np.array([number]) for number in (0, first, chunk))
            batch = StepBatch(slot, computed, length, ids[first : first + chunk], np.ones(1, np.bool_))
            attend = backend.attention(batch, slots)
            positions = torch.from_numpy(batch.positions)
            hidden.append(model.forward(torch.from_numpy(batch.token_ids), positions, attend))
            first += chunk
        states = torch.cat(hidden)
        best = model.argmax(states)
        return Result(states, model.logits(states).clone(), best, fused=model.decoder is not None)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_compute_the_logits_of_one_rank(kernels: CpuKernels, name: str, size: int) -> None:
    folder, chunks = checkpoint(name), (13, 7, 1)
    expected = compute(folder, kernels, chunks)
    results = on_each(shared_ranks(kernels, size), lambda rank: compute(folder, kernels, chunks, rank))
    for result in results:
        assert result.fused != name.startswith("opt")
        torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-4)
        if read_config(folder).get("final_logit_softcapping"):  # equal logits may come of different ones
            assert result.best is None
        else:
            assert result.best is not None
            assert np.array_equal(result.best, result.logits.argmax(dim=1).numpy())
        assert torch.equal(result.hidden, results[0].hidden)  # in every bit
        assert torch.equal(result.logits, results[0].logits)


def test_a_hidden_state_that_is_not_finite_has_no_best_id(kernels: CpuKernels) -> None:
    folder = checkpoint("llama")

    def best(rank: SharedMemoryCollectives) -> Int64 | None:
        plain = load_model(folder, read_config(folder), "float32", None, None, Shard(rank.rank, rank.size), rank)
        model = CompiledLM(plain, kernels, CONTEXT)
        hidden = torch.ones(2, model.head.weights.inputs)
        hidden[1] = torch.nan
        with torch.inference_mode():
            return model.argmax(hidden)

    for ids in on_each(shared_ranks(kernels, 2), best):
        assert ids is not None
        assert ids[0] >= 0
        assert ids[1] == NOT_FINITE
