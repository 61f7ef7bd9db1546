"""A rank other than 0: a process that loads its part of a model and repeats the calls of rank 0 until that ends."""

import gc
import mmap
import socket
from contextlib import suppress
from pathlib import Path

import structlog
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.collectives import RanksAborted, SharedMemoryCollectives, memory_bytes
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.adapters.targets import served_targets
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.cores import use_shared_niceness
from pagewire.services.executor.devices.cpu.loading import cache_dtype, load_part
from pagewire.services.executor.devices.cpu.ranks.shared_calls import Call, CallSizes, SharedCalls
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.ranks.adapters import FollowingAdapters
from pagewire.services.executor.devices.ranks.follower import say_ready
from pagewire.services.executor.devices.ranks.shard_settings import shard_of
from pagewire.services.executor.devices.ranks.startup import Connection, Loaded, Sizes, Start, fingerprint_of
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.registry import is_native
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import max_model_len, read_config
from pagewire.shared.process.linux_process import use_batch_scheduling, use_huge_pages

_log = structlog.get_logger()


def follow(connection: Connection, start: Start) -> None:
    """Loads a rank's part of the model and computes until rank 0 ends the ranks, or a rank is lost."""
    use_batch_scheduling()
    settings, folder = start.settings, Path(start.folder)
    size = settings.tensor_parallel_size
    kernels = CpuKernels(build.load(), start.threads)
    torch.set_num_threads(start.threads)
    first = memory_bytes(kernels, size)
    collectives = SharedMemoryCollectives(kernels, mmap.mmap(start.memory, first), start.rank, size)
    config = read_config(folder)
    try:
        part = load_part(settings, folder, config, kernels, shard_of(settings, start.rank), collectives)
    except ConfigurationError as error:
        connection.send(Loaded(refusal=str(error)))
        return
    spec, cached, (_, width), dtype = part.spec, cache_dtype(settings, part), part.embedding.shape, part.embedding.dtype
    model, own = part, None
    if is_native(config):
        targets = served_targets(part, config) if settings.enable_lora else None
        model = compiled = CompiledLM(part, kernels, max_model_len(settings, config))
        own = None if targets is None else CpuAdapters(kernels, targets, compiled.numbers, dtype)
        torch.set_num_threads(1)  # beside the kernels, only small operations are left
    del part
    connection.send(Loaded(fingerprint_of(settings, folder)))

    capacity = connection.receive(Sizes).capacity
    sizes = CallSizes.of(capacity, width)
    calls = SharedCalls(mmap.mmap(start.memory, sizes.nbytes, offset=first), sizes, collectives)
    backend = CompiledBackend(kernels, spec, capacity, cached, own)
    adapters = None if own is None else FollowingAdapters(own, Connection(socket.socket(fileno=start.adapters)))
    slots = CpuSlots(capacity, calls.tables)
    use_shared_niceness()
    gc.collect()
    gc.freeze()
    use_huge_pages()
    say_ready(connection, calls.heartbeats, start.rank)
    with torch.inference_mode(), suppress(RanksAborted):
        while True:
            repeat(calls, collectives, kernels, model, backend, slots, adapters)
    _log.info("rank_ended")


def repeat(
    calls: SharedCalls,
    collectives: SharedMemoryCollectives,
    kernels: CpuKernels,
    model: CausalLM,
    backend: CompiledBackend,
    slots: CpuSlots,
    adapters: FollowingAdapters | None,
) -> None:
    """Repeats the next call of rank 0 with this rank's part.

    Raises:
        RanksAborted: a rank is lost.
    """
    call, kernels.threads = calls.take()
    match call:
        case Call.FORWARD:
            if not isinstance(model, CompiledLM):  # torch computes the products
                torch.set_num_threads(kernels.threads)
            batch = calls.batch
            if adapters is not None:
                adapters.prepare(batch.slots, calls.adapters)
            ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
            model.forward(ids, positions, backend.attention(batch, slots))
        case Call.LOGITS:
            model.logits(calls.hidden)
        case Call.ARGMAX:
            model.argmax(calls.hidden)
        case Call.COPY:
            sources, targets = calls.blocks
            backend.copy(sources.tolist(), targets.tolist())
        case Call.FORGET:
            assert adapters is not None
            adapters.forget(calls.forgotten.tolist())
    collectives.end_call()
