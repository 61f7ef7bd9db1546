"""Sums over the ranks of a model, each on a GPU of its own: by NCCL, or by gloo where the host stands in for GPUs."""

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from pagewire.services.executor.models.shard import Collectives
from pagewire.shared.errors import DeviceLost

DISCONNECT_TIMEOUT = 2.0
"""Seconds within which NCCL must free its communicator. It may wait for ranks that are gone."""


class TorchCollectives(Collectives):
    """One rank's view of all ranks, which must be connected before they compute.

    Numbers are added in an order that the library chooses by their count, and all ranks get the same bits. On a GPU
    collectives are enqueued on the current stream, and captured in graphs as kernels are.
    """

    def __init__(self, rank: int, size: int, store: int, device: torch.device) -> None:
        """`store` is the descriptor of an empty file that all ranks have open; `device` that of the tensors."""
        self.rank, self.size = rank, size
        self._store, self._device = store, device

    def connect(self) -> None:
        """Waits until all ranks have called it.

        Raises:
            DeviceLost: a rank is gone.
        """
        gpu = self._device.type == "cuda"
        store = dist.FileStore(f"/proc/self/fd/{self._store}", self.size)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                device_id=self._device if gpu else None,
            )
        except RuntimeError as error:
            raise DeviceLost("the ranks cannot connect") from error

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds up `x` in place, as `Collectives` says.

        Raises:
            DeviceLost: a rank is gone.
        """
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise DeviceLost("a sum over the ranks has failed") from error
        return x

    @override
    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Joins the parts of all ranks, as `Collectives` says.

        Raises:
            DeviceLost: a rank is gone.
        """
        widest = max(sizes)
        parts = list(part.new_empty(self.size, len(part), widest).unbind(0))
        try:
            dist.all_gather(parts, F.pad(part, (0, widest - part.shape[1])).contiguous())
        except RuntimeError as error:
            raise DeviceLost("an exchange between the ranks has failed") from error
        return torch.cat([each[:, :size] for each, size in zip(parts, sizes, strict=True)], dim=1)

    def abort(self) -> None:
        """Ends the waits of this process for other ranks, without waiting for that itself. Any thread may call it.

        Gloo's end with the processes of the other ranks.
        """
        if self._device.type == "cuda" and dist.is_initialized():
            threading.Thread(target=_abort, name="abort", daemon=True).start()

    def disconnect(self) -> None:
        """Frees the connections."""
        if dist.is_initialized():
            freeing = threading.Thread(target=_free, name="disconnect", daemon=True)
            freeing.start()
            freeing.join(DISCONNECT_TIMEOUT)


def _abort() -> None:
    group = dist.group.WORLD
    if group is not None:
        with suppress(RuntimeError):  # it is freed meanwhile
            group.abort()


def _free() -> None:
    with suppress(RuntimeError):  # NCCL cannot be told of ranks that are gone
        dist.destroy_process_group()
