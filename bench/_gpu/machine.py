"""The GPU under test: its description, its rates of copies and products, and models with random weights on it."""

import gc
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch

from pagewire.bench._gpu.plan import BLOCK_SIZE, Cell
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend
from pagewire.services.executor.devices.cuda.attention.triton_backend import TritonBackend
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.fused_layers import with_kernels
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.devices.sim.roofline import GPUS, Gpu
from pagewire.services.executor.models.registry import build_model
from pagewire.shared.sampling_parameters import record

GREEDY = record()
COPIED = 1 << 30
"""Bytes of the buffer whose copying is measured: far beyond any cache."""
MATRIX = 8192
"""Edge of the matrices whose product is measured."""
REPEATS = 20
"""Repetitions of a copy or a product whose rate is measured."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, and the rates that shares refer to."""

    runtime: Runtime
    dtype: torch.dtype
    """Dtype of weights and activations."""
    room: int
    """Bytes for weights and KV cache."""
    bandwidth: float
    """Bytes per second of a copy within its memory, read and written bytes together."""
    rate: float
    """Operations per second of a product of large matrices."""
    backend: Callable[[KVPool, Capacity, Runtime], AttentionBackend] = TritonBackend
    """Opens the backend of attention."""
    simulated: Gpu | None = None
    """The simulator's figures of this GPU, if it has any."""


def simulated(name: str) -> Gpu | None:
    """Returns the simulator's figures of the GPU that the driver names so."""
    return next((gpu for key, gpu in GPUS.items() if key.partition("-")[0] in name.lower()), None)


def measured(runtime: Runtime, dtype: torch.dtype, room: int, copied: int = COPIED, matrix: int = MATRIX) -> Machine:
    """Returns the machine with its rates, measured by `copied` bytes and square matrices of edge `matrix`."""
    bandwidth, rate = _copy_rate(runtime, copied), _matrix_rate(runtime, dtype, matrix)
    release(runtime.device)
    return Machine(runtime, dtype, room, bandwidth, rate)


def _copy_rate(runtime: Runtime, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=runtime.device)
    target = torch.empty_like(source)
    return 2 * size / statistics.median(timed(runtime, lambda: target.copy_(source), REPEATS))


def _matrix_rate(runtime: Runtime, dtype: torch.dtype, edge: int) -> float:
    a, b, c = (torch.randn(edge, edge, dtype=dtype, device=runtime.device) for _ in range(3))
    return 2 * edge**3 / statistics.median(timed(runtime, lambda: torch.mm(a, b, out=c), REPEATS))


def timed(runtime: Runtime, work: Callable[[], object], repeats: int) -> list[float]:
    """Returns the seconds of each repetition of `work` by the device's clock, after one that does not count."""
    work()
    marks = [runtime.mark()]
    for _ in range(repeats):
        work()
        marks.append(runtime.mark())
    marks[-1].wait()
    return [late.seconds_since(early) for early, late in pairwise(marks)]


def release(device: torch.device) -> None:
    """Frees unused memory for the next model or for another process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def description(device: torch.device) -> dict[str, str]:
    """Returns names and versions for the raw results."""
    named = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        named = {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": str(properties.total_memory),
            "cuda": str(torch.version.cuda),
        }
    packages = ("torch", "triton", "transformers", "pagewire")
    return named | {"python": platform.python_version()} | {name: version(name) for name in packages}


@contextmanager
def opened(
    machine: Machine, config: dict[str, Any], cells: Sequence[Cell], max_tokens: int, cached: torch.dtype
) -> Iterator[CudaDevice]:
    """Opens the model of a config.json with random weights, as a device with its graphs captured.

    Args:
        machine: where.
        config: sizes of the model.
        cells: what it must have room for, one at a time.
        max_tokens: of the largest step.
        cached: dtype of the KV pool, which is full of random numbers.
    """
    device = _built(machine, config, cells, max_tokens, cached)
    device.capture()
    try:
        yield device
    finally:
        device.close()
        release(machine.runtime.device)


def _built(
    machine: Machine, config: dict[str, Any], cells: Sequence[Cell], max_tokens: int, cached: torch.dtype
) -> CudaDevice:
    runtime, dtype = machine.runtime, machine.dtype
    random = torch.Generator(runtime.device).manual_seed(0)
    plain = build_model(config)
    state = {
        name: torch.empty(weight.shape, dtype=dtype, device=runtime.device).normal_(0, 0.02, generator=random)
        for name, weight in plain.named_parameters()
    }
    plain.load_state_dict(state, assign=True)
    slots, blocks = max(cell.rows for cell in cells), max(cell.blocks for cell in cells)
    longest = max(cell.context for cell in cells) + 1  # the token that the last position samples
    model = with_kernels(plain.requires_grad_(requires_grad=False).eval(), longest, runtime.device)
    capacity = Capacity(blocks, BLOCK_SIZE, slots, longest, model.spec.vocab_size)
    pool = KVPool(model.spec, capacity, dtype, runtime, max_tokens, cached)
    for keys, values in pool.caches:
        for part in (keys, values):
            part.copy_(torch.randn(part.shape[1:], generator=random, dtype=dtype, device=runtime.device))
    return CudaDevice(model, capacity, pool, runtime, max_tokens, backend=machine.backend)
