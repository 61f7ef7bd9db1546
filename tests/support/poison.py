"""A device that cannot compute one token id."""

from collections.abc import Sequence

from pagewire.services.executor.devices.protocol import Device, Edits, PendingStep, StepBatch
from pagewire.shared.sampling_parameters import Record


class PoisonedDevice:
    """Another device, whose steps raise if the marked token is among their inputs."""

    recovers = True

    def __init__(self, device: Device, token: int) -> None:
        self.capacity = device.capacity
        self.depth = device.depth
        self.poisoned_steps: list[int] = []
        """Rows of each step that has raised."""
        self._device = device
        self._token = token

    @property
    def busy(self) -> float:
        """See `Device.busy`."""
        return self._device.busy

    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        """See `Device.add`."""
        self._device.add(slot, blocks, sampling, stop_ids, edits)

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Device.extend`."""
        self._device.extend(slots, blocks)

    def remove(self, slot: int) -> None:
        """See `Device.remove`."""
        self._device.remove(slot)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Device.copy`."""
        self._device.copy(sources, targets)

    def launch(self, batch: StepBatch) -> PendingStep:
        """See `Device.launch`.

        Raises:
            RuntimeError: the marked token is in the batch.
        """
        if (batch.token_ids == self._token).any():
            self.poisoned_steps.append(len(batch.slots))
            raise RuntimeError("the marked token cannot be computed")
        return self._device.launch(batch)

    def close(self) -> None:
        """See `Device.close`."""
        self._device.close()
