"""Several ranks of one model as threads of one process, which meet at barriers."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from pagewire.services.executor.devices.gathered_attention import dense_attention
from pagewire.services.executor.models.model import AttentionFn, CausalLM
from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.shard import Collectives, Shard
from pagewire.services.executor.models.weights import Packing
from pagewire.shared.models.model_folder import read_config
from tests.support.waiting import PATIENCE

R = TypeVar("R")


class Board:
    """The tensors that the ranks show each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.shown: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=PATIENCE)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        self.shown[rank] = x
        self.barrier.wait()
        tensors = [shown.clone() for shown in self.shown]
        self.barrier.wait()
        return tensors


class ThreadCollectives(Collectives):
    """The collectives of one rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self.calls = 0

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls += 1
        parts = self._board.exchange(self._rank, x)
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in parts:
            total += part.float()
        return x.copy_(total)

    @override
    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self._board.exchange(self._rank, part)
        assert [part.shape[1] for part in parts] == list(sizes)
        return torch.cat(parts, dim=1)


def on_ranks(size: int, call: Callable[[Shard, ThreadCollectives], R]) -> list[R]:
    """The results of all ranks."""
    board = Board(size)
    with ThreadPoolExecutor(size) as threads:

        def run(rank: int) -> R:
            try:
                return call(Shard(rank, size), ThreadCollectives(board, rank))
            except BaseException:
                board.barrier.abort()
                raise

        calls = [threads.submit(run, rank) for rank in range(size)]
        errors = [error for one in calls if (error := one.exception()) is not None]
        for error in errors:
            if "Broken" not in type(error).__name__:
                raise error
        return [one.result() for one in calls]


def load_rank(
    folder: Path, shard: Shard, collectives: Collectives, packing: Packing | None = None, random: int | None = None
) -> CausalLM:
    """A rank's part of the model of a folder, in float32."""
    return load_model(folder, read_config(folder), "float32", packing, random, shard, collectives)


def attention(model: CausalLM) -> AttentionFn:
    """Attention of one text, whose keys and values are all in the same step."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return dense_attention(model.spec.layers[layer], q, k, v, sinks)

    return attend


def logits_of(model: CausalLM, ids: Sequence[int]) -> Tensor:
    """The logits [T, V] of every token of a text."""
    attend = attention(model)
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(ids), torch.arange(len(ids)), attend)).clone()


def greedy(model: CausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """The most likely tokens behind a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def without_collectives() -> ThreadCollectives:
    """Collectives of a rank that loads its weights and computes nothing."""
    return ThreadCollectives(Board(1), 0)
