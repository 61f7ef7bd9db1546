"""Layers with kernels make what the plain layers make."""

import torch

from pagewire.services.executor.devices.cuda.fused_layers import Norm
from pagewire.services.executor.models.layers import RMSNorm
from tests.services.executor.devices.cuda.twins import runtime


def test_a_norm_adds_the_residual_in_its_pass_and_keeps_the_sum_in_its_place() -> None:
    device = runtime().device
    plain = RMSNorm(48, 1e-5).to(device)
    torch.nn.init.uniform_(plain.weight, 0.5, 1.5)
    x, residual = torch.randn(2, 5, 48, device=device).unbind()
    with torch.inference_mode():
        expected, total = plain.add(x, residual.clone())
        out, kept = Norm(plain).add(x, residual)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(kept, total)
    assert kept.data_ptr() == residual.data_ptr()
