"""A rank other than 0: a process that loads its part of a model and repeats the calls of rank 0 until that ends."""

import gc
import mmap
import os
import socket
import sys
import threading
from pathlib import Path

import structlog
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.collectives import RanksAborted, SharedMemoryCollectives, memory_bytes
from pagewire.kernels.cpu.kernels import CpuKernels, Int64
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.cores import use_shared_niceness
from pagewire.services.executor.devices.cpu.loading import cache_dtype, load_part, shard_of
from pagewire.services.executor.devices.cpu.ranks.shared_calls import Call, CallSizes, SharedCalls
from pagewire.services.executor.devices.cpu.ranks.startup import Line, Loaded, Ready, Sizes, Start, fingerprint_of
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import max_model_len, read_config
from pagewire.shared.process.linux_process import die_with, use_batch_scheduling
from pagewire.shared.telemetry import logs

BEAT_INTERVAL = 0.1
"""Seconds between two signs of life."""

_log = structlog.get_logger()


def main() -> None:
    """Entry point of the process; its arguments are the file descriptor of its line to rank 0 and the id of that."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    line = Line(socket.socket(fileno=descriptor))
    try:
        start = line.receive(Start)
    except EOFError:  # rank 0 has ended, or needs no other rank
        return
    use_batch_scheduling()
    logs.configure(start.settings, service="executor", rank=str(start.rank))
    try:
        follow(line, start)
    except RanksAborted:
        _log.info("rank_ended")


def follow(line: Line, start: Start) -> None:
    """Loads a rank's part of the model and computes until rank 0 ends the ranks.

    Raises:
        RanksAborted: it has done so, or a rank is lost.
    """
    settings, folder = start.settings, Path(start.folder)
    size = settings.tensor_parallel_size
    kernels = CpuKernels(build.load(), start.threads)
    torch.set_num_threads(1)
    first = memory_bytes(kernels, size)
    collectives = SharedMemoryCollectives(kernels, mmap.mmap(start.memory, first), start.rank, size)
    config = read_config(folder)
    try:
        part = load_part(settings, folder, config, kernels, shard_of(settings, start.rank), collectives)
    except ConfigurationError as error:
        line.send(Loaded(refusal=str(error)))
        return
    spec, cached, width = part.spec, cache_dtype(settings, part), part.embedding.shape[1]
    model = CompiledLM(part, kernels, max_model_len(settings, config))
    del part
    line.send(Loaded(fingerprint_of(settings, folder)))

    capacity = line.receive(Sizes).capacity
    sizes = CallSizes.of(capacity, width)
    calls = SharedCalls(mmap.mmap(start.memory, sizes.nbytes, offset=first), sizes, collectives)
    backend = CompiledBackend(kernels, spec, capacity, cached)
    slots = CpuSlots(capacity, calls.tables)
    use_shared_niceness()
    beating = threading.Thread(target=_beat, args=(calls.beats, start.rank), daemon=True)
    beating.start()
    gc.collect()
    gc.freeze()
    line.send(Ready(beating.native_id or os.getpid()))
    with torch.inference_mode():
        while True:
            repeat(calls, collectives, kernels, model, backend, slots)


def repeat(
    calls: SharedCalls,
    collectives: SharedMemoryCollectives,
    kernels: CpuKernels,
    model: CompiledLM,
    backend: CompiledBackend,
    slots: CpuSlots,
) -> None:
    """Repeats the next call of rank 0 with this rank's part.

    Raises:
        RanksAborted: a rank is lost.
    """
    call, kernels.threads = calls.take()
    match call:
        case Call.FORWARD:
            batch = calls.batch
            ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
            model.forward(ids, positions, backend.attention(batch, slots))
        case Call.LOGITS:
            model.logits(calls.hidden)
        case Call.ARGMAX:
            model.argmax(calls.hidden)
        case Call.COPY:
            sources, targets = calls.blocks
            backend.copy(sources.tolist(), targets.tolist())
    collectives.end_call()


def _beat(beats: Int64, rank: int) -> None:
    """Shows that the process is not stopped, until it ends."""
    never = threading.Event()
    while not never.wait(BEAT_INTERVAL):
        beats[rank] += 1
