"""Mixtures of experts, against the layer in PyTorch."""

import pytest
import torch

from pagewire.kernels.activation import Activation
from pagewire.kernels.attention_layer import Attention
from pagewire.kernels.cpu.experts import CompiledExperts
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_model import Mixture
from pagewire.services.executor.models.feed_forward import MixtureOfExperts
from pagewire.services.executor.models.spec import DecoderSpec, ExpertsSpec, LayerSpec
from tests.kernels.cpu.test_integers import weights
from tests.kernels.cpu.test_linear import random

WIDTH, INNER, COUNT = 48, 40, 6


def layer(chosen: int, shared: int, *, normalized: bool, activation: Activation = Activation.SILU) -> MixtureOfExperts:
    experts = ExpertsSpec(COUNT, chosen, INNER, normalized, shared)
    spec = DecoderSpec(
        vocab_size=8,
        width=WIDTH,
        inner=INNER,
        layers=(LayerSpec(Attention(1, 1, WIDTH, 1.0), None, experts),),
        eps=1e-6,
        activation=activation,
    )
    mixture = MixtureOfExperts(spec, experts).requires_grad_(requires_grad=False)
    random = torch.Generator().manual_seed(chosen)
    for parameter in mixture.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=random)
    return mixture


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize(
    ("chosen", "shared", "normalized"), [(1, 0, True), (2, 0, False), (3, 56, False), (6, 24, True)]
)
def test_outputs_equal_the_plain_layers(
    kernels: CpuKernels, tokens: int, chosen: int, shared: int, normalized: bool
) -> None:
    plain = layer(chosen, shared, normalized=normalized, activation=Activation.GELU_TANH if shared else Activation.SILU)
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
    expected = plain(x)
    torch.testing.assert_close(Mixture(plain, kernels)(x), expected, rtol=1e-4, atol=1e-5)


def test_a_token_does_not_depend_on_the_others(kernels: CpuKernels) -> None:
    mixture = Mixture(layer(2, 24, normalized=True), kernels)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    together = mixture(x)
    for i in (0, 17, 39):
        assert torch.equal(mixture(x[i : i + 1]), together[i : i + 1])


def test_outputs_do_not_depend_on_the_threads(kernels: CpuKernels, many_threads: CpuKernels) -> None:
    plain = layer(3, 24, normalized=True)
    for tokens in (1, 5, 33, 90):  # experts that threads take alone, and experts that they share
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(Mixture(plain, many_threads)(x), Mixture(plain, kernels)(x))


def test_experts_with_multiples_give_the_bits_of_floats(kernels: CpuKernels) -> None:
    up, down = weights(128, 256, 4, 32, minima=True, stored="multiples"), weights(256, 64, 6, 16, stored="multiples")
    router, x = kernels.pack(random(4, 256)), random(5, 256)
    integers, expected = (
        CompiledExperts(kernels, router, [pair] * 4, None, Activation.SILU, 2, normalized=True)(x)
        for pair in (
            (up.packed(kernels), down.packed(kernels)),
            (up.in_floats().packed(kernels), down.in_floats().packed(kernels)),
        )
    )
    assert torch.equal(integers, expected)
