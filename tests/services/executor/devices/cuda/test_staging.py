"""A pinned buffer is not written before the copy from it has been made."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.devices.cuda.runtime import Moment
from pagewire.services.executor.devices.cuda.staging import StagingRing
from tests.support.host_runtime import HostMoment, HostRuntime


class Watched(HostMoment):
    """Remembers that it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = False

    def wait(self) -> None:
        self.waited = True


class Watching(HostRuntime):
    """A `HostRuntime` that remembers its moments and its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[Watched] = []
        self.buffers: list[torch.Tensor] = []

    def pinned(self, *shape: int) -> torch.Tensor:
        self.buffers.append(super().pinned(*shape))
        return self.buffers[-1]

    def mark(self) -> Moment:
        self.moments.append(Watched())
        return self.moments[-1]


@given(depth=st.integers(1, 5), sends=st.integers(0, 12))
def test_a_buffer_waits_for_its_last_copy_and_for_no_other(depth: int, sends: int) -> None:
    runtime = Watching()
    ring, target = StagingRing(runtime, depth, entries=4), torch.zeros(4, dtype=torch.int32)
    for number in range(sends):
        ring.send(np.full(3, number, np.int32), target)
        assert target.tolist() == [number] * 3 + [0]
        assert [moment.waited for moment in runtime.moments] == [i + depth <= number for i in range(number + 1)]
    assert len(runtime.buffers) == depth
    newest = range(max(sends - depth, 0), sends)
    assert {int(buffer[0]) for buffer in runtime.buffers} >= set(newest)
