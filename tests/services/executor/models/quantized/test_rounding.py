"""Plain weights as integers."""

import pytest
import torch

from pagewire.kernels.scales import Multiples
from pagewire.services.executor.models.quantized.rounding import round_weights


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def errors_in_steps(weight: torch.Tensor, bits: int) -> torch.Tensor:
    rounded = round_weights(weight, bits)
    groups = weight.view(len(weight), -1, 32)
    assert (rounded.bits, rounded.group_size) == (bits, 32)
    symmetric = groups.abs().amax(2) / ((1 << bits - 1) - 1)
    widest = (groups.amax(2) - groups.amin(2)) / 15 if bits == 4 else symmetric
    return (rounded.dequantize() - weight).abs().view_as(groups) / widest[:, :, None]


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_weights_of_any_size_differ_by_half_a_step(bits: int) -> None:
    """And by what scales and minima lose in float16."""
    weight = random(60, 96) * torch.logspace(-9, 4, 60)[:, None]
    assert errors_in_steps(weight, bits).max() <= {8: 0.8, 6: 0.6, 4: 0.6}[bits]
    ordinary = random(60, 96) * 0.02
    assert errors_in_steps(ordinary, bits).max() <= {8: 0.6, 6: 0.52, 4: 0.52}[bits]


def test_few_scales_in_four_bits_are_plain_numbers() -> None:
    assert isinstance(round_weights(random(4, 384), 4).scales, torch.Tensor)  # of 12 groups, 4 could share a step


@pytest.mark.parametrize("spread", [1.0, 0.02, 0.002])
@pytest.mark.parametrize("inputs", [256, 2048, 3072])
def test_scales_in_four_bits_take_a_byte_each(inputs: int, spread: float) -> None:
    """And the weights are as exact as with scales in float16, which take two."""
    weight = random(60, inputs) * spread
    rounded = round_weights(weight, 4)
    assert isinstance(rounded.scales, Multiples)
    assert isinstance(rounded.minima, Multiples)
    least, most = weight.view(60, -1, 32).aminmax(dim=2)
    best = ((most - least) / 15).square() / 12  # of numbers rounded to equal steps, on average
    error = (rounded.dequantize() - weight).square().mean()
    assert error < 0.97 * best.mean()


def test_scales_too_small_for_steps_in_float16_lose_little() -> None:
    weight = random(4, 512) * 1e-4
    assert errors_in_steps(weight, 4).max() <= 0.6
    weight[0] = 0.0
    assert (round_weights(weight, 4).dequantize()[0] == 0).all()


def test_ordinary_scales_are_float16_numbers() -> None:
    for bits in (8, 4):
        scales = round_weights(random(8, 64) * 0.02, bits).scales.float()
        assert torch.equal(scales.half().float(), scales)


def test_weights_of_four_bits_come_back() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = codes * 0.125 - 0.75
    assert torch.equal(round_weights(weight, 4).dequantize(), weight)


def test_zeros_and_equal_numbers_come_back() -> None:
    weight = torch.cat((torch.zeros(1, 64), torch.full((1, 64), 0.5)))
    torch.testing.assert_close(round_weights(weight, 8).dequantize(), weight, rtol=1e-3, atol=0.0)
    assert torch.equal(round_weights(weight, 4).dequantize(), weight)


@pytest.mark.parametrize("inputs", [16, 50])
def test_inputs_that_are_no_whole_groups_take_eight_bits(inputs: int) -> None:
    rounded = round_weights(random(4, inputs), 4)
    assert (rounded.bits, rounded.group_size) == (8, inputs)
