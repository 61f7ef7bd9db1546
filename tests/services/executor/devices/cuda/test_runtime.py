"""The parts of CUDA that a step needs, where they can be seen without a GPU."""

import numpy as np
import pytest
import torch

from pagewire.services.executor.devices.cuda.runtime import CudaMoment

DAY = 86400.0


def test_a_steps_time_is_as_exact_after_a_day_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's time between two events is a float32 in milliseconds."""
    times = iter([DAY, DAY + 0.0123])

    class Event:
        def __init__(self, **_: bool) -> None:
            self.at = 0.0

        def record(self, _stream: object) -> None:
            self.at = next(times)

        def elapsed_time(self, other: "Event") -> float:
            return float(np.float32((other.at - self.at) * 1000))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream: object = None
    began, ended = CudaMoment(stream), CudaMoment(stream)  # type: ignore[arg-type]
    assert ended.seconds_since(began) == pytest.approx(0.0123, rel=1e-6)
