"""Rounded inputs of products, and how far predictions diverge."""

import torch
from torch import nn

from tools.experiments.correctness.rounding import PAIRS, compare, rounded, rounded_inputs, rounded_pairs


def test_more_bits_round_less() -> None:
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    errors = [float((rounded(x, bits) - x).abs().max()) for bits in (4, 8, 16)]
    assert errors[0] > errors[1] > errors[2] > 0


def test_pairs_round_less_than_8_bits() -> None:
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    for bits in PAIRS:
        assert (rounded_pairs(x, bits) - x).norm() < (rounded(x, 8) - x).norm() / 3


def test_inputs_are_rounded_only_meanwhile() -> None:
    linear = nn.Linear(32, 32)
    x = torch.randn(3, 32)
    exact = linear(x)
    with rounded_inputs([linear], lambda numbers: rounded(numbers, 4)):
        assert torch.equal(linear(x), nn.functional.linear(rounded(x, 4), linear.weight, linear.bias))
    assert torch.equal(linear(x), exact)


def test_equal_predictions_do_not_diverge() -> None:
    exact = torch.randn(2, 5, 9).log_softmax(-1)
    prompts = torch.randint(0, 9, (2, 6))
    assert compare(exact, exact, prompts) == (0.0, 0.0)
    assert compare(exact, torch.randn(2, 5, 9).log_softmax(-1), prompts)[0] > 0
