"""Quantized blocks of GGUF files as integers."""

import pytest
import torch

from pagewire.services.executor.models.gguf_tensors import PLAIN, dequantize
from pagewire.services.executor.models.quantized.gguf_blocks import unpack_integers
from pagewire.shared.gguf.reader import TENSOR_TYPES, TensorType
from tests.support.gguf_files import random_blocks


@pytest.mark.parametrize("kind", [kind for kind in TENSOR_TYPES.values() if kind.name not in PLAIN], ids=str)
def test_integers_are_the_numbers_of_the_package_gguf(kind: TensorType) -> None:
    rows = random_blocks(kind.name, 12).reshape(6, -1)
    found = unpack_integers(rows, kind)
    assert found is not None
    assert found.codes.shape == (6, 2 * kind.block)
    assert torch.equal(found.dequantize(), dequantize(rows, kind))


def test_plain_numbers_are_no_integers() -> None:
    assert unpack_integers(random_blocks("Q8_0", 4), TensorType("F16", 1, 2)) is None
