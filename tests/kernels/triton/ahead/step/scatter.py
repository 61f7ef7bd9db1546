"""The variants of `kernels/triton/step/scatter.py` that devices launch."""

from pagewire.kernels.triton.step.scatter import BLOCK, scatter_kernel
from tests.kernels.triton.ahead.configuration import Configuration


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    tensors = dict.fromkeys(("table", "updates", "count"), "i32")
    return [Configuration("int32", scatter_kernel, tensors, {"BLOCK": BLOCK})]
