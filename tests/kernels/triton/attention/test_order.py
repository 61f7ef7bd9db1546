"""No kernel depends on the order in which the programs of its grid run."""

import itertools
import random
from typing import Any

import pytest
import torch

from pagewire.kernels.triton.attention.decode_attention import new_plan, plan_batch, split_attention
from pagewire.kernels.triton.attention.paged_attention import paged_attention
from pagewire.kernels.triton.sampling import sampler
from tests.kernels.triton.attention.test_decode_attention import layer
from tests.kernels.triton.batches import DEVICE, int32, paged_case
from tests.kernels.triton.sampling_cases import sampling_columns

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Programs run in a random order; the list has how many of each grid have run."""
    from triton.runtime.interpreter import interpreter_builder as builder

    plain, draw = builder.set_grid_idx, random.Random(5)
    orders: list[list[tuple[int, ...]]] = []
    counts: list[int] = []

    def set_grid_idx(x: int, y: int, z: int) -> None:
        size: Any = builder.grid_dim
        if (x, y, z) == (0, 0, 0):
            orders.append(list(itertools.product(*map(range, size))))
            draw.shuffle(orders[-1])
            counts.append(0)
        counts[-1] += 1
        plain(*orders[-1].pop())

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
    return counts


def results() -> list[torch.Tensor]:
    """The outputs of attention and of the sampler for a mixed batch."""
    shape = layer()
    case = paged_case(shape, [(1, 120), (7, 40), (0, 0), (20, 20), (1, 17)])
    arguments = (case.query, case.key_cache, case.value_cache)
    mixed, short = torch.zeros_like(case.query), torch.zeros_like(case.query)
    paged_attention(shape, case.batch, *arguments, mixed)
    plan = new_plan(shape, 5, 6, DEVICE, torch.float32, torch.float32)
    plan_batch(shape, case.batch, plan)
    split_attention(shape, case.batch, plan, *arguments, short)
    logits = torch.randn(3, sampler.TILE + 9, generator=torch.Generator().manual_seed(1))
    tokens, tiles = int32([-7] * 3), torch.zeros(3, 2, 2)
    sampler.sample(sampling_columns(3, top_p=0.9), logits, int32([2, 0, 1]), int32([5, 6, 7]), tiles, tokens)
    return [mixed, short, tokens]


def test_results_are_equal_to_the_bit_in_any_order(request: pytest.FixtureRequest) -> None:
    expected = results()
    counts = request.getfixturevalue("shuffled")
    for shuffled, ordered in zip(results(), expected, strict=True):
        assert torch.equal(shuffled, ordered)
    assert max(counts) > 10, "programs were shuffled"
