"""Packed columns of messages, little-endian u32, as arrays."""

import numpy as np

from pagewire.services.executor.devices.protocol import Int64


def column(data: bytes) -> Int64:
    """Returns the numbers in `data`.

    Raises:
        ValueError: the last number is cut off.
    """
    return np.frombuffer(data, "<u4").astype(np.int64)


def pairs(data: bytes) -> tuple[Int64, Int64]:
    """Returns the first and the second number of each pair in `data`.

    >>> [numbers.tolist() for numbers in pairs(packed(np.array([3, 40, 5, 60])))]
    [[3, 5], [40, 60]]

    Raises:
        ValueError: the last pair is cut off.
    """
    table = column(data).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def entries(data: bytes, width: int) -> tuple[Int64, Int64]:
    """Returns the first number of each `width` numbers in `data` [N], and the others [N * (width - 1)].

    Raises:
        ValueError: the last ones are cut off.
    """
    table = column(data).reshape(-1, width)
    return table[:, 0], table[:, 1:].ravel()


def packed(numbers: Int64) -> bytes:
    """Returns `numbers` as a packed column. -1 becomes 0xFFFF_FFFF."""
    return numbers.astype("<u4").tobytes()
