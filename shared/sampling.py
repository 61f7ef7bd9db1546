"""The sampling table: every scalar parameter once, with the values it may have and the column that devices keep it in.

A client sets a field of `pagewire.shared.messages.client.SamplingParams`; the tokenizer checks it and writes it into a
record, of which every sequence has one; the slot tables of the devices and what their samplers are given are records
or columns of the same layout. A new scalar parameter is a field there, a row of `PARAMETERS` here, and a use in the
samplers. `RECORD` is part of the wire format: whoever changes it raises `WIRE_VERSION`.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.shared.errors import InvalidRequest

Record = npt.NDArray[np.void]
"""Of dtype `RECORD`: one sequence's record [], or a table of them [slots]."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
COLDEST = 0.01
"""Temperatures between greedy and this are raised to it: colder ones overflow."""


def _as_given(value: float, _vocab_size: int) -> float:
    return value


def _warm_enough(temperature: float, _vocab_size: int) -> float:
    return 0.0 if temperature < GREEDY_BELOW else max(temperature, COLDEST)


def _fewer_than_all(count: int, vocab_size: int) -> int:
    return count if 0 < count < vocab_size else 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One scalar parameter."""

    name: str
    """Of the client's field and of the column."""
    dtype: type[np.float64 | np.int64]
    """Of the column in a record."""
    neutral: float
    """The value of the column that has no effect; that of a greedy request."""
    lowest: float
    """The least that a client may ask for."""
    highest: float
    """The most that a client may ask for."""
    allowed: str
    """Both, as the error message puts it behind "must be"."""
    resolve: Callable[..., float] = _as_given
    """Turns what the client asked for, and the size of the vocabulary, into the value of the column."""

    def check(self, value: float) -> None:
        """Refuses a value out of range.

        Raises:
            InvalidRequest: names the field.
        """
        if not self.lowest <= value <= self.highest:  # NaN is not
            raise InvalidRequest(f"{self.name} must be {self.allowed}, not {value}")


PARAMETERS = (
    Parameter("temperature", np.float64, 0.0, 0.0, 2.0, "in [0, 2]", _warm_enough),
    Parameter("top_p", np.float64, 1.0, math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
    Parameter("top_k", np.int64, 0, -1, math.inf, "at least 1, or 0 or -1 for all", _fewer_than_all),
    Parameter("min_p", np.float64, 0.0, 0.0, 1.0, "in [0, 1]"),
)
"""What clients set, in the order of the columns."""

RECORD = np.dtype(
    [
        *((parameter.name, parameter.dtype) for parameter in PARAMETERS),
        ("key", np.uint64),  # of the sequence's random numbers
        ("min_length", np.int64),  # tokens, the prompt's included, below which no stop id is picked
        ("num_candidates", np.int64),  # likeliest tokens that are reported with each that is picked
    ],
    align=True,
)
"""One sequence's parameters. The executor fills in the columns that are no client's field. Laid out as in C."""


_NEUTRAL = dict.fromkeys(RECORD.names or (), 0) | {parameter.name: parameter.neutral for parameter in PARAMETERS}
_CODES = {"f": "d", "i": "q", "u": "Q"}
_pack = struct.Struct("=" + "".join(_CODES[dtype.kind] for dtype, *_ in (RECORD.fields or {}).values())).pack


def pack_record(**values: float) -> bytes:
    """Returns the bytes of a record with these values; every other column is neutral.

    This runs once per request, and takes a tenth of the time that numpy takes for one record.
    """
    return _pack(*(_NEUTRAL | values).values())


def record(**values: float) -> Record:
    """Returns a record [] with these values; every other column is neutral."""
    return unpack_record(pack_record(**values))


def unpack_record(data: bytes) -> Record:
    """The record [] in `data`, writable.

    Raises:
        ValueError: the bytes are not one record.
    """
    return np.frombuffer(data, RECORD).copy().reshape(())
