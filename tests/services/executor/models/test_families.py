"""Every family computes what transformers computes."""

import pytest
import torch

from tests.services.executor.conftest import Drive
from tests.support.checkpoints import CONFIGS, CONTEXT, VOCABULARY, checkpoint, reference, reference_logits
from tests.support.device import Row

LENGTH = 72


def text(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 7, LENGTH])
def test_logits_equal_transformers_for_every_chunk_size(drive: Drive, name: str, chunk: int) -> None:
    ids = text(seed=1)
    expected = reference_logits(checkpoint(name), ids)
    driver = drive(checkpoint(name))
    driver.add(3, LENGTH)
    for start in range(0, LENGTH, chunk):
        part = ids[start : start + chunk]
        driver.step(Row(3, start, part))
        torch.testing.assert_close(driver.logits[0], expected[start + len(part) - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_equals_transformers(drive: Drive, name: str) -> None:
    references = [(seed, reference(checkpoint(name), text(seed, 20), 24, ignore_eos=True)) for seed in range(4)]
    driver = drive(checkpoint(name))
    clear = [(seed, expected.tokens) for seed, expected in references if expected.gap > 1e-4]
    assert len(clear) >= 3
    for seed, tokens in clear:
        driver.add(seed, 44)
        assert driver.generate(seed, text(seed, 20), 24, chunk=6) == tokens


def test_the_texts_are_not_degenerate() -> None:
    for name in ("llama", "mistral", "qwen2-sliding"):
        assert len(set(reference(checkpoint(name), text(5, 20), 24, ignore_eos=True).tokens)) > 12


def test_the_last_position_of_the_context_can_be_used(drive: Drive) -> None:
    for name in ("llama-llama3", "opt"):
        ids = text(seed=2, length=CONTEXT)
        driver = drive(checkpoint(name))
        driver.add(0, CONTEXT)
        driver.step(Row(0, 0, ids))
        expected = reference_logits(checkpoint(name), ids)[-1]
        torch.testing.assert_close(driver.logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "opt"])
def test_half_precision_stays_close(drive: Drive, name: str, dtype: str) -> None:
    ids = text(seed=3)
    expected = reference_logits(checkpoint(name), ids)[-1]
    driver = drive(checkpoint(name), dtype="bfloat16" if dtype == "bfloat16" else "float16")
    driver.add(0, LENGTH)
    driver.step(Row(0, 0, ids[:50], samples=False))
    driver.step(Row(0, 50, ids[50:]))
    error = (driver.logits[0] - expected).pow(2).mean().sqrt() / expected.std()
    assert error < (0.08 if dtype == "bfloat16" else 0.01), f"relative error {error:.4f}"
