"""The rounding of activations in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.layers.round_rows import LARGEST, LEAST


def reference(x: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `out` and `scales` of `round_rows`."""
    groups = x.float().view(len(x), -1, group)
    scales = (groups.abs().amax(2) / LARGEST[dtype]).clamp_min(LEAST)  # NaN where a value is
    values = groups / scales[:, :, None]
    rounded = (values + 0.5).floor() if dtype == torch.int8 else values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return rounded.flatten(1).to(dtype), scales
