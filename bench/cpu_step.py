"""Measures a step of the CPU device, with compiled kernels and by another path, and where its time goes.

The other path is the same model as it is served when `transformers` has built it, or the same kernels with keys and
values in int8, or with rows that take turns in having adapters. The models have random weights, in bf16 unless told
otherwise. Both paths take turns, so that a noisy machine is noisy for both.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pagewire.services.executor  # noqa: F401  # isort: skip  (before torch: it says how torch's threads wait)

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import override

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import targets_of
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.device import Backend, CpuDevice
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.protocol import Capacity, Int64, StepBatch
from pagewire.services.executor.devices.self_test import prove
from pagewire.services.executor.models.model import AttentionFn, CausalLM
from pagewire.services.executor.models.registry import FAMILIES, build_model
from pagewire.services.executor.models.transformers_backend.loading import load_decoder
from pagewire.services.executor.models.transformers_backend.model import TransformersLM
from pagewire.services.executor.models.weights import random_weights
from pagewire.services.executor.sequence_key import sequence_key
from pagewire.shared.process.linux_process import use_huge_pages
from pagewire.shared.sampling_parameters import record
from pagewire.shared.settings.flags import Parser

VOCABULARY = 50304
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
SHAPES: Mapping[str, Mapping[str, int]] = {
    "nano": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
    },
    "s135": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
    "s1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
}
EXPERTS: Mapping[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts"), 8),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""Experts of families that are mixtures, where the shape names none: their own would be too large."""
NATIVE: Mapping[str, str] = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in FAMILIES}
"""The architectures with a file of their own, by model_type."""
OTHERS = ("transformers", "int8-kv", "adapters")
PARTS = ("linears", "attention", "sampling")


@dataclass
class Case:
    """One path at one size of step."""

    path: str
    family: str
    model: str
    rows: int
    context: int
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """CPU time of all threads together, which other programs on the cores disturb less than wall time."""
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Median milliseconds of a step."""
        return statistics.median(self.wall_ms)


class Timed(Backend):
    """Wraps a backend, and counts the seconds spent in it and in the products of a model."""

    def __init__(self, model: CausalLM, backend: Backend) -> None:
        self.layers = backend.layers
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._backend = backend
        self._before = dict(self._spent)
        self._decoder = model.decoder if isinstance(model, CompiledLM) else None
        products = {"Linear", "PackedLinear"}
        for module in [model.head] if isinstance(model, CompiledLM) and self._decoder else model.modules():
            if type(module).__name__ in products:
                module.forward = self._timed("linears", module.forward)
        if isinstance(model, CompiledLM):
            model.argmax = self._timed("linears", model.argmax)  # type: ignore[method-assign]
        if not isinstance(model, CompiledLM):
            model.logits = self._timed("linears", model.logits)  # type: ignore[method-assign]

    def start(self) -> None:
        """Begins to count."""
        self._before = self._total()

    @property
    def spent(self) -> dict[str, float]:
        """Seconds since the start, by part."""
        return {part: seconds - self._before[part] for part, seconds in self._total().items()}

    def _total(self) -> dict[str, float]:
        linears, attention = self._decoder.seconds if self._decoder else (0.0, 0.0)
        spent = self._spent
        return spent | {"linears": spent["linears"] + linears, "attention": spent["attention"] + attention}

    @override
    def attention(self, batch: StepBatch, slots: CpuSlots) -> AttentionFn:
        attend = self._timed("attention", self._backend.attention)(batch, slots)
        return attend if self._decoder else self._timed("attention", attend)

    @override
    def edit(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> None:
        self._timed("sampling", self._backend.edit)(logits, slots, rows, positions)

    @override
    def sample(self, logits: Tensor, slots: CpuSlots, rows: Int64, positions: Int64) -> Int64:
        tokens: Int64 = self._timed("sampling", self._backend.sample)(logits, slots, rows, positions)
        return tokens

    @override
    def reduce_logprobs(self, logits: Tensor, tokens: Tensor, num_logprobs: int, *, normalized: bool = True) -> Tensor:
        return self._backend.reduce_logprobs(logits, tokens, num_logprobs, normalized=normalized)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self._spent[part] += time.perf_counter() - began
            return result

        return run


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = Parser(prog="pagewire bench cpu_step", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["nano", "s135"], choices=SHAPES, help="shapes")
    parser.add_argument("--families", nargs="+", default=["llama"], choices=NATIVE, metavar="TYPE", help="model_type")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="sequences that decode")
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 1024], help="tokens of each sequence")
    parser.add_argument("--query-len", type=int, default=1, help="tokens that each sequence computes")
    parser.add_argument("--against", default="int8-kv", choices=OTHERS, help="the other path")
    parser.add_argument("--adapters", type=int, default=1, help="adapters of the path `adapters`")
    parser.add_argument("--rank", type=int, default=16, help="their rank")
    parser.add_argument("--plain", type=int, default=0, help="rows of that path without an adapter")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: off")
    parser.add_argument("--seconds", type=float, default=2.0, help="for which the steps of a line are repeated")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32"], help="of the weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a step")
    add_output(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(
        f"{'family':>12} {'model':>5} {'rows':>4} {'context':>7} {'path':>12} {'ms':>8} {'ratio':>6} {'cpu ms':>8}"
        + "".join(f" {part:>9}" for part in (*PARTS, "other"))
    )
    cases = []
    for family, name, rows, context in product(options.families, options.models, options.rows, options.contexts):
        pair = [Case(path, family, name, rows, context) for path in ("compiled", options.against)]
        _measure(pair, options)
        cases += pair
        for case in pair:
            print(line(case, pair[1].ms / case.ms), flush=True)
    write(options.output, parser.prog, arguments, runs=[asdict(case) for case in cases])
    return 0


def line(case: Case, ratio: float) -> str:
    """Returns a line for the terminal. `ratio` is the speed relative to the other path."""
    shares = "".join(f" {case.shares[part]:>9.0%}" for part in (*PARTS, "other"))
    cpu = statistics.median(case.cpu_ms)
    return (
        f"{case.family:>12} {case.model:>5} {case.rows:>4} {case.context:>7} {case.path:>12}"
        f" {case.ms:>8.2f} {ratio:>6.2f} {cpu:>8.2f}" + shares
    )


def by_family(cases: Sequence[Case]) -> list[str]:
    """Returns the time of a step by family and rows, and the speed relative to the other path, in Markdown."""
    by_path: dict[str, dict[int, dict[str, float]]] = {}
    for case in cases:
        by_path.setdefault(case.family, {}).setdefault(case.rows, {})[case.path] = case.ms
    counts = sorted({case.rows for case in cases})
    lines = []
    for family, times in by_path.items():
        pairs = [(times[rows]["compiled"], times[rows][cases[1].path]) for rows in counts]
        lines.append(" | ".join([family, *(f"{ours:.1f} ({theirs / ours:.2f}x)" for ours, theirs in pairs)]))
    return markdown(" | ".join(["family, ms by rows", *map(str, counts)]), lines)


def _measure(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Measures both paths in turn."""
    devices = [_device(case, options) for case in cases]
    batch = _batch(cases[0].rows, cases[0].context, options.query_len)
    for device, timed in devices:
        device.launch(batch).wait()
        timed.start()
    until = time.perf_counter() + options.seconds
    while time.perf_counter() < until or len(cases[0].wall_ms) < 5:
        for (device, _), case in zip(devices, cases, strict=True):
            began, used = time.perf_counter(), time.process_time()
            device.launch(batch).wait()
            case.wall_ms.append((time.perf_counter() - began) * 1e3)
            case.cpu_ms.append((time.process_time() - used) * 1e3)
    for (_, timed), case in zip(devices, cases, strict=True):
        wall = sum(case.wall_ms) / 1e3
        case.shares = {part: seconds / wall for part, seconds in timed.spent.items()}
        case.shares["other"] = 1 - sum(case.shares.values())


def _device(case: Case, options: argparse.Namespace) -> tuple[CpuDevice, Timed]:
    """Returns a device with `rows` sequences of `context` tokens, in blocks of their own."""
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    model = _by_transformers(case, dtype) if case.path == "transformers" else _native(case, dtype)
    entries, windows = -(-(case.context + options.query_len) // BLOCK_SIZE), model.spec.groups.windows
    blocks = entries * len(windows)
    capacity = Capacity(blocks * case.rows, BLOCK_SIZE, case.rows, entries * BLOCK_SIZE, VOCABULARY, windows=windows)
    kernels = CpuKernels(build.load(), options.threads)
    spec = model.spec
    if isinstance(model, TransformersLM):
        model = prove(model, partial(CompiledBackend, kernels), BLOCK_SIZE, MAX_MODEL_LEN)
    adapters = None
    if not isinstance(model, TransformersLM):
        targets = targets_of(model)
        model = CompiledLM(model, kernels, capacity.max_model_len)
        if case.path == "adapters":
            adapters = _adapters(CpuAdapters(kernels, targets, model.numbers, dtype), case.rows, options)
    backend = CompiledBackend(kernels, spec, capacity, torch.int8 if case.path == "int8-kv" else dtype, adapters)
    for pool in backend.layers:
        for tensor in pool:
            tensor.fill_(0.1)  # 0 in int8; untouched memory would be read from one page of zeros
    timed = Timed(model, backend)
    cores = Cores(1, lambda _: None)  # nothing to share: the threads remain those that were asked for
    device = CpuDevice(model, capacity, timed, cores)
    use_huge_pages()
    ids = np.random.default_rng(0).permutation(capacity.num_blocks).reshape(case.rows, blocks)
    for slot in range(case.rows):
        sampling = record(temperature=options.temperature, top_p=options.top_p, key=sequence_key(0, slot, 0))
        device.add(slot, ids[slot].tolist(), sampling)
    return device, timed


def _adapters(adapters: CpuAdapters, rows: int, options: argparse.Namespace) -> CpuAdapters:
    """Returns `adapters` with random ones of all products, which the slots take turns in having."""
    loaded = []
    for _ in range(options.adapters):
        updates: dict[str, list[LowRank]] = {}
        for target in adapters.targets.products.values():
            factors = torch.randn(options.rank, target.inputs), torch.randn(target.outputs, options.rank) * 1e-4
            updates.setdefault(target.path, []).append(LowRank(*factors, target.first, 1.0))
        adapter = SequenceAdapter()
        adapter.put(adapters.pack(Adapter(updates)))
        loaded.append(adapter)
    for slot in range(options.plain, rows):
        adapters.assign(slot, loaded[slot % len(loaded)])
    return adapters


def _batch(rows: int, context: int, query_len: int) -> StepBatch:
    return StepBatch(
        slots=np.arange(rows),
        num_computed_tokens=np.full(rows, context),
        query_lens=np.full(rows, query_len),
        token_ids=np.arange(rows * query_len) % VOCABULARY,
        samples=np.ones(rows, np.bool_),
    )


def _config(case: Case) -> dict[str, Any]:
    """Returns the config.json of a family with the sizes of a shape, as far as it has them."""
    kind = CONFIG_MAPPING[case.family]
    shape = SHAPES[case.model]
    sizes = {
        "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
        **EXPERTS,
        **shape,
        "vocab_size": VOCABULARY,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),  # a family's own may be none of these
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": True,
    }
    default = kind()
    config = kind(**{key: value for key, value in sizes.items() if hasattr(default, key)})
    config.architectures = [NATIVE[case.family]]
    described: dict[str, Any] = config.to_dict()
    return described


def _native(case: Case, dtype: torch.dtype) -> CausalLM:
    model = build_model(_config(case))
    model.load_state_dict(random_weights(model, dtype, 0), assign=True)
    return model.requires_grad_(requires_grad=False).eval()


def _by_transformers(case: Case, dtype: torch.dtype) -> CausalLM:
    """Returns a model that `transformers` has built, as if its family had no file of its own."""
    return load_decoder(Path(), _config(case), dtype, random=0)
