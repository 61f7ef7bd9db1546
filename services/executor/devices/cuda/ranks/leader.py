"""Rank 0 of a model on several GPUs: its device has the other ranks repeat each of its calls."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from typing_extensions import override

from pagewire.services.executor import rank_processes
from pagewire.services.executor.devices.cuda.device import DEPTH, CudaDevice
from pagewire.services.executor.devices.cuda.output_ring import PendingCopy
from pagewire.services.executor.devices.cuda.part import CudaPart
from pagewire.services.executor.devices.cuda.ranks.collectives import TorchCollectives
from pagewire.services.executor.devices.cuda.ranks.device_calls import DeviceCalls, LeadingMasks, without_grammar
from pagewire.services.executor.devices.cuda.ranks.shared_page import PAGE, SharedPage
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime
from pagewire.services.executor.devices.protocol import Device, Edits, Int64, StepBatch
from pagewire.services.executor.devices.ranks.adapters import LeadingAdapters
from pagewire.services.executor.devices.ranks.followers import Followers
from pagewire.services.executor.devices.ranks.shard_settings import shard_of
from pagewire.services.executor.devices.ranks.startup import Connect, Measured, Sizes
from pagewire.shared.errors import DeviceLost
from pagewire.shared.sampling_parameters import Record
from pagewire.shared.settings.config import Settings

LOST_TIMEOUT = 5.0
"""Seconds within which rank 0 must have noticed that a rank is lost. Otherwise its process ends at once: a kernel of
NCCL may wait for that rank for ever."""
MOST_FREED = 64
"""Adapters that the ranks free before a step, at most."""

_log = structlog.get_logger()


class CudaFollowers(Followers):
    """Ranks that compute on GPUs of their own.

    Attributes:
        collectives: rank 0's view of all ranks.
        page: memory that all share.
    """

    def __init__(self, settings: Settings, folder: Path, runtime: CudaRuntime) -> None:
        size = settings.tensor_parallel_size
        started = rank_processes.take("cuda", size)
        os.ftruncate(started.memory, PAGE)
        self.page = SharedPage(started.memory, 0, size)
        self.collectives = TorchCollectives(0, size, started.store, runtime.device)
        self._leaving = threading.Timer(LOST_TIMEOUT, _end_process)
        self._leaving.daemon = True
        threads = max(1, torch.get_num_threads() // (settings.data_parallel_size * size))
        super().__init__(started, settings, folder, threads)
        self.on_lost(self._leaving.start)

    @override
    def abort(self) -> None:
        self.collectives.abort()

    def check(self, tokens: Int64) -> None:
        """Checks the tokens [R] of a step that has ended.

        Raises:
            DeviceLost: a rank is lost, so that they may be wrong, or has sampled others in an earlier step.
        """
        self.page.note(tokens)
        if not self.lost and (rank := self.page.differing_rank()) is not None:
            self.lose(rank, "has sampled other tokens")
        if self.lost:
            raise DeviceLost(self.lost)

    @override
    def close(self) -> None:
        self._leaving.cancel()
        super().close()
        self.collectives.disconnect()


class RankedCudaDevice(Device):
    """A device of several GPUs, of which this process has the first."""

    depth = DEPTH
    recovers = False

    def __init__(
        self,
        own: CudaDevice,
        followers: CudaFollowers,
        calls: DeviceCalls,
        adapters: LeadingAdapters | None = None,
    ) -> None:
        """`own` is the device of this rank, `adapters` are those of all ranks' slots; None: there are none."""
        self.capacity, self.draft_model = own.capacity, own.draft_model
        self.adapters = self._adapters = adapters
        self._own, self._followers, self._calls = own, followers, calls

    @property
    @override
    def busy(self) -> float:
        return self._own.busy

    @property
    @override
    def lost(self) -> str:
        return self._followers.lost

    @override
    def on_lost(self, wake: Callable[[], None]) -> None:
        self._followers.on_lost(wake)

    @override
    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        self._calls.add("add", slot, blocks, sampling, stop_ids, *without_grammar(edits))
        self._own.add(slot, blocks, sampling, stop_ids, edits)

    @override
    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._calls.add("extend", slots, blocks)
        self._own.extend(slots, blocks)

    @override
    def remove(self, slot: int) -> None:
        """Does nothing: see `CudaDevice`."""

    @override
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._calls.add("copy", sources, targets)
        self._own.copy(sources, targets)

    @override
    def launch(self, batch: StepBatch) -> PendingCopy:
        numbers = None
        if self._adapters is not None:
            if unused := self._adapters.unused(MOST_FREED):
                self._calls.add("forget", unused)
            numbers = self._adapters.numbers(batch)
        self._calls.send("launch", batch, numbers)
        return self._own.launch(batch)

    @override
    def close(self) -> None:
        self._own.close()
        self._followers.close()


def open_ranks(settings: Settings, folder: Path, config: dict[str, Any]) -> RankedCudaDevice:
    """Opens as many GPUs as there are ranks, with the model of `folder`, whose config.json is `config`.

    Raises:
        ConfigurationError: the model cannot be loaded or cut, or the pool would be too small.
        DeviceLost: a rank has ended, or does not arrive in time.
    """
    runtime = CudaRuntime()
    followers = CudaFollowers(settings, folder, runtime)
    try:
        part = CudaPart.load(settings, folder, config, runtime, shard_of(settings, 0), followers.collectives)
        part = part.with_draft_model()
        followers.await_loaded()
        followers.watch(followers.page.heartbeats)
        followers.tell(Connect())
        followers.collectives.connect()
        own = part.measure()
        capacity = part.capacity([own, *followers.receive(Measured)])
        followers.tell(Sizes(capacity))
        calls = DeviceCalls(followers.connections)
        device = part.open(capacity, LeadingMasks(capacity, calls), followers.check)
        followers.await_ready()
        adapters = None if part.adapters is None else followers.leading(part.adapters, part.model.part)
        return RankedCudaDevice(device, followers, calls, adapters)
    except BaseException:
        followers.close()
        raise


def _end_process() -> None:
    _log.error("rank_0_ended", reason="it waits for a rank that is lost")
    os._exit(1)
