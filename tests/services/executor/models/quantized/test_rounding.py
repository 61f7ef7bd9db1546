"""Plain weights as integers."""

import pytest
import torch

from pagewire.services.executor.models.quantized.rounding import round_weights


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_eight_bits_differ_by_half_a_step_at_most() -> None:
    weight = random(40, 96) * torch.logspace(-6, 3, 40)[:, None]
    rounded = round_weights(weight, 8)
    assert (rounded.bits, rounded.group_size, rounded.minima) == (8, 96, None)
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded.dequantize() - weight).abs() <= 0.5001 * steps).all()


def test_four_bits_differ_by_half_a_step_at_most() -> None:
    weight = random(40, 96) * torch.logspace(-2, 2, 40)[:, None]
    rounded = round_weights(weight, 4)
    assert (rounded.bits, rounded.group_size) == (4, 32)
    groups = weight.view(40, 3, 32)
    steps = (groups.amax(2) - groups.amin(2)) / 15
    errors = (rounded.dequantize() - weight).abs().view(40, 3, 32)
    assert (errors <= 0.52 * steps[:, :, None]).all()  # the bounds themselves are rounded to float16


def test_what_is_stored_in_four_bits_comes_back() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = codes * 0.125 - 0.75
    assert torch.equal(round_weights(weight, 4).dequantize(), weight)


def test_zeros_and_equal_numbers() -> None:
    weight = torch.cat((torch.zeros(1, 64), torch.full((1, 64), 0.5)))
    assert torch.equal(round_weights(weight, 8).dequantize(), weight)
    assert torch.equal(round_weights(weight, 4).dequantize(), weight)


@pytest.mark.parametrize("inputs", [16, 50])
def test_inputs_that_are_no_whole_groups_take_eight_bits(inputs: int) -> None:
    assert round_weights(random(4, inputs), 4).bits == 8
