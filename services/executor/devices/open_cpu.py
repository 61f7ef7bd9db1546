"""Opens the CPU: loads the model, on several ranks if asked, and the one that drafts for it, with their KV pools."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.adapters.targets import served_targets
from pagewire.services.executor.devices.candidates import MAX_CANDIDATES
from pagewire.services.executor.devices.capacity import check_length, log_pool, pool_blocks, usable_memory
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.device import CpuDevice
from pagewire.services.executor.devices.cpu.loading import cache_dtype, load_part
from pagewire.services.executor.devices.cpu.ranks.device import RankedCpuDevice
from pagewire.services.executor.devices.cpu.ranks.followers import CpuFollowers
from pagewire.services.executor.devices.cpu.ranks.leader import LeadingBackend, LeadingLM
from pagewire.services.executor.devices.defaults import MAX_DRAFTS, slots_of
from pagewire.services.executor.devices.draft_settings import draft_settings
from pagewire.services.executor.devices.logprobs import LogprobsMode
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.devices.ranks.shard_settings import shard_of
from pagewire.services.executor.models.model import CausalLM, ModelCut
from pagewire.services.executor.models.registry import is_native
from pagewire.services.executor.rank_processes import MAX_RANKS
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.memory_need import POOL_SHARE
from pagewire.shared.models.model_folder import folder_of, max_model_len, read_config
from pagewire.shared.process.linux_process import use_huge_pages
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import draft_model

MAX_STEP_TOKENS = 4096
"""Maximum tokens of a step on a CPU: beyond it, the fixed cost of a step is negligible even for a small model."""
DRAFTED_ROWS = 24
"""Rows that sample beyond which nothing is drafted: their step has no position left that costs less than a token
brings, and measured times are not exact enough to find that out."""

_log = structlog.get_logger()


def open_cpu(settings: Settings, folder: Path) -> CpuDevice:
    """Opens this machine's CPU, loads the model of `folder` and allocates the KV pool.

    Raises:
        ConfigurationError: the model, or the one that drafts, cannot be loaded, or the pool would be too small.
        DeviceLost: a rank has ended, or does not arrive in time.
    """
    cores, ranks = len(os.sched_getaffinity(0)), settings.tensor_parallel_size
    if ranks > MAX_RANKS:
        raise ConfigurationError(f"tensor-parallel-size {ranks} is too large for a CPU: set it to at most {MAX_RANKS}")
    if ranks * settings.data_parallel_size > cores:
        _log.warning("ranks_share_cores", ranks=ranks * settings.data_parallel_size, cores=cores)
    _log.info("loading_kernels", first_time="they are compiled, which takes about 15 s")
    kernels = CpuKernels(build.load(), threads_of(settings, cores))
    if ranks == 1:
        return _open(settings, folder, kernels)
    followers = CpuFollowers(settings, folder, kernels)
    try:
        return _open(settings, folder, kernels, followers)
    except BaseException:
        followers.close()
        raise


def threads_of(settings: Settings, cores: int) -> int:
    """Returns the maximum threads of each rank: replicas and ranks have equal parts of the cores, of which the other
    services have one if there are more than two.

    >>> settings = Settings(data_parallel_size=2, tensor_parallel_size=torch.get_num_threads())
    >>> threads_of(settings, cores=64)
    1
    """
    threads = min(torch.get_num_threads(), cores - 1 if cores > 2 else cores)
    return max(1, threads // (settings.data_parallel_size * settings.tensor_parallel_size))


def _open(settings: Settings, folder: Path, kernels: CpuKernels, followers: CpuFollowers | None = None) -> CpuDevice:
    loaded = _load(settings, folder, kernels, followers)
    if followers is not None:
        followers.await_loaded()
    if draft_model(settings) is not None and not loaded.compiled:
        raise ConfigurationError("transformers computes this model, without drafted tokens: set spec-type to none")
    small = draft_settings(settings, loaded.length)
    draft = None if small is None else _load(small, folder_of(small), kernels)

    def compute_on(count: int) -> None:
        kernels.threads = count
        # Beside the kernels, torch has only small operations left.
        torch.set_num_threads(1 if loaded.compiled else count)

    shared_cores = Cores(kernels.threads, compute_on)
    free, windows, block_bytes = usable_memory(settings), loaded.windows, loaded.block_bytes
    if draft is not None:  # whose pool has blocks for as many positions
        block_bytes += -(-draft.block_bytes * len(draft.windows) // len(windows))
    blocks = pool_blocks(settings, loaded.length, block_bytes, int(free * POOL_SHARE), free, windows)
    slots = min(slots_of(settings), blocks // len(windows))
    drafting = None
    if draft is not None:
        drafting = draft.open(settings, blocks // len(windows) * len(draft.windows), slots, shared_cores)
    device = loaded.open(settings, blocks, slots, shared_cores, drafting, followers)
    use_huge_pages()
    log_pool(device.capacity, block_bytes)
    return device


@dataclass(frozen=True)
class _Loaded:
    """A model with its kernels, which has no KV pool yet."""

    model: CausalLM
    kernels: CpuKernels
    length: int
    """Context, in tokens."""
    cached: torch.dtype
    """Dtype of the KV pool."""
    block_bytes: int
    """Bytes of a block over all layers of a group, on all ranks together."""
    width: int
    """Features of a hidden state."""
    compiled: bool
    """Whether compiled kernels compute the layers."""
    adapters: CpuAdapters | None
    part: ModelCut | None
    """The rank's part of the model; None: there is one rank."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of the groups of layers, as in `Capacity`."""
        return self.model.spec.groups.windows

    def open(
        self,
        settings: Settings,
        blocks: int,
        slots: int,
        cores: Cores,
        draft: CpuDevice | None = None,
        followers: CpuFollowers | None = None,
    ) -> CpuDevice:
        """Allocates a KV pool of so many blocks; returns the device, for which `draft` computes drafts.

        `followers` are the other ranks; None: there are none.
        """
        spec = self.model.spec
        capacity = Capacity(
            num_blocks=blocks,
            block_size=settings.block_size,
            max_num_seqs=slots,
            max_model_len=self.length,
            vocab_size=spec.vocab_size,
            max_candidates=MAX_CANDIDATES,
            max_step_tokens=MAX_STEP_TOKENS,
            windows=self.windows,
            pool_bytes=blocks * self.block_bytes + (0 if draft is None else draft.capacity.pool_bytes),
            max_drafts=MAX_DRAFTS if self.compiled else 0,  # the others give a position another result
            max_drafted_rows=DRAFTED_ROWS,
        )
        mode = LogprobsMode(settings.logprobs_mode)
        if followers is not None:
            calls = followers.open_calls(capacity, self.width)
            adapters = None if self.adapters is None else followers.leading(self.adapters, self.part)
            leading = LeadingLM(self.model, calls, self.kernels, adapters)
            shared = LeadingBackend(self.kernels, spec, capacity, self.cached, self.adapters, calls)
            return RankedCpuDevice(leading, capacity, shared, cores, mode, adapters, draft, followers, calls)
        backend = CompiledBackend(self.kernels, spec, capacity, self.cached, self.adapters)
        return CpuDevice(self.model, capacity, backend, cores, mode, self.adapters, draft)


def _load(settings: Settings, folder: Path, kernels: CpuKernels, followers: CpuFollowers | None = None) -> _Loaded:
    """Loads a model, or the part of rank 0 if there are other ranks."""
    config = read_config(folder)
    length = max_model_len(settings, config)
    native = is_native(config)
    if followers is None:
        loaded = load_part(settings, folder, config, kernels)
    else:
        loaded = load_part(settings, folder, config, kernels, shard_of(settings, 0), followers.collectives)

    model, part = loaded, loaded.part
    spec, (_, width), dtype = model.spec, model.embedding.shape, model.embedding.dtype
    cached = cache_dtype(settings, model)
    check_length(spec, length)
    block_bytes = CompiledBackend.bytes_per_block(kernels, spec, settings.block_size, cached)
    if followers is not None:
        block_bytes *= settings.tensor_parallel_size  # no rank has more KV heads than this one
    if not native:
        from pagewire.services.executor.devices.self_test import prove  # transformers take seconds to load

        model = prove(loaded, functools.partial(CompiledBackend, kernels), settings.block_size, length)
    compiled = native or model is not loaded
    del loaded
    if settings.enable_lora and not compiled:
        raise ConfigurationError("transformers computes this model, without adapters: leave enable-lora out")
    adapters = None
    if compiled:
        targets = served_targets(model, config) if settings.enable_lora else None
        model = CompiledLM(model, kernels, length)
        if targets is not None:
            adapters = CpuAdapters(kernels, targets, model.numbers, dtype)
    return _Loaded(model, kernels, length, cached, block_bytes, width, compiled, adapters, part)
