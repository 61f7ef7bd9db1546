"""A runtime whose copies are late: they happen when somebody waits for them, as a GPU's may."""

from collections.abc import Callable

from torch import Tensor

from pagewire.services.executor.devices.cuda.runtime import Moment
from tests.support.host_runtime import HostMoment, HostRuntime


class LateMoment(HostMoment):
    """Runs what it stands for when it is waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work: list[Callable[[], object]] = [work]

    def wait(self) -> None:
        while self._work:
            self._work.pop()()


class LateRuntime(HostRuntime):
    """A `HostRuntime` with late copies out."""

    def copy_out(self, source: Tensor, target: Tensor) -> Moment:
        return LateMoment(lambda: target.copy_(source))
