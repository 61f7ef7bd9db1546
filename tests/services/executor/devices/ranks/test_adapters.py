"""Rank 0 gives another rank its part of each adapter, over a connection; the ranks are in one process."""

import gc
import socket
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import Targets, targets_of
from pagewire.services.executor.devices.protocol import AdapterSlots, LoadedAdapter, StepBatch
from pagewire.services.executor.devices.ranks import adapters as ranks_adapters
from pagewire.services.executor.devices.ranks.adapters import FollowingAdapters, LeadingAdapters, RankedAdapter
from pagewire.services.executor.devices.ranks.startup import Connection
from pagewire.services.executor.models.registry import build_model
from pagewire.services.executor.models.shard import Shard, Units
from pagewire.shared.errors import ConfigurationError, DeviceLost
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import checkpoint

PATH = "model.layers.0.mlp.down"


class Slots(AdapterSlots):
    """Keeps adapters as they are."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.slots: dict[int, LoadedAdapter] = {}
        self.failure: Exception | None = None

    @override
    def pack(self, adapter: Adapter) -> Adapter:
        if self.failure is not None:
            raise self.failure
        return adapter

    @override
    def assign(self, slot: int, adapter: LoadedAdapter) -> None:
        self.slots[slot] = adapter

    @override
    def clear(self, slot: int) -> None:
        del self.slots[slot]

    def mark(self, slot: int) -> float:
        """The number by which the adapter of a slot is recognised."""
        return float(self.slots[slot].packed.updates[PATH][0].scale)


class Loaded:
    """An adapter that is loaded."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed


class Ranks:
    """Two ranks of the model, with their adapters."""

    def __init__(self) -> None:
        model = build_model(read_config(checkpoint("llama")))
        targets = targets_of(model)
        here, there = socket.socketpair()
        self.here, self.there = Connection(here), Connection(there)
        self.own, self.other, self.lost = Slots(targets), Slots(targets), list[int]()
        part = model.cut(Shard(0, 2), Units())
        self.leading = LeadingAdapters(self.own, part, [self.here], lambda rank, _: self.lost.append(rank))
        self.following = FollowingAdapters(self.other, self.there)

    def adapter(self, mark: float) -> Adapter:
        target = next(target for target in self.own.targets.products.values() if target.path == PATH)
        update = LowRank(torch.randn(4, target.inputs), torch.randn(target.outputs, 4), 0, mark)
        return Adapter({PATH: [update]})

    def step(self, *slots: int) -> None:
        """Has both ranks prepare a step with these slots."""
        ones = np.ones(len(slots), np.int64)
        batch = StepBatch(np.array(slots), ones, ones, ones, ones > 0)
        self.following.forget(self.leading.unused(8))
        self.following.prepare(batch.slots, self.leading.numbers(batch))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    both = Ranks()
    yield both
    both.here.close()


def test_each_rank_has_its_inputs_of_a_matrix(ranks: Ranks) -> None:
    whole = ranks.adapter(1.0)
    ranks.leading.assign(3, Loaded(ranks.leading.pack(whole)))
    ranks.step(3)
    (update,) = whole.updates[PATH]
    parts = [slots.slots[3].packed.updates[PATH][0] for slots in (ranks.own, ranks.other)]
    assert torch.equal(torch.cat([part.shrink for part in parts], dim=1), update.shrink)
    assert all(torch.equal(part.expand, update.expand) for part in parts)


def test_all_ranks_change_to_another_adapter_at_the_same_step(ranks: Ranks) -> None:
    packed = [ranks.leading.pack(ranks.adapter(mark)) for mark in (1.0, 2.0)]
    ranks.leading.assign(0, Loaded(packed[0]))
    ranks.leading.assign(1, Loaded(packed[0]))
    ranks.step(0, 2, 1)
    ranks.leading.clear(0)
    ranks.leading.assign(0, Loaded(packed[1]))
    assert (ranks.own.mark(0), ranks.other.mark(0)) == (2.0, 1.0)
    ranks.step(0, 2)
    assert (ranks.own.mark(0), ranks.other.mark(0)) == (2.0, 2.0)
    ranks.leading.clear(0)
    ranks.step(0, 2)
    assert ranks.other.slots == {}


def test_a_slot_may_be_assigned_before_its_adapter_is_loaded(ranks: Ranks) -> None:
    loaded = Loaded(None)
    ranks.leading.assign(0, loaded)
    ranks.step(1)
    assert ranks.other.slots == {}
    loaded.packed = ranks.leading.pack(ranks.adapter(3.0))
    ranks.step(0)
    assert ranks.other.mark(0) == 3.0


def test_other_ranks_free_adapters_that_rank_0_has_dropped(ranks: Ranks) -> None:
    packed: RankedAdapter | None = ranks.leading.pack(ranks.adapter(1.0))
    ranks.leading.assign(0, Loaded(packed))
    ranks.step(0)
    part = weakref.ref(ranks.other.slots[0].packed.updates[PATH][0].shrink)
    ranks.leading.clear(0)
    packed = None
    gc.collect()
    ranks.step(1)
    gc.collect()
    assert part() is None


def test_a_rank_without_memory_refuses_in_one_line_and_goes_on(ranks: Ranks) -> None:
    ranks.other.failure = RuntimeError("can't allocate memory\nat allocator.cpp")
    with pytest.raises(ConfigurationError, match=r"^rank 1 cannot hold the adapter: can't allocate memory$"):
        ranks.leading.pack(ranks.adapter(1.0))
    ranks.other.failure, ranks.own.failure = None, ConfigurationError("rank 0 refuses")
    with pytest.raises(ConfigurationError, match="rank 0 refuses"):
        ranks.leading.pack(ranks.adapter(2.0))
    ranks.own.failure = None
    ranks.leading.assign(0, Loaded(ranks.leading.pack(ranks.adapter(3.0))))
    ranks.step(0)
    assert ranks.other.mark(0) == 3.0
    assert ranks.lost == []


class Unreadable:
    """A scale that no process can read again."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _fail, (self.error,)


def _fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [MemoryError("no room for the factors"), EOFError("no room"), ValueError("no room")])
def test_a_rank_that_cannot_read_its_part_refuses_and_goes_on(ranks: Ranks, error: Exception) -> None:
    unreadable: Any = Unreadable(error)
    with pytest.raises(ConfigurationError, match=r"^rank 1 cannot hold the adapter: no room"):
        ranks.leading.pack(ranks.adapter(unreadable))
    ranks.leading.assign(0, Loaded(ranks.leading.pack(ranks.adapter(3.0))))
    ranks.step(0)
    assert ranks.other.mark(0) == 3.0
    assert ranks.lost == []


def test_a_rank_refuses_a_part_that_its_memory_cannot_hold(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(size: int) -> bytearray:
        raise MemoryError(f"no room for {size} bytes")

    with monkeypatch.context() as short:
        short.setattr(ranks_adapters, "bytearray", allocate, raising=False)
        with pytest.raises(ConfigurationError, match=r"^rank 1 cannot hold the adapter: no room for \d+ bytes$"):
            ranks.leading.pack(ranks.adapter(1.0))
    ranks.leading.assign(0, Loaded(ranks.leading.pack(ranks.adapter(3.0))))
    ranks.step(0)
    assert ranks.other.mark(0) == 3.0


def test_a_rank_that_ends_is_lost(ranks: Ranks) -> None:
    ranks.there.end.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceLost, match="rank 1"):
        ranks.leading.pack(ranks.adapter(1.0))
    assert ranks.lost == [1]


def test_a_rank_that_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    monkeypatch.setattr(ranks_adapters, "PACK_TIMEOUT", 0.05)
    monkeypatch.setattr(ranks.other, "pack", lambda _: time.sleep(0.5))
    with pytest.raises(DeviceLost, match="rank 1"):
        ranks.leading.pack(ranks.adapter(1.0))
    assert ranks.lost == [1]
