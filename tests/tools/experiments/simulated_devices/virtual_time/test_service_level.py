"""FastGen's definitions."""

import numpy as np
import pytest

from pagewire.bench._common.loads import Request
from tools.experiments.simulated_devices.virtual_time.service_level import (
    FASTGEN,
    ServiceLevel,
    effective_throughput,
    moving_average,
    throughput,
    token_intervals,
)

PANDAS_16 = [
    0.02,
    0.275,
    0.17916775032509755,
    0.13162451361867705,
    0.42711746875766493,
    0.33642144187657846,
    0.2887627180199936,
    0.24063964757099984,
]
"""pandas 3.1: Series([0.02, 0.5, 0.02, 0.02, 1.3, 0.02, 0.1, 0.03]).ewm(span=16).mean()"""


def served(at: float, prompt: int, first: float, *intervals: float) -> Request:
    """A request whose first token took `first` seconds."""
    times = np.cumsum([at + first, *intervals]).tolist()
    return Request(at, [1] * prompt, len(times), tokens_at=times)


def test_the_average_is_that_of_pandas() -> None:
    assert moving_average([0.02, 0.5, 0.02, 0.02, 1.3, 0.02, 0.1, 0.03]).tolist() == pytest.approx(PANDAS_16)
    assert moving_average([1, 2, 3, 4], span=3).tolist() == pytest.approx([1, 5 / 3, 17 / 7, 49 / 15])
    assert len(moving_average([])) == 0


def test_the_first_interval_alone_must_meet_the_rate() -> None:
    level = ServiceLevel(4.0)
    assert level.is_met(served(0, 512, 0.9, 0.24, 0.24))
    assert not level.is_met(served(0, 512, 0.9, 0.26, 0.01, 0.01))


def test_the_rate_itself_is_too_slow() -> None:
    assert not ServiceLevel(4.0).is_met(served(0, 512, 0.0, 0.25))


def test_a_late_stall_is_averaged_out() -> None:
    steady = [0.02] * 30
    assert ServiceLevel(4.0).is_met(served(0, 512, 0.5, *steady, 1.5, *steady))
    assert not ServiceLevel(4.0).is_met(served(0, 512, 0.5, *steady, 2.5, *steady))


def test_the_first_token_may_take_its_prompt_over_512_seconds() -> None:
    assert ServiceLevel(4.0).is_met(served(0, 512, 1.0))
    assert not ServiceLevel(4.0).is_met(served(0, 512, 1.01))


def test_throughput_is_over_the_whole_time() -> None:
    requests = [served(0.0, 512, 1.0, 1.0), served(0.0, 512, 1.0, 3.0), served(2.0, 512, 1.0, 5.0)]
    assert throughput(requests) == pytest.approx(3 / 8)


def test_effective_throughput_counts_requests_that_met_the_level() -> None:
    requests = [served(0.0, 512, 1.0, 0.1), served(0.0, 512, 1.5, 0.1), served(2.0, 512, 1.0, 1.0)]
    assert effective_throughput(requests, FASTGEN[1]) == pytest.approx(1 / 4)


def test_intervals_leave_out_the_first_and_the_last_request() -> None:
    requests = [served(2.0, 1, 0.5, 3.0), served(0.0, 1, 0.5, 1.0), served(1.0, 1, 0.5, 2.0, 2.0)]
    assert token_intervals(requests) == pytest.approx([2.0, 2.0])
