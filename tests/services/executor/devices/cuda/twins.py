"""One model on the device under test and on the CPU device, and sequences that run through either."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.services.executor.adapters.targets import served_targets
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.device import CpuDevice
from pagewire.services.executor.devices.cuda.adapters import CudaAdapters
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend
from pagewire.services.executor.devices.cuda.attention.triton_backend import TritonBackend
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.fused_layers import with_kernels
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.quantized_linear import CudaPacking
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime, Runtime
from pagewire.services.executor.devices.protocol import Capacity, Device, Edits, LoadedAdapter, StepBatch
from pagewire.services.executor.models.config_json import DtypeSetting
from pagewire.services.executor.models.model import ModelSpec
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.adapters.files import read_files
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.sampling_parameters import Record, record
from tests.support.checkpoints import CONTEXT, VOCABULARY, checkpoint
from tests.support.host_runtime import HostRuntime
from tests.support.reference import ReferenceBackend

SLOTS, BLOCK_SIZE, BLOCKS = 4, 16, 40
CAPACITY = Capacity(BLOCKS, BLOCK_SIZE, SLOTS, CONTEXT, VOCABULARY)
GREEDY = record()
MAX_TOKENS = 8
"""Tokens of the largest captured step."""
DTYPES: dict[torch.dtype, DtypeSetting] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def capacity_of(spec: ModelSpec) -> Capacity:
    windows = spec.groups.windows
    return replace(CAPACITY, num_blocks=BLOCKS * len(windows), windows=windows)


def runtime() -> Runtime:
    return CudaRuntime() if torch.cuda.is_available() else HostRuntime()


def cuda_device(
    model: str | Path,
    *,
    captured: bool = True,
    cached: torch.dtype | None = None,
    backend: Callable[[KVPool, Capacity, Runtime], AttentionBackend] = TritonBackend,
    batch_invariant: bool = False,
    packing: CudaPacking | None = None,
    dtype: torch.dtype = torch.float32,
    max_loras: int = 0,
    step_drafts: int = 0,
) -> CudaDevice:
    """`model` is a folder, or the name of a tiny checkpoint. `max_loras` adapters of up to 64 ranks run in a step.
    `step_drafts` drafted tokens are verified in a step at most."""
    folder, where = _folder(model), runtime()
    config = read_config(folder)
    plain = load_model(folder, config, DTYPES[dtype], packing)
    capacity = replace(capacity_of(plain.spec), max_drafts=step_drafts, max_step_drafts=step_drafts)
    pool = KVPool(plain.spec, capacity, dtype, where, MAX_TOKENS, cached)
    targets = served_targets(plain, config)
    loaded = with_kernels(plain, CONTEXT, where.device)
    adapters = None
    if max_loras:
        adapters = CudaAdapters(where, targets, dtype, max_loras, 64, MAX_TOKENS)
        adapters.attach(loaded)
    device = CudaDevice(
        loaded,
        capacity,
        pool,
        where,
        MAX_TOKENS,
        backend=backend,
        batch_invariant=batch_invariant,
        adapters=adapters,
    )
    if captured:
        device.capture()
    return device


def cpu_device(model: str | Path, dtype: torch.dtype = torch.float32) -> CpuDevice:
    """Returns a device as `cuda_device` does."""
    plain = load_model(_folder(model), read_config(_folder(model)), DTYPES[dtype])
    capacity = capacity_of(plain.spec)
    backend = ReferenceBackend(plain.spec, capacity, dtype)
    return CpuDevice(plain, capacity, backend, Cores(1, torch.set_num_threads))


def compiled_device(model: str | Path, dtype: torch.dtype = torch.float32) -> CpuDevice:
    """Returns a CPU device with compiled kernels, whose slots may have adapters."""
    config = read_config(_folder(model))
    plain, kernels = load_model(_folder(model), config, DTYPES[dtype]), CpuKernels(build.load(), 1)
    capacity, targets = capacity_of(plain.spec), served_targets(plain, config)
    compiled = CompiledLM(plain, kernels, CONTEXT)
    adapters = CpuAdapters(kernels, targets, compiled.numbers, dtype)
    backend = CompiledBackend(kernels, plain.spec, capacity, dtype, adapters)
    return CpuDevice(compiled, capacity, backend, Cores(1, torch.set_num_threads), adapters=adapters)


def _folder(model: str | Path) -> Path:
    return model if isinstance(model, Path) else checkpoint(model)


@dataclass(slots=True)
class Text:
    """A prompt, then what the device makes of it."""

    tokens: list[int]
    end: int
    sampling: Record = field(default_factory=record)
    stop_ids: Sequence[int] = ()
    edits: Edits | None = None
    adapter: Path | None = None
    """Folder of its adapter, which the device then has; None: it has none."""
    slot: int | None = None
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    """Per entry, one of each group; -1 was given back."""

    @property
    def unfinished(self) -> bool:
        return len(self.tokens) < self.end


def batch_of(*rows: tuple[int, int, Sequence[int], bool], next_ids: Sequence[int] | None = None) -> StepBatch:
    """Rows are (slot, start, ids, samples)."""
    return StepBatch(
        slots=np.array([row[0] for row in rows], np.int64),
        num_computed_tokens=np.array([row[1] for row in rows], np.int64),
        query_lens=np.array([len(row[2]) for row in rows], np.int64),
        token_ids=np.array([token for row in rows for token in row[2]], np.int64),
        samples=np.array([row[3] for row in rows], np.bool_),
        next_ids=None if next_ids is None else np.array(next_ids, np.int64),
    )


class Host:
    """Runs texts through a device in steps of random rows, over random blocks, with preemptions now and then.

    What the windows of a text have left behind goes to other texts at once.
    """

    def __init__(self, device: Device, seed: int, preempt: float = 0.1) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._preempt = preempt
        blocks = device.capacity.num_blocks
        self._blocks = self._random.sample(range(blocks), blocks)
        self._slots = self._random.sample(range(SLOTS), SLOTS)
        self._adapters: dict[Path, SequenceAdapter] = {}

    def run(self, texts: Sequence[Text]) -> list[list[int]]:
        """The tokens of all texts, prompts included."""
        while open_ := [text for text in texts if text.unfinished]:
            for text in open_:
                if text.slot is None and self._slots:
                    self._add(text)
            running = [text for text in open_ if text.slot is not None]
            self._step(self._random.sample(running, self._random.randint((len(running) + 1) // 2, len(running))))
            for text in texts:
                if text.slot is not None and (not text.unfinished or self._random.random() < self._preempt):
                    self._remove(text)
        return [text.tokens for text in texts]

    def _step(self, texts: Sequence[Text]) -> None:
        rows = []
        for text in texts:
            assert text.slot is not None
            left = len(text.tokens) - text.computed
            end = text.computed + self._random.randint(min(left, 6), min(left, 20))
            self._give_back(text)
            for _ in range(-(-end // BLOCK_SIZE) - len(text.blocks)):
                text.blocks.append(self._entry())
                self._device.extend([text.slot], text.blocks[-1])
            rows.append((text.slot, text.computed, text.tokens[text.computed : end], end == len(text.tokens)))
            text.computed = end
        sampled = self._device.launch(batch_of(*rows)).wait().tolist()
        assert [token >= 0 for token in sampled] == [row[3] for row in rows]
        for text, token in zip(texts, sampled, strict=True):
            text.tokens += [token] if token >= 0 else []

    def _add(self, text: Text) -> None:
        text.slot, text.computed, text.blocks = self._slots.pop(), 0, [self._entry()]
        edits = text.edits
        if edits is not None:
            edits = replace(edits, tokens=np.array(text.tokens))
        self._device.add(text.slot, text.blocks[0], text.sampling, text.stop_ids, edits)
        if text.adapter is not None:
            assert self._device.adapters is not None
            self._device.adapters.assign(text.slot, self._loaded(text.adapter))

    def _loaded(self, folder: Path) -> LoadedAdapter:
        if folder not in self._adapters:
            assert self._device.adapters is not None
            self._adapters[folder] = loaded = SequenceAdapter()
            loaded.put(self._device.adapters.pack(read_adapter(read_files(folder), self._device.adapters.targets, 64)))
        return self._adapters[folder]

    def _remove(self, text: Text) -> None:
        assert text.slot is not None
        self._device.remove(text.slot)
        if text.adapter is not None and self._device.adapters is not None:
            self._device.adapters.clear(text.slot)
        self._slots.append(text.slot)
        self._blocks += [block for entry in text.blocks for block in entry if block >= 0]
        text.slot = None

    def _entry(self) -> list[int]:
        return [self._blocks.pop() for _ in self._device.capacity.windows]

    def _give_back(self, text: Text) -> None:
        for group, window in enumerate(self._device.capacity.windows):
            for entry in text.blocks[: max(0, text.computed - window + 1) // BLOCK_SIZE] if window else []:
                if entry[group] >= 0:
                    self._blocks.append(entry[group])
                    entry[group] = -1
