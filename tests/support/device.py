"""Drives a CPU device by hand: steps from plain lists, and the logits behind the tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.services.executor.adapters.targets import targets_of
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.device import Backend, CpuDevice, Done
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.models.config_json import DtypeSetting
from pagewire.services.executor.models.model import AttentionFn, CausalLM
from pagewire.services.executor.models.registry import build_model, is_native, load_model
from pagewire.shared.adapters.files import read_files
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.sampling_parameters import Record, record
from tests.support.checkpoints import CONTEXT, VOCABULARY
from tests.support.reference import ReferenceBackend

BLOCK_SIZE = 8
SLOTS = 8
GREEDY = record()


class Row(NamedTuple):
    """One row of a step."""

    slot: int
    start: int
    ids: Sequence[int]
    samples: bool = True


class Recorder(CausalLM):
    """A model that remembers the last logits that it gave."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model.spec, width=1, tied=True)
        self.model = model
        self.last = torch.empty(0)

    @property
    def embedding(self) -> Tensor:
        return self.model.embedding

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, attend)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.last = self.model.logits(hidden, out)
        return self.last.clone()

    def argmax(self, hidden: Tensor) -> Int64 | None:
        self.last = self.model.logits(hidden)
        return self.model.argmax(hidden)


class Driver:
    """A CPU device over a checkpoint, with `max_num_seqs` sequences of up to `CONTEXT` tokens."""

    def __init__(
        self,
        folder: Path,
        dtype: DtypeSetting = "float32",
        *,
        compiled: bool = True,
        block_size: int = BLOCK_SIZE,
        threads: int = 1,
        packed: bool = False,
        bits: int | None = None,
        cached: torch.dtype | None = None,
        adapters: bool = False,
    ) -> None:
        """`packed`: weights that are stored as integers stay such; `bits`: the others are rounded to so many.

        `cached` is the dtype of the KV pool; None: that of the weights. `adapters`: whether `adapt` may be called.
        """
        cores = Cores(1, torch.set_num_threads)
        self.kernels = CpuKernels(build.load(), threads) if compiled else None
        packing = CpuPacking(self.kernels, bits) if self.kernels and (packed or bits) else None
        self.model = load_model(folder, read_config(folder), dtype, packing)
        self.compiled: CompiledLM | None = None
        self._block_size = block_size
        windows = self.model.spec.groups.windows
        blocks = SLOTS * -(-CONTEXT // block_size) * len(windows)
        capacity = Capacity(blocks, block_size, SLOTS, CONTEXT, VOCABULARY, windows=windows)
        spec, stored = self.model.spec, cached or self.model.embedding.dtype
        backend: Backend
        self.adapters: CpuAdapters | None = None
        if self.kernels is not None:
            config = read_config(folder)
            if is_native(config):
                self.compiled = CompiledLM(self.model, self.kernels, CONTEXT)
                if adapters:
                    targets = targets_of(build_model(config), tuple(config["architectures"]))
                    self.adapters = CpuAdapters(
                        self.kernels, targets, self.compiled.numbers, self.model.embedding.dtype
                    )
            backend = CompiledBackend(self.kernels, spec, capacity, stored, self.adapters)
        else:
            backend = ReferenceBackend(spec, capacity, stored)
        self._recorder = Recorder(self.compiled or self.model)
        self.device = CpuDevice(self._recorder, capacity, backend, cores)
        self._free = np.random.default_rng(0).permutation(blocks).tolist()

    def add(self, slot: int, tokens: int, sampling: Record = GREEDY, stop_ids: Sequence[int] = ()) -> list[int]:
        """A sequence with room for `tokens` positions, in blocks in random order, which are returned."""
        groups = len(self.device.capacity.windows)
        blocks = [self._free.pop() for _ in range(-(-tokens // self._block_size) * groups)]
        self.device.add(slot, blocks, sampling, stop_ids)
        return blocks

    def adapt(self, slot: int, folder: Path, max_rank: int = 64) -> None:
        """Gives the sequence in a slot the adapter of a folder."""
        assert self.adapters is not None
        adapter = SequenceAdapter()
        adapter.put(self.adapters.pack(read_adapter(read_files(folder), self.adapters.targets, max_rank)))
        self.adapters.assign(slot, adapter)

    def step(self, *rows: Row) -> list[int]:
        """The sampled tokens of one step."""
        tokens: list[int] = self.launch(*rows).wait().tolist()
        return tokens

    def launch(self, *rows: Row) -> Done:
        """One step."""
        batch = StepBatch(
            slots=np.array([row.slot for row in rows], np.int64),
            num_computed_tokens=np.array([row.start for row in rows], np.int64),
            query_lens=np.array([len(row.ids) for row in rows], np.int64),
            token_ids=np.array([token for row in rows for token in row.ids], np.int64),
            samples=np.array([row.samples for row in rows], np.bool_),
        )
        return self.device.launch(batch)

    @property
    def logits(self) -> Tensor:
        """[rows that sampled, V] of the last step."""
        return self._recorder.last

    def generate(self, slot: int, prompt: Sequence[int], count: int, chunk: int = CONTEXT) -> list[int]:
        """Prefills `prompt` in chunks, then decodes until there are `count` tokens."""
        ids = list(prompt)
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            (token,) = self.step(Row(slot, start, part, samples=start + len(part) == len(prompt)))
        ids.append(token)
        while len(ids) < len(prompt) + count:
            ids += self.step(Row(slot, len(ids) - 1, ids[-1:]))
        return ids[len(prompt) :]
