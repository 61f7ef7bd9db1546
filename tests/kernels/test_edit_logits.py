"""Biases and barred stop ids change exactly the logits they name."""

import torch

from pagewire.kernels.edit_logits import edit_logits, reference
from tests.kernels.batches import DEVICE, int32
from tests.kernels.sampling_cases import sampling_table

TABLE = sampling_table(
    3,
    bias_ids=[[4, 9, -1], [-1, -1, -1], [0, 2, 7]],
    bias=[[1.5, -2.0, 9.0], [9.0, 9.0, 9.0], [0.25, -100.0, 3.0]],
    stop_ids=[[9, 3], [5, -1], [-1, -1]],
    min_length=[10, 20, 30],
)


def check(slots: list[int], ends: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.randn(len(slots), 10, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    expected = reference(TABLE, logits, int32(slots), int32(ends))
    edit_logits(TABLE, logits, int32(slots), int32(ends))
    torch.testing.assert_close(logits, expected, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=0)
    return logits


def test_biases_are_added_where_named() -> None:
    check([0, 1, 2], [50, 50, 50])


def test_stop_ids_are_barred_below_the_floor_only() -> None:
    logits = check([0, 1], [9, 20])
    assert logits[0, 3].isinf()
    assert logits[0, 9].isinf(), "a bias does not free a barred token"
    assert logits[1].isfinite().all(), "the minimum length itself is free"


def test_rows_that_sample_nothing_are_untouched() -> None:
    check([0, 0], [-1, 3])


def test_bfloat16() -> None:
    check([2, 0], [5, 5], torch.bfloat16)
