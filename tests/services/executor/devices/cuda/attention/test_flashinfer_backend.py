"""With FlashInfer's attention the device makes the tokens of the CPU device; a stand-in computes that attention."""

import gc
import sys
import weakref
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.services.executor.devices.cuda.attention.flashinfer_backend import FlashInferBackend, rows_of
from pagewire.services.executor.devices.cuda.attention.triton_backend import TritonBackend
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.protocol import NO_ROWS, Capacity
from pagewire.services.executor.models.model import ModelSpec
from pagewire.shared.errors import ConfigurationError
from tests.services.executor.devices.cuda.attention import fake_flashinfer
from tests.services.executor.devices.cuda.attention.one_layer import OneLayer, Rows
from tests.services.executor.devices.cuda.test_bfloat16 import PROMPT, following
from tests.services.executor.devices.cuda.test_device import texts
from tests.services.executor.devices.cuda.test_step_loop import PROMPTS, client
from tests.services.executor.devices.cuda.twins import GREEDY, Host, batch_of, cpu_device, cuda_device
from tests.support.host_runtime import HostMoment, HostRuntime

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs FlashInfer itself")
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """FlashInfer, with float32 too, so that tokens can be compared."""
    module = fake_flashinfer.module(float32=True)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        ("llama", True),
        ("gemma2", False),  # two block tables, a window and a soft cap
        *(
            pytest.param(name, captured, marks=pytest.mark.full)
            for name in ("llama", "mistral", "gemma2", "gemma3", "qwen2-sliding", "opt", "gpt-neox")
            for captured in (False, True)
            if (name, captured) not in {("llama", True), ("gemma2", False)}
        ),
    ],
)
def test_tokens_equal_the_cpus(name: str, captured: bool) -> None:
    """Prompts in chunks beside decodes, blocks in any order, and preempted sequences that are computed again."""
    expected = Host(cpu_device(name), seed=1, preempt=0).run(texts(1, 2, 36, 2))
    device = cuda_device(name, captured=captured, backend=FlashInferBackend)
    assert Host(device, seed=2, preempt=0.15).run(texts(1, 2, 36, 2)) == expected


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_tokens_equal_the_cpus_in_longer_runs(name: str) -> None:
    expected = Host(cpu_device(name), 1, preempt=0).run(texts(1, 8, 60, 12))
    assert Host(cuda_device(name, backend=FlashInferBackend), 2).run(texts(1, 8, 60, 12)) == expected


def test_two_steps_in_flight_make_the_tokens_and_ends_of_the_cpu() -> None:
    """A row after a stop id is dead, of which the host does not know when it plans its step."""
    free = client([[]] * len(PROMPTS))
    free.run(cpu_device("llama"))
    stop_ids = [free.texts[0][1:2], [], free.texts[2][:1]]
    expected, result = client(stop_ids), client(stop_ids)
    expected.run(cpu_device("llama"))
    device = cuda_device("llama", backend=FlashInferBackend)
    assert device.depth == 2
    result.run(device)
    assert (result.texts, result.finishes) == (expected.texts, expected.finishes)


def test_a_dead_row_reads_no_block_of_a_sequence() -> None:
    device = cuda_device("llama", captured=False, backend=FlashInferBackend)
    device.add(0, [9], GREEDY, range(8))
    device.add(1, [3], GREEDY)
    first = device.launch(batch_of((0, 0, PROMPT[:5], True), (1, 0, PROMPT[:5], True))).wait().tolist()
    device.add(0, [9], GREEDY, first[:1])
    device.launch(batch_of((0, 0, PROMPT[:5], True))).wait()
    for caches in device._pool.caches:
        for cache in caches:
            cache[9] = torch.nan
    dead, alive = device.launch(batch_of((0, 5, [0], True), (1, 5, [0], True))).wait().tolist()
    assert dead == -1
    assert alive >= 0
    hidden = device._memory.last_hidden
    assert hidden[:2].isfinite().all()


@pytest.mark.parametrize("cached", [HALF, torch.float8_e4m3fn])
def test_logits_equal_the_triton_backends_but_for_rounding(
    cached: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtypes that FlashInfer has, but for the rounding of the weights of keys."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    devices = [
        cuda_device("llama", captured=False, dtype=HALF, cached=cached, backend=backend)
        for backend in (TritonBackend, FlashInferBackend)
    ]
    triton, flashinfer = (following(device, PROMPT) for device in devices)
    assert (flashinfer - triton).abs().max() < 0.1 * triton.std()


def test_graphs_are_captured_of_decodes_only(flashinfer: ModuleType) -> None:
    device = cuda_device("llama", backend=FlashInferBackend)
    assert device._forwards
    assert all(bucket.decode for bucket in device._forwards)
    wrappers = flashinfer.BatchPrefillWithPagedKVCacheWrapper.num_created
    assert wrappers == 1 + len(device._forwards), "one for all other steps"
    device.add(0, [9], GREEDY)
    device.launch(batch_of((0, 0, PROMPT[:7], True))).wait()
    device.launch(batch_of((0, 7, [0], True))).wait()
    assert flashinfer.BatchPrefillWithPagedKVCacheWrapper.num_created == wrappers


class CountedRuntime(HostRuntime):
    """Notes which moments were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[int] = set()
        self.marks = 0

    def mark(self) -> HostMoment:
        self.marks += 1
        self.open.add(self.marks)
        number, waited = self.marks, self.open

        class Counted(HostMoment):
            def wait(self) -> None:
                waited.discard(number)

        return Counted()


def backend_of(runtime: HostRuntime, windows: tuple[int, ...] = (0, 0), slots: int = 4) -> FlashInferBackend:
    spec = ModelSpec(90, tuple(Attention(4, 2, 16, 0.25, window) for window in windows))
    capacity = Capacity(6, 4, slots, 32, 90, windows=spec.groups.windows)
    return FlashInferBackend(KVPool(spec, capacity, torch.float32, runtime, 8), capacity, runtime)


def batches_of(backend: FlashInferBackend, rows: int) -> list[Batch]:
    def column(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    return [
        Batch(column(rows), column(rows), column(rows + 1), column(4 * 8).view(4, 8))
        for _ in backend.pool.groups.windows
    ]


@pytest.mark.parametrize("captured", [False, True])
def test_a_plan_is_overwritten_only_after_its_copy(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each captured shape has one of its own, and all other steps share one."""
    runtime = CountedRuntime()
    backend = backend_of(runtime)
    plain, before = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan, []
    batch = batch_of((0, 3, [0], True), (1, 9, [0], True))

    def planned(*arguments: object, **more: object) -> None:
        before.append(set(runtime.open))
        plain(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", planned)
    shapes = [Bucket(2, 2, decode=True), Bucket(4, 4, decode=True)]
    steps = [backend.attend(batches_of(backend, shape.rows), shape, captured=captured) for shape in shapes]
    for step in (steps[0], steps[1], steps[0], steps[0]):
        step.plan(batch)
    assert before == ([set(), {1}, {2}, {2}] if captured else [set()] * 4)


def test_a_backend_is_gone_with_its_last_reference() -> None:
    """The memory of the largest step must be free before the pool is sized."""
    gc.disable()
    try:
        backend = backend_of(HostRuntime())
        step = backend.attend(batches_of(backend, 2), Bucket(2, 2, decode=True), captured=True)
        gone = weakref.ref(backend), weakref.ref(step), weakref.ref(backend.pool)
        del backend, step
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("rows", "captured"),
    [([(1, 9), (1, 16), (1, 1)], False), ([(1, 9), (1, 16), (1, 1)], True), ([(5, 9), (1, 30), (7, 7)], False)],
    ids=["decode", "captured", "mixed"],
)
@pytest.mark.parametrize(
    "layer",
    [
        Attention(4, 2, 16, 0.3),
        Attention(4, 1, 16, 0.3, window=1),
        Attention(4, 4, 16, 0.3, window=6),
        Attention(4, 2, 16, 0.3, soft_cap=0.7),
    ],
)
def test_attention_is_that_of_the_other_backend(layer: Attention, rows: Rows, captured: bool) -> None:
    case = OneLayer(layer, rows, HostRuntime(), torch.float32)
    outputs = [case.by(backend, captured=captured) for backend in (TritonBackend, FlashInferBackend)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def test_groups_and_kinds_of_layers_have_a_plan_each(flashinfer: ModuleType) -> None:
    backend_of(HostRuntime(), (0, 4, 0, 4, 0, 4))
    assert flashinfer.BatchPrefillWithPagedKVCacheWrapper.num_created == 2


def test_sinks_are_refused() -> None:
    backend = backend_of(HostRuntime())
    step = backend.attend(batches_of(backend, 2), Bucket(2, 2, decode=True), captured=False)
    with pytest.raises(ConfigurationError, match="does not support attention sinks: set it to triton"):
        step(0, torch.zeros(2, 4, 16), torch.zeros(4))


def test_rows_are_listed_with_their_padding() -> None:
    rows = rows_of(batch_of((0, 3, [0], True), (1, 15, [0], True)), Bucket(4, 4, decode=True), 4, HostRuntime())
    assert rows.queries.tolist() == [0, 1, 2, 3, 4]
    assert rows.starts.tolist() == [0, 1, 5, 6, 7]
    assert rows.last.tolist() == [4, 4, 1, 1]
    assert rows.lengths.tolist() == [4, 16, 1, 1]
    assert {column.dtype for column in rows} == {torch.int32}


def test_drafted_tokens_are_keys_of_their_row() -> None:
    batch = msgspec.structs.replace(batch_of((0, 3, [0, 1, 2], True)), num_drafts=np.array([2]))
    assert rows_of(batch, Bucket(1, 3, decode=False), 4, HostRuntime()).lengths.tolist() == [6]


@pytest.mark.parametrize("bucket", [Bucket(4, 4, decode=True), Bucket(3, 11, decode=False), Bucket(1, 9, decode=False)])
def test_a_step_of_padding_has_all_its_tokens(bucket: Bucket) -> None:
    rows = rows_of(NO_ROWS, bucket, 4, HostRuntime())
    counts = np.diff(rows.queries.numpy())
    assert rows.queries[-1] == bucket.tokens
    assert len(counts) == bucket.rows
    assert counts.tolist() == rows.lengths.tolist()
    assert counts.max() - counts.min() <= 1
