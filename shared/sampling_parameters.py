"""The table of scalar sampling parameters: their valid values and their columns in records.

A client sets a field of `pagewire.shared.messages.client.SamplingParams`. The tokenizer checks it and writes it into
the record of each sequence. Devices keep records, or columns of the same layout, by slot for their samplers. A new
scalar parameter needs a field there, a row of `PARAMETERS` here, and a use in the samplers. `RECORD` is part of the
wire format: a change needs a new `WIRE_VERSION`.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewire.shared.errors import invalid_field

Record = npt.NDArray[np.void]
"""An array of dtype `RECORD`: a sequence's record [], or a table of records [slots]."""

GREEDY_BELOW = 1e-5
"""Temperature below which a request is greedy."""
MIN_TEMPERATURE = 0.01
"""Lowest temperature that is not greedy. Lower ones are raised to it, because they overflow."""
NOT_FINITE = -2
"""Token id that samplers return for a row with NaN, or whose largest logit is infinite."""


def _unchanged(value: float, _vocab_size: int) -> float:
    return value


def _resolve_temperature(temperature: float, _vocab_size: int) -> float:
    return 0.0 if temperature < GREEDY_BELOW else max(temperature, MIN_TEMPERATURE)


def _resolve_top_k(count: int, vocab_size: int) -> int:
    return count if 0 < count < vocab_size else 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One scalar parameter."""

    name: str
    """Name of the client's field and of the column."""
    dtype: type[np.float64 | np.int64]
    """Dtype of the column."""
    neutral: float
    """Value of the column that has no effect. Greedy requests have it in all columns but those of penalties."""
    lowest: float
    """Minimum value of the client's field."""
    highest: float
    """Maximum value of the client's field."""
    allowed: str
    """The valid range, as the error message states it after "must be"."""
    resolve: Callable[..., float] = _unchanged
    """Returns the value of the column for the client's value and the size of the vocabulary."""
    penalty: bool = False
    """Whether the parameter changes logits by the sequence's earlier tokens. A penalty has an effect on greedy requests
    and on beam searches, too."""

    def check(self, value: float) -> None:
        """Refuses a value out of range.

        Raises:
            InvalidRequest: the value is out of range; the message names the field.
        """
        if not self.lowest <= value <= self.highest:  # true for NaN
            raise invalid_field(self.name, f"must be {self.allowed}, not {value}")


PARAMETERS = (
    Parameter("temperature", np.float64, 0.0, 0.0, 2.0, "in [0, 2]", _resolve_temperature),
    Parameter("top_p", np.float64, 1.0, math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
    Parameter("top_k", np.int64, 0, -1, math.inf, "at least 1, or 0 or -1 for all", _resolve_top_k),
    Parameter("min_p", np.float64, 0.0, 0.0, 1.0, "in [0, 1]"),
    Parameter("repetition_penalty", np.float64, 1.0, 1e-4, 1e4, "in [0.0001, 10000]", penalty=True),
    Parameter("frequency_penalty", np.float64, 0.0, -2.0, 2.0, "in [-2, 2]", penalty=True),
    Parameter("presence_penalty", np.float64, 0.0, -2.0, 2.0, "in [-2, 2]", penalty=True),
)
"""The parameters that clients set, in the order of the columns."""
PENALTIES = tuple(parameter for parameter in PARAMETERS if parameter.penalty)

RECORD = np.dtype(
    [
        *((parameter.name, parameter.dtype) for parameter in PARAMETERS),
        ("key", np.uint64),  # key of the sequence's random numbers
        ("min_length", np.int64),  # sequence length, prompt included, below which no stop id is sampled
        ("num_candidates", np.int64),  # number of most likely tokens that are reported with each sampled token
        ("num_logprobs", np.int64),  # number of log-probabilities that are reported with it, its own included; 0: none
        ("num_prompt_logprobs", np.int64),  # the same for each token of the prompt
    ],
    align=True,
)
"""One sequence's parameters, in the memory layout of a C struct. The executor fills in the last five columns."""


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


def is_penalized(columns: Record) -> bool:
    """Returns whether a record [] has penalties."""
    return any(columns[parameter.name] != parameter.neutral for parameter in PENALTIES)


def unpack_record(data: bytes) -> Record:
    """Returns the record [] in `data` as a writable array.

    Raises:
        ValueError: the bytes are not one record.
    """
    return np.frombuffer(data, RECORD).copy().reshape(())
