"""`python -m tests.services.executor.devices.cuda.fake_gpu`: a model of real size on a GPU that is not there.

Tensors are on torch's meta device: they have sizes, addresses and no memory. Triton's driver is a fake that counts what
is compiled, for which GPU, and what each captured graph launches. Nothing is computed. The last line is JSON.

In a process of its own, because Triton is chosen as a compiler or as an interpreter when it is imported.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from pagewire.bench.shapes import SHAPES
from pagewire.kernels.gpu_arch import PARTS
from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapter_loader import SequenceAdapter
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.cut import cut_adapter
from pagewire.services.executor.adapters.targets import Targets, targets_of
from pagewire.services.executor.devices.cuda.adapters import CudaAdapters
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.fused_layers import with_kernels
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.part import BACKENDS
from pagewire.services.executor.devices.cuda.runtime import Moment
from pagewire.services.executor.devices.defaults import DRAFT_MODEL_TOKENS
from pagewire.services.executor.devices.protocol import Capacity, Edits
from pagewire.services.executor.models.registry import build_model
from pagewire.services.executor.models.shard import ALONE, Collectives, Shard, Units
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.drafter import DraftRow, NewSequence
from pagewire.shared.sampling_parameters import record
from tests.kernels.triton.ahead.compile import configurations
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.gpus import SHARED_MEMORY
from tests.services.executor.devices.cuda.attention import fake_flashinfer
from tests.services.executor.devices.cuda.twins import batch_of
from tests.support.host_runtime import HostMoment, HostRuntime

Form = tuple[object, ...]
"""The inputs of a compiled kernel: its name, the type of each parameter, constants, alignments and options."""
MODELS: Mapping[str, dict[str, Any]] = {
    **SHAPES,
    "mixtral-8x7b": SHAPES["llama-3-8b"] | {"architectures": ["MixtralForCausalLM"], "vocab_size": 32000},
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3-30b-a3b": SHAPES["qwen3-0.6b"]
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
"""config.json of published models, but for the number of layers."""
SLOTS, LAYERS, CONTEXT, BLOCK_SIZE, BLOCKS, BUDGET = 12, 8, 4096, 16, 512, 32
STEP_DRAFTS = 20
"""Drafted tokens of a step, at most."""
RANK = 16
"""Ranks of the adapters."""


def form_of(configuration: Configuration) -> Form:
    """Returns the form that a configuration stands for, as a launch with aligned pointers shows it."""
    kernel: Any = configuration.kernel
    types = [
        "*" + configuration.tensors[parameter.name]
        if parameter.name in configuration.tensors
        else "constexpr"
        if parameter.name in configuration.constants
        else parameter.annotation_type
        for parameter in kernel.params
    ]
    aligned = tuple(index for index, kind in enumerate(types) if kind.startswith("*"))
    constants = {**{parameter.name: None for parameter in kernel.params}, **configuration.constants}
    values = tuple(constants[p.name] for p, kind in zip(kernel.params, types, strict=True) if kind == "constexpr")
    options = {"launch_pdl": False, "num_warps": 4, "num_stages": 3, "maxnreg": None, **configuration.options}
    return kernel.fn.__name__, tuple(types), values, aligned, *(options[name] for name in sorted(options))


class FakeDriver:
    """A driver of Triton that loads nothing and launches nothing.

    Attributes:
        launches: names of the kernels launched so far.
        dependent: names of those that a launch lets begin before the previous kernel has ended.
        forms: what they need compiled.
        shared: the largest shared memory of a kernel, in bytes, if they are compiled.
    """

    def __init__(self, arch: int, *, compiles: bool) -> None:
        """Unless it `compiles`, forms are only noted."""
        self._arch = arch
        self.launches: Counter[str] = Counter()
        self.dependent: set[str] = set()
        self.forms: set[Form] = set()
        self.shared = 0
        self.utils = self
        knobs = triton.knobs.runtime
        if compiles:
            knobs.jit_post_compile_hook = self._note
        else:
            knobs.jit_cache_hook = self._launch

    def _note(self, *, fn: Any, compile: Mapping[str, Any], **_: object) -> None:  # noqa: A002
        types = tuple(compile["signature"].values())
        (attributes,) = compile["configs"]
        aligned = tuple(sorted(index for (index,), value in attributes.items() if value))
        options = json.loads(compile["specialization_data"])["options"]
        chosen = (options["launch_pdl"], options["maxnreg"], options["num_stages"], options["num_warps"])
        self.forms.add((fn.name, types, tuple(compile["constants"].values()), aligned, *chosen))

    def _launch(self, *, fn: Any, compile: Mapping[str, Any], **found: Any) -> bool:  # noqa: A002
        self._note(fn=fn, compile=compile, **found)
        self._count(fn.name, dependent=json.loads(compile["specialization_data"])["options"]["launch_pdl"])
        return True

    def _count(self, name: str, *, dependent: bool) -> None:
        self.launches[name] += 1
        if dependent:
            self.dependent.add(name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self._arch]}

    def load_binary(self, name: str, _cubin: bytes, shared: int, _device: int) -> tuple[str, str, int, int, int]:
        self.shared = max(self.shared, shared)
        return name, name, 0, 0, 1024

    def launcher_cls(self, _source: object, metadata: Any) -> Callable[..., None]:
        def launch(*_: object) -> None:
            self._count(metadata.name, dependent=metadata.launch_pdl)

        return launch


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of PyTorch, and refuses those for which a host would wait."""

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self._pinned = pinned

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        places = {tensor.device.type for tensor in tensors}
        if "meta" in places:
            self.names[function.overloadpacket.__name__] += 1
            for tensor in tensors:
                if tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in self._pinned:
                    raise AssertionError(f"{function} reads pageable memory of the host: its copy is synchronous")
        return function(*args, **(kwargs or {}))


class FakeRuntime(HostRuntime):
    """The `Runtime` of the fake GPU: a graph is what its capture has launched."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__(multiprocessors=132)
        self.device = torch.device("meta")
        self.driver = driver
        self.pinned_storages: set[int] = set()
        self._kept: list[Tensor] = []
        self.graphs: list[Counter[str]] = []

    def pinned(self, *shape: int) -> Tensor:
        tensor = super().pinned(*shape)
        self._kept.append(tensor)
        self.pinned_storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def copy_out(self, source: Tensor, target: Tensor) -> Moment:
        assert source.shape == target.shape
        return HostMoment()

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return [self._graph(work) for work in works]

    def _graph(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        before, forms = self.driver.launches.copy(), set(self.driver.forms)
        work()
        assert self.driver.forms == forms, "a capture compiles"
        graph = self.driver.launches - before
        self.graphs.append(graph)
        return lambda: self.driver.launches.update(graph)


class CountedCollectives(Collectives):
    """The collectives of a rank whose others are not there: they count as launches."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.calls = 0
        """Collectives that the host has enqueued one by one, or captured."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count("all_reduce")
        return x

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        self._count("all_gather")
        return part.new_empty(len(part), sum(sizes))

    def _count(self, name: str) -> None:
        self.calls += 1
        self._driver.launches[name] += 1


@dataclass
class Findings:
    """Everything that a run of the fake GPU has shown."""

    launches: dict[str, dict[str, int]] = field(default_factory=dict)
    """Launches of a step by its bucket, and those before it, by kernel."""
    late: list[str] = field(default_factory=list)
    """Forms that are compiled after the capture."""
    unknown: list[str] = field(default_factory=list)
    """Forms that no configuration describes."""
    operations: dict[str, int] = field(default_factory=dict)
    """Operations of PyTorch in all steps after the capture."""
    captured: dict[str, int] = field(default_factory=dict)
    """Operations of PyTorch while graphs are captured."""
    drafted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Launches of a step with drafts, by its rows and the drafted tokens of each."""
    adapted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Launches of a decode step by the number of its adapters."""
    decode_collectives: int = 0
    """Collectives of decode steps that are in no graph."""
    shared: int = 0
    """Largest shared memory in bytes."""
    dependent: list[str] = field(default_factory=list)
    """Kernels that begin before the previous one has ended."""


@contextmanager
def active(driver: FakeDriver) -> Iterator[None]:
    """Makes `driver` Triton's."""
    triton.runtime.driver.set_active(driver)
    yield


def device_of(
    config: dict[str, Any],
    runtime: FakeRuntime,
    cached: torch.dtype | None,
    backend: str,
    max_loras: int,
    shard: Shard,
    collectives: Collectives,
) -> CudaDevice:
    """Returns the device of a rank's part of a model in bf16, with nothing captured."""
    plain = build_model(config)
    targets = targets_of(plain)
    if not shard.alone:
        part = plain.cut(shard, Units())
        with torch.device("meta"):
            plain = part.build(collectives)
        plain.part = part
    plain = plain.to(torch.bfloat16)
    model = with_kernels(plain, CONTEXT, runtime.device)
    adapters = None
    if max_loras:
        adapters = CudaAdapters(runtime, targets, torch.bfloat16, max_loras, RANK, BUDGET, plain.part)
        adapters.attach(model)
    capacity = Capacity(
        BLOCKS, BLOCK_SIZE, SLOTS, CONTEXT, model.spec.vocab_size, max_drafts=STEP_DRAFTS, max_step_drafts=STEP_DRAFTS
    )
    pool = KVPool(model.spec, capacity, torch.bfloat16, runtime, BUDGET, cached)
    return CudaDevice(model, capacity, pool, runtime, BUDGET, backend=BACKENDS[backend], adapters=adapters)


def draft_model_of(config: dict[str, Any], runtime: FakeRuntime) -> CudaDevice:
    """Returns the device of a model in bf16 that drafts, with nothing captured."""
    model = with_kernels(build_model(config).to(torch.bfloat16), CONTEXT, runtime.device)
    capacity = Capacity(BLOCKS, BLOCK_SIZE, SLOTS, CONTEXT, model.spec.vocab_size)
    pool = KVPool(model.spec, capacity, torch.bfloat16, runtime, DRAFT_MODEL_TOKENS)
    return CudaDevice(model, capacity, pool, runtime, DRAFT_MODEL_TOKENS)


def serve(device: CudaDevice) -> None:
    """Runs steps of all kinds: prompts and decodes, edits, logprobs, larger than any graph, and copies of blocks."""
    edits = Edits(
        bias_ids=np.array([9]),
        biases=np.array([5.0], np.float32),
        allowed_ids=np.arange(400),
        bad_words=np.array([1, 11]),
        penalized=True,
        num_prompt_tokens=5,
        tokens=np.arange(5),
    )
    device.add(0, range(8), record(temperature=1.0, top_p=0.9, num_logprobs=3), [2], edits)
    device.add(1, range(8, 16), record())
    device.launch(batch_of((0, 0, range(5), True), (1, 0, range(70), True))).wait()
    device.extend([0], [20])
    device.copy([3], [21])
    for position in range(3):
        device.launch(batch_of((0, 5 + position, [0], True), (1, 70 + position, [0], True))).wait()


def decode(device: CudaDevice) -> None:
    """Runs decode steps of all rows."""
    for slot in range(SLOTS):
        device.add(slot, [slot], record())
    for position in range(3):
        device.launch(batch_of(*((slot, position, [0], True) for slot in range(SLOTS)))).wait()


def draft(device: CudaDevice) -> None:
    """Drafts behind texts of which the model knows nothing, a part, and all but wrong drafts. It samples zeros."""
    drafter = DraftModel(device, device.capacity.vocab_size)
    texts = [np.arange(1, length) for length in (4, 40, 3 * DRAFT_MODEL_TOKENS)]
    for slot in range(len(texts)):
        drafter.begin(slot, NewSequence(record(temperature=1.0), known_tokens=3))
    for _ in range(5):
        drafts = drafter.draft([DraftRow(slot, text, 3) for slot, text in enumerate(texts)])
        texts = [np.append(text, [*each.tokens[:1], 9]) for text, each in zip(texts, drafts, strict=True)]
    assert all(each.tokens == [0, 0, 0] for each in drafts)


def verify(device: CudaDevice, steps: Sequence[tuple[int, int]]) -> dict[str, dict[str, int]]:
    """Returns what steps of so many rows, each with so many drafted tokens, launch."""
    driver, launches = device._runtime.driver, {}  # type: ignore[attr-defined]
    for rows, drafts in steps:
        for slot in range(rows):
            device.add(slot, [slot], record(num_logprobs=slot % 2))
        plain = batch_of(*((slot, 0, range(1 + drafts), True) for slot in range(rows)))
        before = driver.launches.copy()
        device.launch(msgspec.structs.replace(plain, num_drafts=np.full(rows, drafts))).wait()
        launches[f"{rows} x {drafts}"] = dict(driver.launches - before)
    return launches


def adapter_of(targets: Targets) -> Adapter:
    """Returns an adapter of every product."""
    updates: dict[str, list[LowRank]] = {}
    for target in targets.products.values():
        shrink, expand = torch.zeros(RANK, target.inputs), torch.zeros(target.outputs, RANK)
        updates.setdefault(target.path, []).append(LowRank(shrink, expand, target.first, 1.0))
    return Adapter(updates)


def decode_with_adapters(device: CudaDevice, counts: Sequence[int]) -> dict[str, dict[str, int]]:
    """Returns what a decode step of 8 rows launches when so many of them have an adapter, each another one."""
    slots, driver, launches = device.adapters, device._runtime.driver, {}  # type: ignore[attr-defined]
    assert slots is not None
    whole, part = adapter_of(slots.targets), device._model.part
    packed = slots.pack(whole if part is None else cut_adapter(whole, part))
    for count in counts:
        for slot in range(8):
            device.add(slot, [slot], record())
        for slot in range(count):
            adapter = SequenceAdapter()
            adapter.put(replace(packed))
            slots.assign(slot, adapter)
        before = driver.launches.copy()
        device.launch(batch_of(*((slot, 0, [5], True) for slot in range(8)))).wait()
        launches[str(count)] = dict(driver.launches - before)
        for slot in range(count):
            slots.clear(slot)
    return launches


def observe(
    config: dict[str, Any],
    arch: int,
    *,
    compiles: bool,
    cached: torch.dtype | None = None,
    backend: str = "triton",
    max_loras: int = 0,
    shard: Shard = ALONE,
    draft_model: dict[str, Any] | None = None,
) -> Findings:
    """Opens a part of the model on a GPU, and the `draft_model` if there is one, captures graphs and runs steps."""
    driver = FakeDriver(arch, compiles=compiles)
    runtime, collectives = FakeRuntime(driver), CountedCollectives(driver)
    with active(driver):
        device = device_of(config, runtime, cached, backend, max_loras, shard, collectives)
        small = None if draft_model is None else draft_model_of(draft_model, runtime)
        with Operations(runtime.pinned_storages) as captured:
            device.capture()
            captures = list(runtime.graphs)
            if small is not None:
                small.capture()
        forms = set(driver.forms)
        with Operations(runtime.pinned_storages) as operations:
            serve(device)
            if small is not None:
                draft(small)
            drafted = verify(device, [(1, 1), (1, 7), (4, 5), (12, 1)] if device._backend.captures_mixed else [])
            adapted = decode_with_adapters(device, (0, 1, max_loras)) if max_loras else {}
            before = collectives.calls
            decode(device)
    known = {form_of(configuration.on(arch)) for _, configuration in configurations() if arch in configuration.parts}
    buckets: list[Bucket] = device._buckets.captured
    sampling = dict(zip(device._buckets.sampled, captures[len(buckets) :], strict=True))
    graphs = [graph + sampling[bucket.rows] for bucket, graph in zip(buckets, captures, strict=False)]
    return Findings(
        launches={
            f"{'decode' if bucket.decode else 'mixed'} {bucket.tokens}": dict(graph)
            for bucket, graph in zip(buckets, graphs, strict=True)
        },
        late=sorted(map(str, driver.forms - forms)),
        unknown=sorted(map(str, driver.forms - known)),
        operations=dict(operations.names),
        captured=dict(captured.names),
        drafted=drafted,
        adapted=adapted,
        decode_collectives=collectives.calls - before,
        shared=driver.shared,
        dependent=sorted(driver.dependent),
    )


def main() -> None:
    """Prints the launches of a step by bucket, then all findings as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, choices=PARTS)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--cache", default="bf16", choices=["bf16", "fp8"])
    parser.add_argument("--attention", default="triton", choices=["triton", "flashinfer"], help="a stand-in attends")
    parser.add_argument("--adapters", type=int, default=0, help="the most adapters of a step")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--whole-experts", action="store_true", help="a rank has whole experts, not a part of each")
    parser.add_argument("--draft-model", choices=MODELS, help="the model that drafts; by default none does")
    parser.add_argument("--compile", action="store_true", help="compile what is launched")
    options = parser.parse_args()
    config = MODELS[options.model] | {"num_hidden_layers": LAYERS}
    cached = torch.float8_e4m3fn if options.cache == "fp8" else None
    sys.modules["flashinfer"] = fake_flashinfer.module()
    observations = observe(
        config,
        options.arch,
        compiles=options.compile,
        cached=cached,
        backend=options.attention,
        max_loras=options.adapters,
        shard=Shard(0, options.ranks, options.whole_experts),
        draft_model=MODELS[options.draft_model] | {"num_hidden_layers": LAYERS} if options.draft_model else None,
    )
    for bucket, launches in observations.launches.items():
        print(f"{bucket:<12}{sum(launches.values()):>5}  {launches}")
    print(json.dumps(vars(observations)))


if __name__ == "__main__":
    main()
