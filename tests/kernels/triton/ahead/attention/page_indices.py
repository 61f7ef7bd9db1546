"""The variants of `kernels/triton/attention/page_indices.py` that devices launch."""

from pagewire.kernels.triton.attention.page_indices import BLOCK, page_indices_kernel
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.known_layers import TENSORS


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    tensors = {**TENSORS, "indices": "i32", "starts": "i32"}
    return [Configuration("any rows", page_indices_kernel, tensors, {"BLOCK_SIZE": 16, "BLOCK": BLOCK})]
