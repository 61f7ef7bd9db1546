"""A device that cannot compute one token id."""

from collections.abc import Sequence

from typing_extensions import override

from pagewire.services.executor.devices.protocol import Device, Edits, PendingStep, StepBatch
from pagewire.shared.sampling_parameters import Record


class PoisonedDevice(Device):
    """Another device, whose steps raise if the marked token is among their inputs."""

    recovers = True

    def __init__(self, device: Device, token: int) -> None:
        self.capacity = device.capacity
        self.depth = device.depth
        self.poisoned_steps: list[int] = []
        """Rows of each step that has raised."""
        self._device = device
        self._token = token

    @override
    @property
    def busy(self) -> float:
        return self._device.busy

    @override
    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        self._device.add(slot, blocks, sampling, stop_ids, edits)

    @override
    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._device.extend(slots, blocks)

    @override
    def remove(self, slot: int) -> None:
        self._device.remove(slot)

    @override
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._device.copy(sources, targets)

    @override
    def launch(self, batch: StepBatch) -> PendingStep:
        if (batch.token_ids == self._token).any():
            self.poisoned_steps.append(len(batch.slots))
            raise RuntimeError("the marked token cannot be computed")
        return self._device.launch(batch)

    @override
    def close(self) -> None:
        self._device.close()
