"""Top log-probabilities against a sort of the whole row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import top_logprobs
from tests.kernels.batches import DEVICE, assert_close, int32


def check(logits: torch.Tensor, tokens: list[int], most: int) -> torch.Tensor:
    rows = len(logits)
    top_ids = torch.full((rows, most), -1, dtype=torch.int32, device=DEVICE)
    top = torch.full((rows, most), torch.nan, device=DEVICE)
    chosen = torch.full((rows,), torch.nan, device=DEVICE)
    top_logprobs.top_logprobs(logits, int32(tokens), top_ids, top, chosen)
    ids, expected, expected_chosen = top_logprobs.reference(logits.cpu(), torch.tensor(tokens), most)
    assert top_ids.tolist() == ids.tolist()
    assert_close(top, expected, torch.float32)
    assert_close(chosen, expected_chosen, torch.float32)
    return top_ids


def normal(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4).to(DEVICE)


def test_several_tiles() -> None:
    check(normal(2, 2 * top_logprobs.TILE + 9), [3, 5000], 5)


def test_equal_logits_come_in_the_order_of_ids() -> None:
    assert check(torch.zeros(1, 50, device=DEVICE), [4], 6)[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_bfloat16_and_rows_without_a_token() -> None:
    check(torch.arange(64.0, device=DEVICE).roll(7).bfloat16()[None], [-1], 3)


def test_rows_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_logprobs, "SLICE", 2)
    check(normal(5, 70), [1, 2, 3, 4, 5], 2)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.integers(5, 300), st.integers(1, 5), st.integers(0, 99))
def test_any_shape(rows: int, vocabulary: int, most: int, seed: int) -> None:
    check(normal(rows, vocabulary, seed), [seed % vocabulary] * rows, most)
