"""Ranks that share memory: they get equal sums, and none waits for a lost one. Here each rank is a thread."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.collectives import BUFFER, RanksAborted, SharedMemoryCollectives
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.shared.sampling_parameters import NOT_FINITE
from tests.support.shared_ranks import on_each, shared_ranks
from tests.support.waiting import PATIENCE


def parts_of(size: int, count: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(count)
    return [torch.randn(count, generator=random) for _ in range(size)]


@pytest.fixture(params=[2, 3, 4])
def ranks(kernels: CpuKernels, request: pytest.FixtureRequest) -> list[SharedMemoryCollectives]:
    return shared_ranks(kernels, request.param)


@pytest.mark.parametrize("count", [1, 7, 576, BUFFER, 2 * BUFFER + 5])
def test_all_ranks_get_the_sum_in_their_order(ranks: list[SharedMemoryCollectives], count: int) -> None:
    parts = parts_of(len(ranks), count)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    results = on_each(ranks, lambda rank: rank.all_reduce(parts[rank.rank].clone()))
    assert all(torch.equal(result, expected) for result in results)


def test_several_threads_of_a_rank_change_no_bit(many_threads: CpuKernels) -> None:
    ranks = shared_ranks(many_threads, 3)
    parts = parts_of(3, BUFFER + 3)
    expected = (parts[0] + parts[1]) + parts[2]
    results = on_each(ranks, lambda rank: rank.all_reduce(parts[rank.rank].clone()))
    assert all(torch.equal(result, expected) for result in results)


def test_sums_of_half_precision_are_rounded_once(ranks: list[SharedMemoryCollectives]) -> None:
    parts = [part.bfloat16().view(5, 2) for part in parts_of(len(ranks), 10)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    results = on_each(ranks, lambda rank: rank.all_reduce(parts[rank.rank].clone()))
    assert all(torch.equal(result, expected.bfloat16()) for result in results)


def test_many_successive_sums_are_right(ranks: list[SharedMemoryCollectives]) -> None:
    def run(rank: SharedMemoryCollectives) -> bool:
        whole = len(ranks) * (len(ranks) - 1) / 2
        sums = (rank.all_reduce(torch.full((100,), float(rank.rank + i))) for i in range(500))
        return all(bool((x == whole + i * len(ranks)).all()) for i, x in enumerate(sums))

    assert all(on_each(ranks, run))


@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("width", [1, 33, BUFFER // 2 + 1, 2 * BUFFER + 1])
def test_all_ranks_get_the_columns_of_all(kernels: CpuKernels, rows: int, width: int) -> None:
    if rows * width > 4 * BUFFER:
        rows = 2
    ranks, sizes = shared_ranks(kernels, 3), [width, width, max(1, width - 1)]
    parts = [torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) for columns in sizes]
    results = on_each(ranks, lambda rank: rank.all_gather(parts[rank.rank], sizes))
    assert all(torch.equal(result, torch.cat(parts, dim=1)) for result in results)


def test_the_lowest_rank_wins_among_equal_values(kernels: CpuKernels) -> None:
    values = [torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1.0, 2.5, 2.0, float("inf")])]
    ids = [np.array([3, 4, 5, 6]), np.array([13, 14, 15, NOT_FINITE])]
    results = on_each(shared_ranks(kernels, 2), lambda rank: rank.first_of_largest(values[rank.rank], ids[rank.rank]))
    assert [result.tolist() for result in results] == [[3, 14, 5, NOT_FINITE]] * 2


def test_an_abort_ends_every_wait_and_all_later_ones(ranks: list[SharedMemoryCollectives]) -> None:
    first, *others = ranks

    def wait(rank: SharedMemoryCollectives) -> None:
        with pytest.raises(RanksAborted):
            rank.await_call()
        with pytest.raises(RanksAborted):
            rank.all_reduce(torch.ones(3))

    with ThreadPoolExecutor(len(ranks)) as threads:
        running = [threads.submit(wait, rank) for rank in others]
        threads.submit(first.abort).result(PATIENCE)
        for one in running:
            one.result(PATIENCE)
    with pytest.raises(RanksAborted):
        first.await_others()


def test_a_rank_that_waits_sleeps(kernels: CpuKernels) -> None:
    """It would take the core from the rank that it waits for."""
    first, second = shared_ranks(kernels, 2)
    began = threading.Event()

    def wait() -> float:
        began.set()
        before = time.thread_time()
        second.await_call()
        return time.thread_time() - before

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        began.wait(PATIENCE)
        time.sleep(0.5)  # the wait that is measured
        first.begin_call()
        assert waiting.result(PATIENCE) < 0.25


def test_ranks_on_one_core_do_not_starve(kernels: CpuKernels) -> None:
    def run(rank: SharedMemoryCollectives) -> float:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread alone
        for _ in range(300):
            x = rank.all_reduce(torch.ones(1000))
        return float(x.sum())

    assert on_each(shared_ranks(kernels, 4), run) == [4000.0] * 4


def test_calls_are_made_by_rank_0_and_awaited_by_all(ranks: list[SharedMemoryCollectives]) -> None:
    calls: list[list[int]] = [[] for _ in ranks]
    current = [0]

    def run(rank: SharedMemoryCollectives) -> None:
        for number in range(200):
            if rank.rank == 0:
                current[0] = number
                rank.begin_call()
                rank.await_others()
            else:
                rank.await_call()
                calls[rank.rank].append(current[0])
                rank.end_call()

    on_each(ranks, run)
    assert calls[1:] == [list(range(200))] * (len(ranks) - 1)
