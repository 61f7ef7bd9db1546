"""The likeliest tokens of some rows."""

import numpy as np
import pytest
import torch

from pagewire.services.executor.devices.candidates import top_candidates
from pagewire.services.executor.devices.protocol import Int64


def rows(*wanted: int) -> tuple[Int64, Int64]:
    return np.arange(len(wanted)) + 10, np.array(wanted, np.int64)


def test_candidates_are_the_likeliest_of_the_whole_vocabulary() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    candidates = top_candidates(logits, *rows(3, 0, 5, 1))
    assert candidates.rows.tolist() == [10, 12, 13]
    assert candidates.counts.tolist() == [3, 5, 1]
    assert candidates.logprobs.dtype == np.float32
    begin = 0
    for row, count in ((0, 3), (2, 5), (3, 1)):
        best = torch.log_softmax(logits[row], dim=0).topk(count)
        end = begin + count
        assert candidates.ids[begin:end].tolist() == best.indices.tolist()
        assert candidates.logprobs[begin:end].tolist() == best.values.tolist()
        begin = end
    assert begin == len(candidates.ids) == len(candidates.logprobs)


def test_the_logits_stay_as_they_are() -> None:
    logits = torch.randn(2, 20)
    before = logits.clone()
    top_candidates(logits, *rows(2, 2))
    assert torch.equal(logits, before)


def test_a_small_vocabulary_has_no_more() -> None:
    candidates = top_candidates(torch.tensor([[1.0, 3.0, 2.0]]), *rows(9))
    assert candidates.counts.tolist() == [3]
    assert candidates.ids.tolist() == [1, 2, 0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_log_probabilities_stay_finite_where_logits_are_not(broken: float) -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = broken
    candidates = top_candidates(logits, *rows(8))
    assert np.isfinite(candidates.logprobs).all()
    assert sorted(candidates.ids.tolist()) == list(range(8))
