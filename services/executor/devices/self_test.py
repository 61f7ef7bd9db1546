"""Proves at start that a model of `transformers` computes on paged attention what it computes on its own."""

import time
from typing import Protocol

import numpy as np
import structlog
import torch

from pagewire.services.executor.devices.cpu import Backend
from pagewire.services.executor.devices.protocol import Capacity, StepBatch
from pagewire.services.executor.devices.slots import DeviceSlots
from pagewire.services.executor.models.model import CausalLM, ModelSpec
from pagewire.services.executor.models.transformers_backend.model import TransformersLM
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.sampling import record

STEPS = (
    ((0, 0, 9), (1, 0, 5)),
    ((1, 5, 6), (0, 9, 10)),
    ((0, 10, 21), (1, 6, 14)),
    ((0, 21, 22),),
)
"""Rows of each step: slot, first position and position after the last one. Prompts are cut, packed and decoded."""
LENGTHS = (22, 14)
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Root mean square of the difference of a position's logits, relative to their standard deviation."""

_log = structlog.get_logger()


class OpenBackend(Protocol):
    """Opens the attention of a device."""

    def __call__(self, spec: ModelSpec, capacity: Capacity, dtype: torch.dtype) -> Backend:
        """Returns a new backend."""


def prove(model: CausalLM, open_backend: OpenBackend, block_size: int, max_model_len: int) -> None:
    """Runs the self-test of a `TransformersLM`.

    Raises:
        ConfigurationError: it fails.
    """
    if not isinstance(model, TransformersLM):
        raise TypeError("a native family needs no self-test")
    began = time.monotonic()
    error = self_test(model, open_backend, block_size, max_model_len)
    _log.info("self_test", difference=float(f"{error:.2g}"), seconds=round(time.monotonic() - began, 2))


def self_test(model: TransformersLM, open_backend: OpenBackend, block_size: int, max_model_len: int) -> float:
    """Returns the largest relative difference of the logits to those of the model's own attention.

    In half precision it is that of the worst position but a quarter: where two experts are nearly equal, rounding may
    choose the other one.

    Raises:
        ConfigurationError: the difference is larger than rounding explains.
    """
    lengths = [min(length, max_model_len) for length in LENGTHS]
    random = np.random.default_rng(0)
    texts = [random.integers(0, model.embedding.shape[0], length) for length in lengths]
    windows = model.spec.groups.windows
    blocks = -(-max(lengths) // block_size) * len(windows)
    capacity = Capacity(2 * blocks, block_size, 2, max(lengths), model.spec.vocab_size, windows=windows)
    backend, slots = open_backend(model.spec, capacity, model.embedding.dtype), DeviceSlots(capacity)
    for slot in range(2):
        slots.add(slot, range(2 * blocks - 1 - slot, -1, -2), record(), (), None)
    found = [torch.empty(length, model.spec.vocab_size) for length in lengths]
    with torch.inference_mode():
        for step in STEPS:
            rows = [(slot, first, min(stop, lengths[slot])) for slot, first, stop in step if first < lengths[slot]]
            if not rows:
                continue
            batch = StepBatch(
                slots=np.array([slot for slot, _, _ in rows]),
                num_computed_tokens=np.array([first for _, first, _ in rows]),
                query_lens=np.array([stop - first for _, first, stop in rows]),
                token_ids=np.concatenate([texts[slot][first:stop] for slot, first, stop in rows]),
                samples=np.ones(len(rows), np.bool_),
            )
            attend = backend.attention(batch, slots, batch.positions)
            hidden = model(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), attend)
            parts = torch.split(model.logits(hidden), batch.query_lens.tolist())
            for (slot, first, stop), logits in zip(rows, parts, strict=True):
                found[slot][first:stop] = logits
        expected = [model.eager_logits(torch.from_numpy(text)) for text in texts]
    errors = torch.cat([_errors(mine, theirs) for mine, theirs in zip(found, expected, strict=True)])
    dtype = model.embedding.dtype
    error = float(errors.max() if dtype == torch.float32 else errors.quantile(0.75))
    if not error <= TOLERANCE[dtype]:
        raise ConfigurationError(
            f"model_type {model.model.config.model_type} is not supported: on paged attention its logits differ from "
            f"those of transformers by {error:.2g} of their spread, and rounding explains {TOLERANCE[dtype]:g}"
        )
    return error


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the error of each position [L] of logits [L, V]; see `TOLERANCE`."""
    seen = expected.isfinite()
    difference = (found - expected).where(seen, 0.0).pow(2).mean(dim=1).sqrt()
    spread = expected.where(seen, 0.0).std(dim=1)
    return difference / spread.clamp_min(1e-12)
