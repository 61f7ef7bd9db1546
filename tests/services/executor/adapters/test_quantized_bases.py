"""Adapters over integer weights give the logits of float32 weights into which they are merged, but for rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import Targets, targets_of
from pagewire.services.executor.models.registry import build_model
from pagewire.shared.models.model_folder import read_config
from tests.services.executor.devices.cpu.test_weight_packing import ROUNDED, difference
from tests.support.checkpoints import checkpoint
from tests.support.device import Driver, Row
from tests.support.gguf_files import random_model

IDS = torch.randint(512, (60,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def adapter_of(targets: Targets, rank: int = 16) -> Adapter:
    """A random adapter of every product."""
    random = torch.Generator().manual_seed(0)
    updates: dict[str, list[LowRank]] = {}
    for target in targets.products.values():
        shrink = torch.randn(rank, target.inputs, generator=random) * target.inputs**-0.5
        expand = torch.randn(target.outputs, rank, generator=random) * rank**-0.5
        updates.setdefault(target.path, []).append(LowRank(shrink, expand, target.first, 0.5))
    return Adapter(updates)


def targets(path: Path) -> Targets:
    config = read_config(path)
    return targets_of(build_model(config), tuple(config["architectures"]))


def adapted(path: Path, **options: Any) -> Tensor:
    """Logits behind `IDS` of weights in integers, with the adapter."""
    driver = Driver(path, adapters=True, **options)
    assert driver.adapters is not None
    driver.add(0, len(IDS))
    loaded = SequenceAdapter()
    loaded.put(driver.adapters.pack(adapter_of(targets(path))))
    driver.adapters.assign(0, loaded)
    driver.step(Row(0, 0, IDS))
    return driver.logits.clone()


def merged(path: Path, adapter: Adapter) -> Tensor:
    """Logits behind `IDS` of weights in float32, into which the adapter is merged by hand."""
    driver = Driver(path, compiled=False)
    with torch.no_grad():
        for module, updates in adapter.updates.items():
            weight = driver.model.get_submodule(module).weight
            assert isinstance(weight, Tensor)
            for one in updates:
                weight[one.first : one.first + len(one.expand)] += one.scale * one.expand @ one.shrink
    driver.add(0, len(IDS))
    driver.step(Row(0, 0, IDS))
    return driver.logits.clone()


def check(path: Path, **options: Any) -> None:
    logits = adapted(path, **options)
    assert 0 < difference(logits, merged(path, adapter_of(targets(path)))) < ROUNDED
    assert difference(logits, merged(path, Adapter({}))) > 3 * ROUNDED, "the adapter changes much more than rounding"


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_gguf_file_stay_packed_beside_an_adapter(tmp_path: Path, kind: str) -> None:
    check(random_model(tmp_path / "model.gguf", "llama", kind), packed=True)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_that_are_rounded_to_eight_bits(name: str) -> None:
    check(checkpoint(name), bits=8)
