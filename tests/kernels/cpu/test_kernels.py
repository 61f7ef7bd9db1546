"""Addresses of arrays, which the kernels get beside numbers."""

import numpy as np
import numpy.typing as npt
import pytest

from pagewire.kernels.cpu.kernels import address

NUMBERS = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("array", [NUMBERS, NUMBERS[1:], NUMBERS.astype(np.uint8), np.array(7)])
def test_an_address_is_that_of_the_first_number(array: npt.NDArray[np.generic]) -> None:
    assert address(array) == array.ctypes.data


def test_the_address_of_an_empty_array_is_null() -> None:
    assert address(np.empty((5, 0))) == 0


@pytest.mark.parametrize("array", [NUMBERS.T, NUMBERS[:, 1:], np.frombuffer(b"readonly")])
def test_an_array_that_the_kernels_would_misread_is_refused(array: npt.NDArray[np.generic]) -> None:
    with pytest.raises(TypeError, match=r"contiguous|writable"):
        address(array)
