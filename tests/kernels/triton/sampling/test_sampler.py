"""The sampler picks what the float64 distribution picks, for every filter, tile by tile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.sampling.sampler import TILE, sample
from pagewire.kernels.triton.sampling.sampling_columns import SamplingColumns
from pagewire.shared.sampling_parameters import NOT_FINITE
from tests.kernels.triton.batches import DEVICE, int32
from tests.kernels.triton.references import philox as philox_reference
from tests.kernels.triton.references.sampler import distribution, reference
from tests.kernels.triton.sampling_cases import sampling_columns

VOCABULARY = 2 * TILE + 77


def picked(
    table: SamplingColumns,
    logits: torch.Tensor,
    slots: list[int],
    ends: list[int],
) -> list[int]:
    tokens = torch.full((len(slots),), -7, dtype=torch.int32, device=DEVICE)
    tiles = torch.full((len(slots), 2, -(-logits.shape[1] // TILE)), torch.nan, device=DEVICE)
    sample(table, logits, int32(slots), int32(ends), tiles, tokens)
    result: list[int] = tokens.tolist()
    return result


def check(
    table: SamplingColumns,
    logits: torch.Tensor,
    slots: list[int],
    ends: list[int],
) -> list[int]:
    """Each token is kept, and its share of the cumulative distribution holds the uniform number."""
    tokens = picked(table, logits, slots, ends)
    for row, (slot, end, token) in enumerate(zip(slots, ends, tokens, strict=True)):
        if end < 0:
            assert token == -1
            continue
        if token == NOT_FINITE:
            assert not logits[row].max().isfinite()
            continue
        p = distribution(table, logits[row], slot)
        assert p[token] > 0, "a filtered token was picked"
        reached = p.cumsum(0) / p.sum()
        u = philox_reference.reference(int(table.columns["key"][slot]) & (2**64 - 1), end)
        assert reached[token] >= u - 1e-5
        assert reached[token] - p[token] / p.sum() <= u + 1e-5
    return tokens


def normal(rows: int, scale: float = 3.0, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": VOCABULARY - 1},
    {"top_k": VOCABULARY + 5},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.3, "min_p": 0.01, "top_k": 40, "top_p": 0.8},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_filter_equals_the_reference(filters: dict[str, float]) -> None:
    check(sampling_columns(3, **filters), normal(3), [2, 0, 1], [11, 12, 13])


def test_every_token_equals_the_references() -> None:
    table = sampling_columns(4, temperature=[0.0, 1.0, 0.8, 1.0], top_k=[0, 0, 20, 0], top_p=[1.0, 1.0, 1.0, 0.5])
    logits = normal(4, seed=3)
    slots, ends = int32([0, 1, 2, 3]), int32([5, 5, 5, 5])
    assert picked(table, logits, [0, 1, 2, 3], [5] * 4) == reference(table, logits.cpu(), slots, ends)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCABULARY, device=DEVICE)
    logits[0, [TILE + 3, TILE + 1, 2 * TILE]] = 5.0
    logits[1, 9] = -5.0
    assert picked(sampling_columns(2, temperature=0.0), logits, [0, 1], [1, 1]) == [TILE + 1, 0]


def test_ties_at_the_edge_are_kept_together() -> None:
    logits = torch.full((16, 40), -5.0, device=DEVICE)
    logits[:, 10:14] = 1.0
    table = sampling_columns(16, top_k=2)
    tokens = check(table, logits, list(range(16)), [3] * 16)
    assert len(set(tokens)) > 2


def test_top_k_keeps_no_token_more() -> None:
    logits = torch.full((16, 40), -5.0, device=DEVICE)
    logits[:, 10:13] = torch.tensor([1.0, 0.99, 0.98], device=DEVICE)  # the third is as likely as those that are kept
    tokens = check(sampling_columns(16, top_k=2), logits, list(range(16)), [3] * 16)
    assert set(tokens) == {10, 11}


def test_barred_tokens_are_never_picked() -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"), device=DEVICE)
    logits[0, TILE + 5] = -30.0
    for filters in ({}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}):
        assert picked(sampling_columns(1, **filters), logits, [0], [4]) == [TILE + 5]


def test_far_apart_logits_end_the_search() -> None:
    logits = torch.linspace(-1e30, 0, 300, device=DEVICE)[None].contiguous()
    check(sampling_columns(1, top_k=100), logits, [0], [4])
    neighbours = 1 + torch.arange(300, device=DEVICE)[None] * 2**-23
    check(sampling_columns(1, top_k=7, top_p=0.6), neighbours, [0], [4])


def test_rows_without_a_sample_give_minus_one() -> None:
    assert picked(sampling_columns(2), normal(2), [0, 1], [-1, -1]) == [-1, -1]


def test_rows_that_are_not_finite_are_marked() -> None:
    logits = normal(5)
    logits[0, TILE + 3] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, 7:] = -torch.inf
    for filters in ({}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}):
        tokens = check(sampling_columns(5, **filters), logits, [0, 1, 2, 3, 4], [4] * 5)
        assert tokens[:4] == [NOT_FINITE] * 4
        assert 0 <= tokens[4] < 7


def test_bfloat16_logits_equal_the_reference() -> None:
    check(sampling_columns(2, top_k=5, top_p=0.9), normal(2).bfloat16(), [0, 1], [4, 5])


@settings(max_examples=10, deadline=None)
@given(
    st.floats(0.1, 3),
    st.floats(0.05, 1),
    st.floats(0, 0.5),
    st.integers(0, 90),
    st.integers(0, 2**31 - 1),
    st.integers(0, 9),
)
def test_any_filters_equal_the_reference(
    temperature: float, top_p: float, min_p: float, top_k: int, end: int, seed: int
) -> None:
    table = sampling_columns(1, temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, key=[seed * 2**59 - 5])
    check(table, normal(1, seed=seed, vocabulary=TILE + 60), [0], [end])


@pytest.mark.full
@pytest.mark.parametrize("vocabulary", [300, TILE, 50272, 151936])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_whole_vocabularies_equal_the_reference(vocabulary: int, filters: dict[str, float]) -> None:
    check(sampling_columns(3, **filters), normal(3, vocabulary=vocabulary), [2, 0, 1], [11, 12, 13])
