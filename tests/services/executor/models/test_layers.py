"""The layers that the families share, against their definitions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.models.layers import RMSNorm


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 1000))
def test_a_norm_of_a_sum_hands_the_sum_over(tokens: int, width: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, tokens, width, generator=random).unbind()
    norm = RMSNorm(width, 1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=random)
    with torch.inference_mode():
        out, total = norm.add(x, residual.clone())
        torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
        scale = (x + residual).square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        torch.testing.assert_close(out, (x + residual) * scale * norm.weight)


def test_a_norm_with_zeros_added_is_the_plain_norm() -> None:
    norm = RMSNorm(8, 1e-6)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        out, total = norm.add(torch.zeros_like(x), x)
        assert torch.equal(total, x)
        assert torch.equal(out, norm(x))
