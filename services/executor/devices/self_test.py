"""Proves at start that a model of `transformers` computes on paged attention what it computes on its own."""

import time
from typing import Protocol

import numpy as np
import structlog
import torch

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices.cpu.device import Backend
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.protocol import Capacity, StepBatch
from pagewire.services.executor.models.model import CausalLM, ModelSpec
from pagewire.services.executor.models.transformers_backend.model import TransformersLM
from pagewire.services.executor.models.transformers_backend.recognition import recognize
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.sampling_parameters import record

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

LEAST = 1e-4
"""Error that a decoder of this project may have, however small that of the model itself is."""

_log = structlog.get_logger()


class OpenBackend(Protocol):
    """Opens the attention of a device."""

    def __call__(self, spec: ModelSpec, capacity: Capacity, dtype: torch.dtype) -> Backend:
        """Returns a new backend."""


def prove(model: CausalLM, open_backend: OpenBackend, block_size: int, max_model_len: int) -> CausalLM:
    """Returns the model to serve in place of a `TransformersLM` that passes the self-test.

    It is a decoder of this project, with the same weights, if there is one that passes too, and else the model itself.

    Raises:
        ConfigurationError: the model does not pass.
    """
    if not isinstance(model, TransformersLM):
        raise TypeError("a native family needs no self-test")
    began = time.monotonic()
    test = SelfTest(model, open_backend, block_size, max_model_len)
    error = test.run(model)
    decoder = recognize(model.model, model.spec)
    if decoder is not None and not max(test.error(decoder), test.far_error(decoder)) <= max(2 * error, LEAST):
        decoder = None
    seconds = round(time.monotonic() - began, 2)
    _log.info("self_test", difference=float(f"{error:.2g}"), own_layers=decoder is not None, seconds=seconds)
    return decoder or model


class SelfTest:
    """The comparison of models with the attention of `transformers` on short random texts."""

    def __init__(self, model: TransformersLM, open_backend: OpenBackend, block_size: int, max_model_len: int) -> None:
        """`model` says what is right."""
        self._open, self._dtype = open_backend, model.embedding.dtype
        self._name = model.model.config.model_type
        self._lengths = [min(length, max_model_len) for length in LENGTHS]
        random = np.random.default_rng(0)
        self._texts = [random.integers(0, model.embedding.shape[0], length) for length in self._lengths]
        windows, longest = model.spec.groups.windows, max(self._lengths)
        self._blocks = -(-longest // block_size) * len(windows)
        self._capacity = Capacity(2 * self._blocks, block_size, 2, longest, model.spec.vocab_size, windows=windows)
        with torch.inference_mode():
            texts = [torch.from_numpy(text) for text in self._texts]
            self._expected = [model.eager_logits(text, torch.arange(len(text))) for text in texts]
            # Some models scale queries or rotate otherwise where only long texts reach.
            self._far_text, self._far = texts[-1], torch.arange(max_model_len - len(texts[-1]), max_model_len)
            self._far_expected = model.eager_logits(self._far_text, self._far)

    def run(self, model: CausalLM) -> float:
        """Returns `error`.

        Raises:
            ConfigurationError: it is larger than rounding explains.
        """
        error = self.error(model)
        if not error <= TOLERANCE[self._dtype]:
            raise ConfigurationError(
                f"model_type {self._name} is not supported: on paged attention its logits differ from those of "
                f"transformers by {error:.2g} of their spread, and rounding explains {TOLERANCE[self._dtype]:g}"
            )
        return error

    def error(self, model: CausalLM) -> float:
        """Returns the largest relative difference of the logits to those of the own attention of `transformers`.

        In half precision it is that of the worst position but a quarter: where two experts are nearly equal, rounding
        may choose the other one.
        """
        found = self._logits(model)
        errors = torch.cat([_errors(mine, theirs) for mine, theirs in zip(found, self._expected, strict=True)])
        return float(errors.max() if self._dtype == torch.float32 else errors.quantile(0.75))

    def far_error(self, model: CausalLM) -> float:
        """Returns the same of a text at the last positions of the context, without what would come before it."""

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _sinks: object = None
        ) -> torch.Tensor:
            return dense_attention(model.spec.layers[layer], q, k, v)

        with torch.inference_mode():
            found = model.logits(model(self._far_text, self._far, attend))
        errors = _errors(found, self._far_expected)
        return float(errors.max() if self._dtype == torch.float32 else errors.quantile(0.75))

    def _logits(self, model: CausalLM) -> list[torch.Tensor]:
        """Returns the logits [L, V] of each text."""
        backend, slots = self._open(model.spec, self._capacity, self._dtype), CpuSlots(self._capacity)
        for slot in range(2):
            slots.add(slot, range(2 * self._blocks - 1 - slot, -1, -2), record(), (), None)
        found = [torch.empty(length, model.spec.vocab_size) for length in self._lengths]
        for step in STEPS:
            ends = self._lengths
            rows = [(slot, first, min(stop, ends[slot])) for slot, first, stop in step if first < ends[slot]]
            if not rows:
                continue
            batch = StepBatch(
                slots=np.array([slot for slot, _, _ in rows]),
                num_computed_tokens=np.array([first for _, first, _ in rows]),
                query_lens=np.array([stop - first for _, first, stop in rows]),
                token_ids=np.concatenate([self._texts[slot][first:stop] for slot, first, stop in rows]),
                samples=np.ones(len(rows), np.bool_),
            )
            attend = backend.attention(batch, slots, batch.positions)
            with torch.inference_mode():
                hidden = model(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), attend)
                parts = torch.split(model.logits(hidden), batch.query_lens.tolist())
            for (slot, first, stop), logits in zip(rows, parts, strict=True):
                found[slot][first:stop] = logits
        return found


def dense_attention(layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns the causal attention of a text to itself; see `AttentionFn`."""
    k, v = (x.repeat_interleave(layer.group, dim=1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * layer.scale
    if layer.soft_cap:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    if layer.window:
        seen = seen.triu(1 - layer.window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).to(q.dtype)


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the error of each position [L] of logits [L, V]; see `TOLERANCE`."""
    seen = expected.isfinite()
    difference = (found - expected).where(seen, 0.0).pow(2).mean(dim=1).sqrt()
    spread = expected.where(seen, 0.0).std(dim=1)
    return difference / spread.clamp_min(1e-12)
