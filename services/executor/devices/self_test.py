"""Proves at start that a model of `transformers` computes on paged attention what it computes on its own."""

import time
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.gathered_attention import dense_attention
from pagewire.services.executor.devices.protocol import Capacity, StepBatch
from pagewire.services.executor.models.model import AttentionFn, CausalLM, ModelSpec
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
"""Tokens of the two texts."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Root mean square of the difference of a position's logits, relative to their standard deviation."""

LEAST = 1e-4
"""Error that a decoder of this project may have, however small the error of the model itself is."""

_log = structlog.get_logger()


class PagedAttention(Protocol):
    """A KV pool, and the attention of a device over it."""

    def attention(self, batch: StepBatch, slots: CpuSlots) -> AttentionFn:
        """Returns the attention of one step."""


class OpenAttention(Protocol):
    """Opens the attention of a device."""

    def __call__(self, spec: ModelSpec, capacity: Capacity, dtype: torch.dtype) -> PagedAttention:
        """Returns a new KV pool with its attention."""


def prove(model: CausalLM, open_attention: OpenAttention, block_size: int, max_model_len: int) -> CausalLM:
    """Returns the model to serve in place of a `TransformersLM` that passes the self-test.

    It is a decoder of this project, with the same weights, if there is one that passes too, and else the model itself.
    A rank's part is tested without the sums over the ranks, and is served itself.

    Raises:
        ConfigurationError: the model does not pass.
    """
    if not isinstance(model, TransformersLM):
        raise TypeError("a native family needs no self-test")
    began = time.monotonic()
    with model.apart():
        test = SelfTest(model, open_attention, block_size, max_model_len)
        error = test.run(model)
    decoder = recognize(model.model, model.spec) if model.collectives is None else None
    if decoder is not None and not max(test.error(decoder), test.far_error(decoder)) <= max(2 * error, LEAST):
        decoder = None
    seconds = round(time.monotonic() - began, 2)
    _log.info("self_test", difference=float(f"{error:.2g}"), own_layers=decoder is not None, seconds=seconds)
    return decoder or model


class SelfTest:
    """The comparison of models with the attention of `transformers` on short random texts."""

    def __init__(
        self, model: TransformersLM, open_attention: OpenAttention, block_size: int, max_model_len: int
    ) -> None:
        """`model` gives the expected logits."""
        self._open, self._dtype = open_attention, model.embedding.dtype
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
        """Returns the largest relative difference of the logits to the ones by the own attention of `transformers`.

        In half precision a quarter of the positions may be worse: where two experts are nearly equal, rounding may
        choose the other one.
        """
        logits = self._logits(model)
        errors = torch.cat([_errors(mine, theirs) for mine, theirs in zip(logits, self._expected, strict=True)])
        return float(errors.max() if self._dtype == torch.float32 else errors.quantile(0.75))

    def far_error(self, model: CausalLM) -> float:
        """Returns the error for a text at the last positions of the context, without any text before it."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return dense_attention(model.spec.layers[layer], q, k, v, sinks)

        with torch.inference_mode():
            logits = model.logits(model(self._far_text, self._far, attend))
        errors = _errors(logits, self._far_expected)
        return float(errors.max() if self._dtype == torch.float32 else errors.quantile(0.75))

    def _logits(self, model: CausalLM) -> list[Tensor]:
        """Returns the logits [L, V] of each text."""
        pool, slots = self._open(model.spec, self._capacity, self._dtype), CpuSlots(self._capacity)
        for slot in range(2):
            slots.add(slot, range(2 * self._blocks - 1 - slot, -1, -2), record(), (), None)
        results = [torch.empty(length, model.spec.vocab_size) for length in self._lengths]
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
            attend = pool.attention(batch, slots)
            with torch.inference_mode():
                hidden = model(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), attend)
                parts = torch.split(model.logits(hidden), batch.query_lens.tolist())
            for (slot, first, stop), logits in zip(rows, parts, strict=True):
                results[slot][first:stop] = logits
        return results


def _errors(logits: Tensor, expected: Tensor) -> Tensor:
    """Returns the error of each position [L] of logits [L, V], as `TOLERANCE` bounds it."""
    finite = expected.isfinite()
    difference = (logits - expected).where(finite, 0.0).pow(2).mean(dim=1).sqrt()
    spread = expected.where(finite, 0.0).std(dim=1)
    return difference / spread.clamp_min(1e-12)
