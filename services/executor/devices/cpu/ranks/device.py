"""The CPU as a device of several ranks, of which this process is rank 0."""

from collections.abc import Callable

from typing_extensions import override

from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.device import CpuDevice
from pagewire.services.executor.devices.cpu.ranks.followers import CpuFollowers
from pagewire.services.executor.devices.cpu.ranks.leader import LeadingBackend, LeadingLM
from pagewire.services.executor.devices.cpu.ranks.shared_calls import SharedCalls
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.logprobs import LogprobsMode
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.devices.ranks.adapters import LeadingAdapters


class RankedCpuDevice(CpuDevice):
    """A CPU device whose model and KV pool are divided among ranks."""

    recovers = False
    """An error within a call leaves the other ranks in it: they wait for this one, and take no other call."""

    def __init__(
        self,
        model: LeadingLM,
        capacity: Capacity,
        backend: LeadingBackend,
        cores: Cores,
        mode: LogprobsMode,
        adapters: LeadingAdapters | None,
        draft_model: CpuDevice | None,
        followers: CpuFollowers,
        calls: SharedCalls,
    ) -> None:
        super().__init__(model, capacity, backend, cores, mode, adapters, draft_model, CpuSlots(capacity, calls.tables))
        self._followers = followers

    @property
    @override
    def lost(self) -> str:
        return self._followers.lost

    @override
    def on_lost(self, wake: Callable[[], None]) -> None:
        self._followers.on_lost(wake)

    @override
    def close(self) -> None:
        self._followers.close()
        super().close()
