"""A model on a GPU, or a rank's part of it: loads it, measures the memory that it leaves, and opens the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from pagewire.services.executor.adapters.targets import served_targets
from pagewire.services.executor.devices.candidates import MAX_CANDIDATES
from pagewire.services.executor.devices.capacity import check_length, log_pool, pool_blocks
from pagewire.services.executor.devices.cuda.adapters import CudaAdapters
from pagewire.services.executor.devices.cuda.attention.flashinfer_backend import FlashInferBackend
from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import check_model
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend
from pagewire.services.executor.devices.cuda.attention.triton_backend import TritonBackend
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.fused_layers import with_kernels
from pagewire.services.executor.devices.cuda.graph_sizes import LARGEST, Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.machine import capability
from pagewire.services.executor.devices.cuda.output_ring import CheckTokens
from pagewire.services.executor.devices.cuda.quantized_linear import CudaPacking
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.cuda.slot_tables import GpuSlots
from pagewire.services.executor.devices.cuda.step import Forward, Sampler, StepMemory
from pagewire.services.executor.devices.cuda.step_columns import StepColumns
from pagewire.services.executor.devices.defaults import (
    DRAFT_MODEL_TOKENS,
    DRAFTED_ROWS,
    GPU,
    STEP_DRAFTS,
    slots_of,
)
from pagewire.services.executor.devices.draft_settings import draft_settings
from pagewire.services.executor.devices.gathered_attention import GatheredPool
from pagewire.services.executor.devices.logprobs import LogprobsMode
from pagewire.services.executor.devices.masks import Masks
from pagewire.services.executor.devices.protocol import NO_ROWS, Capacity
from pagewire.services.executor.devices.ranks.startup import Measured
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.registry import is_native, load_model
from pagewire.services.executor.models.shard import ALONE, Collectives, Shard
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import folder_of, max_model_len, read_config
from pagewire.shared.settings.config import Settings, uses_flashinfer
from pagewire.shared.settings.speculation import speculation

FP8 = torch.float8_e4m3fn
FP8_SINCE = (8, 9)
"""First compute capability with instructions to convert to and from fp8."""
GRAPHS = 1 << 30
"""Bytes reserved for the captured graphs of a model, which are allocated after the KV pool."""
BACKENDS: Mapping[str, Callable[[KVPool, Capacity, Runtime], AttentionBackend]] = {
    "triton": TritonBackend,
    "TRITON_ATTN": TritonBackend,
    "flashinfer": FlashInferBackend,
    "FLASHINFER": FlashInferBackend,
}
"""Backends of attention, by the values of the setting `attention_backend`."""


@dataclass(frozen=True)
class CudaPart:
    """A model with its kernels, or a rank's part of it, which has no KV pool yet."""

    settings: Settings
    runtime: Runtime
    model: CausalLM
    length: int
    """Context, in tokens."""
    dtype: torch.dtype
    cached: torch.dtype
    """Dtype of the KV pool."""
    adapters: CudaAdapters | None
    draft: "CudaPart | None" = None
    """The model that drafts, which is whole; None: there is none."""

    @classmethod
    def load(
        cls,
        settings: Settings,
        folder: Path,
        config: dict[str, Any],
        runtime: Runtime,
        shard: Shard = ALONE,
        collectives: Collectives | None = None,
    ) -> "CudaPart":
        """Loads the model of `folder`, whose config.json is `config`; of several ranks, the part of `shard`.

        Raises:
            ConfigurationError: the model cannot be loaded as configured.
        """
        length = max_model_len(settings, config)
        packing = None if settings.quantization == "none" else CudaPacking(fp8=capability() >= FP8_SINCE)
        random = settings.seed if settings.load_format == "dummy" else None
        plain = load_model(folder, config, settings.dtype, packing, random, shard, collectives)
        spec, dtype = plain.spec, plain.embedding.dtype
        check_length(spec, length)
        if uses_flashinfer(settings):
            check_model(spec, dtype)
        if not is_native(config):
            # On the CPU, where the model is now: the kernels of both devices follow the same constants.
            from pagewire.services.executor.devices.self_test import prove  # transformers take seconds to load

            loaded, plain = plain, prove(plain, GatheredPool, settings.block_size, length)
            if settings.enable_lora and plain is loaded:
                raise ConfigurationError("transformers computes this model, without adapters: leave enable-lora out")
        cached = FP8 if settings.kv_cache_dtype == "fp8" else dtype
        targets = served_targets(plain, config) if settings.enable_lora else None
        model = with_kernels(plain, length, runtime.device)
        part = cls(settings, runtime, model, length, dtype, cached, adapters=None)
        if targets is None:
            return part
        most = max(slots_of(settings), part.tokens)
        places, ranks = settings.max_loras, settings.max_lora_rank
        adapters = CudaAdapters(runtime, targets, dtype, places, ranks, most, model.part)
        adapters.attach(model)
        return cls(settings, runtime, model, length, dtype, cached, adapters)

    def with_draft_model(self) -> "CudaPart":
        """Returns this part beside the model that drafts, if the settings name one. Of several ranks only the first has
        it.

        Raises:
            ConfigurationError: that model cannot be loaded, or has another tokenizer.
        """
        small = draft_settings(self.settings, self.length)
        if small is None:
            return self
        # Whatever it drafts changes no text, so its results may depend on the batch.
        small = msgspec.structs.replace(
            small, max_num_batched_tokens=DRAFT_MODEL_TOKENS, batch_invariant=False, attention_backend="triton"
        )
        folder = folder_of(small)
        return replace(self, draft=CudaPart.load(small, folder, read_config(folder), self.runtime))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers of a group, and of as many positions of the model that drafts."""
        return self._own_block_bytes + self._draft_block_bytes

    @property
    def _own_block_bytes(self) -> int:
        return KVPool.bytes_per_block(self.model.spec, self.settings.block_size, self.cached)

    @property
    def _draft_block_bytes(self) -> int:
        if self.draft is None:
            return 0
        groups = len(self.model.spec.groups.windows)
        return -(-self.draft.block_bytes * len(self.draft.model.spec.groups.windows) // groups)

    @property
    def tokens(self) -> int:
        """Tokens that most steps have at most."""
        return self.settings.max_num_batched_tokens or GPU.step_tokens

    def measure(self) -> Measured:
        """Returns how much memory the GPU has left for the KV pool, beside the largest step. All ranks call it."""
        settings, block_bytes, graphs = self.settings, self.block_bytes, GRAPHS
        self._run_padding()
        if self.draft is not None:
            self.draft._run_padding()
            graphs += GRAPHS
        free, total = torch.cuda.mem_get_info()
        usable = free - int(total * (1 - settings.gpu_memory_utilization))
        if settings.model_memory is not None:
            usable = min(usable, settings.model_memory - torch.cuda.memory_reserved())
        return Measured(usable - graphs - block_bytes, free - block_bytes, block_bytes)

    def capacity(self, ranks: Sequence[Measured]) -> Capacity:
        """Returns the sizes of the device, whose pool fits the GPUs of all `ranks`. This is the part of the first.

        Raises:
            ConfigurationError: the pool would be too small, or too large.
        """
        settings, windows = self.settings, self.model.spec.groups.windows
        # A size that is set is that of all ranks together. No rank has more KV heads than this one.
        total = len(ranks) * self._own_block_bytes + self._draft_block_bytes
        per_rank = [(each.room // each.block_bytes, each.limit // each.block_bytes) for each in ranks]
        blocks = min(
            pool_blocks(settings, self.length, total, room * total, limit * total, windows) for room, limit in per_rank
        )
        return self._sizes(blocks, min(slots_of(settings), blocks // len(windows)))

    def open(
        self, capacity: Capacity, masks: Masks | None = None, check_tokens: CheckTokens | None = None
    ) -> CudaDevice:
        """Allocates the KV pool, and captures a graph for every bucket. All ranks call it.

        For `masks` and `check_tokens` see `CudaDevice`.
        """
        draft_model = None
        if self.draft is not None:
            entries = capacity.num_blocks // len(capacity.windows)
            blocks = entries * len(self.draft.model.spec.groups.windows)
            draft_model = self.draft.open(self.draft._sizes(blocks, capacity.max_num_seqs))
        pool = self._pool(capacity)
        log_pool(capacity, self._own_block_bytes)
        device = CudaDevice(
            self.model,
            capacity,
            pool,
            self.runtime,
            self.tokens,
            backend=BACKENDS[self.settings.attention_backend],
            batch_invariant=self.settings.batch_invariant,
            mode=LogprobsMode(self.settings.logprobs_mode),
            adapters=self.adapters,
            masks=masks,
            check_tokens=check_tokens,
            draft_model=draft_model,
        )
        device.capture()
        return device

    def _sizes(self, blocks: int, slots: int) -> Capacity:
        spec, drafts = self.model.spec, speculation(self.settings)
        return Capacity(
            num_blocks=blocks,
            block_size=self.settings.block_size,
            max_num_seqs=slots,
            max_model_len=self.length,
            vocab_size=spec.vocab_size,
            max_candidates=MAX_CANDIDATES,
            step_tokens=self.tokens,
            mixed_prompt_tokens=GPU.mixed_prompt_tokens,
            windows=spec.groups.windows,
            max_drafts=0 if drafts is None else drafts.tokens,
            # The one shape of all steps is the same with drafts and without.
            max_step_drafts=STEP_DRAFTS if drafts is not None or self.settings.batch_invariant else 0,
            max_drafted_step=min(self.tokens, LARGEST),
            max_drafted_rows=DRAFTED_ROWS,
        )

    def _pool(self, capacity: Capacity) -> KVPool:
        return KVPool(self.model.spec, capacity, self.dtype, self.runtime, self.tokens, self.cached)

    def _run_padding(self) -> None:
        """Runs a step of padding only, which takes as much memory as the largest step, and the allocator keeps it."""
        runtime, model, slots = self.runtime, self.model, slots_of(self.settings)
        empty = self._sizes(0, slots)
        backend = BACKENDS[self.settings.attention_backend](self._pool(empty), empty, runtime)
        tokens = min(self.tokens, slots * self.length)  # more positions than the slots have are in no step
        tables, columns = GpuSlots(empty, runtime.device), StepColumns(runtime, slots, depth=1)
        places = slots + empty.max_step_drafts
        memory = StepMemory(slots, places, empty.vocab_size, runtime.device)
        forward = Forward(model, backend, tables, columns, memory, Bucket(min(slots, tokens), tokens, decode=False))
        forward.plan(NO_ROWS)
        forward.run()
        Sampler(model, tables, columns, memory, places).run()
        torch.cuda.synchronize()
