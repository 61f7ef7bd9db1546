"""Adapters give the logits of a model into whose weights they are merged, whatever else is in the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import FAMILY_TARGETS, TARGETS, Shape, logits_of, merged, write_adapter
from tests.support.checkpoints import VOCABULARY, checkpoint, reference_logits
from tests.support.device import Driver, Row

LENGTH = 40
FAMILIES = ["llama", "llama-biased", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt-neox", "opt"]
FAMILIES += ["smollm3", "olmo2", "qwen3-moe"]


def text(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def targets_of(family: str) -> list[str]:
    return FAMILY_TARGETS.get(family, TARGETS)


def plain(rank: int, alpha: float = 8.0) -> Shape:
    return lambda _: (rank, alpha / rank)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_merged_weights_logits_for_every_chunk_size(name: str, tmp_path: Path) -> None:
    ids, targets = text(1), targets_of(name)
    folder = write_adapter(tmp_path / "a", checkpoint(name), targets=targets)
    expected = logits_of(merged(checkpoint(name), targets, plain(8), 0), ids)
    assert (expected - reference_logits(checkpoint(name), ids)).abs().max() > 0.1
    for chunk in (1, 7, LENGTH):
        driver = Driver(checkpoint(name), adapters=True)
        driver.add(3, LENGTH)
        driver.adapt(3, folder)
        for start in range(0, LENGTH, chunk):
            part = ids[start : start + chunk]
            driver.step(Row(3, start, part))
            torch.testing.assert_close(driver.logits[0], expected[start + len(part) - 1], rtol=1e-4, atol=1e-4)


def _rank_of(name: str) -> int:
    return 4 if name.endswith("down_proj") else 12 if "layers.1.self_attn.q" in name else 8


CONFIGS: dict[str, tuple[dict[str, Any], Shape]] = {
    "rslora": ({"use_rslora": True}, lambda _: (8, 8 / 8**0.5)),
    "rank_pattern": (
        {"rank_pattern": {"down_proj": 4, r"layers\.1\.self_attn\.q_proj": 12}},
        lambda name: (_rank_of(name), 8 / _rank_of(name)),
    ),
    "alpha_pattern": (
        {"alpha_pattern": {"model.layers.0.self_attn.k_proj": 2, ".*_proj": 32}},
        lambda name: (8, 2 / 8 if name == "model.layers.0.self_attn.k_proj" else 32 / 8),
    ),
    "expression": ({"target_modules": r".*\.(self_attn|mlp)\.[a-z]+_proj"}, plain(8)),
    "layers_to_transform": ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, plain(8)),
    "all-linear": ({"target_modules": "all-linear"}, plain(8)),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, plain(8)),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_every_supported_field_has_its_effect(case: str, tmp_path: Path) -> None:
    config, shape = CONFIGS[case]
    ids = text(2)
    folder = write_adapter(tmp_path / "a", checkpoint("llama"), shape=shape, **config)
    driver = Driver(checkpoint("llama"), adapters=True)
    driver.add(0, LENGTH)
    driver.adapt(0, folder)
    driver.step(Row(0, 0, ids))
    expected = logits_of(merged(checkpoint("llama"), TARGETS, shape, 0), ids)[-1]
    torch.testing.assert_close(driver.logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Shape, int]]:
    """Adapters of ranks 4 to 64."""
    parts = []
    for seed, rank in enumerate((4, 8, 16, 24, 32, 48, 64)):
        path = tmp_path_factory.mktemp("adapters") / str(rank)
        parts.append((write_adapter(path, checkpoint("llama"), rank=rank, seed=seed), plain(rank), seed))
    return parts


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"bits": 4}, {"threads": 3}, {"dtype": "bfloat16"}], ids=str)
def test_the_other_rows_of_a_step_change_no_bit(
    adapters: list[tuple[Path, Shape, int]], options: dict[str, Any]
) -> None:
    """Plain rows and rows of seven adapters, one of which two rows have, decoding and in chunks, against each alone."""
    folders: list[Path | None] = [None, *(folder for folder, _, _ in adapters)]
    ids = [text(seed, 20) for seed in range(len(folders))]

    def driver() -> Driver:
        return Driver(checkpoint("llama"), adapters=True, **options)

    alone = []
    for slot, folder in enumerate(folders):
        one = driver()
        one.add(slot, LENGTH)
        if folder is not None:
            one.adapt(slot, folder)
        one.step(Row(slot, 0, ids[slot][:15]))
        one.step(Row(slot, 15, ids[slot][15:]))
        alone.append(one.logits[0].clone())
    together = driver()
    for slot, folder in enumerate(folders):
        together.add(slot, LENGTH)
        if folder is not None:
            together.adapt(slot, folder)
    together.step(*(Row(slot, 0, ids[slot][:15], samples=False) for slot in range(0, 8, 2)))
    together.step(*(Row(slot, 0, ids[slot][:15], samples=False) for slot in range(1, 8, 2)))
    together.step(*(Row(slot, 15, ids[slot][15:]) for slot in reversed(range(8))))
    for slot, logits in enumerate(reversed(together.logits)):
        assert torch.equal(logits, alone[slot]), slot


def test_a_mix_has_the_logits_of_each_merged_model(adapters: list[tuple[Path, Shape, int]]) -> None:
    driver = Driver(checkpoint("llama"), adapters=True)
    ids = [text(seed, 20) for seed in range(len(adapters))]
    for slot, (folder, _, _) in enumerate(adapters):
        driver.add(slot, LENGTH)
        driver.adapt(slot, folder)
    driver.step(*(Row(slot, 0, ids[slot]) for slot in range(len(adapters))))
    for slot, (_, shape, seed) in enumerate(adapters):
        expected = logits_of(merged(checkpoint("llama"), TARGETS, shape, seed), ids[slot])[-1]
        torch.testing.assert_close(driver.logits[slot], expected, rtol=1e-4, atol=1e-4)


def test_a_slot_that_is_cleared_has_no_adapter(adapters: list[tuple[Path, Shape, int]]) -> None:
    driver = Driver(checkpoint("llama"), adapters=True)
    assert driver.adapters is not None
    driver.add(0, LENGTH)
    driver.adapt(0, adapters[0][0])
    driver.step(Row(0, 0, text(1)))
    driver.adapters.clear(0)
    driver.step(Row(0, 0, text(1)))
    torch.testing.assert_close(
        driver.logits[0], reference_logits(checkpoint("llama"), text(1))[-1], rtol=1e-4, atol=1e-4
    )
