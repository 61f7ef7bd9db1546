"""The gated activations in PyTorch, which the kernel is compared with."""

import torch
import torch.nn.functional as F

from pagewire.kernels.activation import Activation


def reference(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Returns `gated` in float64."""
    gate, up = x.double().chunk(2, -1)
    match kind:
        case Activation.SILU:
            return F.silu(gate) * up
        case Activation.GELU:
            return F.gelu(gate) * up
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh") * up
        case Activation.RELU:
            return F.relu(gate) * up
