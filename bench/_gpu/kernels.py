"""Compares the attention kernels with PyTorch's on the same numbers, and all of them with PyTorch's in float64.

PyTorch's kernels read contiguous keys and values, ours read blocks in random order. All are replayed as graphs, so that
launches do not count; float64 is not timed.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pagewire.bench._common.output import markdown
from pagewire.bench._gpu.machine import REPEATS, Machine, timed
from pagewire.bench._gpu.plan import BLOCK_SIZE, Cell, attention_flops
from pagewire.kernels.attention_layer import Attention, Batch
from pagewire.kernels.triton.attention import decode_attention
from pagewire.kernels.triton.attention.paged_attention import paged_attention
from pagewire.kernels.triton.attention.plan_splits import capacity
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.sim.roofline import ModelShape, shape_of

CHECKED = 128
"""Maximum number of a prompt's last queries that are compared with float64."""


@dataclass
class KernelRun:
    """One implementation at one size."""

    model: str
    """Model with these heads."""
    kind: str
    """decode or prefill."""
    rows: int
    context: int
    """Tokens of each sequence; of a prefill, all of them are queries."""
    name: str
    us: list[float] = field(default_factory=list)
    error: float = 0.0
    """Largest distance of a number from the result in float64."""
    share: float = 0.0
    """Share of the copy bandwidth that a decode reaches, or of the matrix rate that a prefill reaches."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of R sequences of L tokens, of which the last W are queries."""

    layer: Attention
    batch: Batch
    query: Tensor
    """[R * W, Hq, d]."""
    keys: Tensor
    """[R, Hkv, L, d]."""
    values: Tensor
    """[R, Hkv, L, d]."""
    caches: tuple[Tensor, Tensor]
    """Keys and values in blocks, [R * blocks, Hkv, block size, d]."""

    @property
    def queries(self) -> Tensor:
        """[R, Hq, W, d]."""
        rows, heads, dim = len(self.keys), *self.query.shape[1:]
        return self.query.view(rows, -1, heads, dim).transpose(1, 2).contiguous()


def problem(shape: ModelShape, rows: int, context: int, width: int, machine: Machine) -> Problem:
    """Returns a problem of random numbers; `context` is a multiple of the block size."""
    device = machine.runtime.device
    random = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random, dtype=machine.dtype, device=device)

    heads, dim, blocks = shape.kv_heads, shape.head_dim, context // BLOCK_SIZE
    keys, values = normal(rows, heads, context, dim), normal(rows, heads, context, dim)
    places = torch.randperm(rows * blocks, generator=random, device=device)

    def paged(dense: Tensor) -> Tensor:
        cut = dense.view(rows, heads, blocks, BLOCK_SIZE, dim).transpose(1, 2).flatten(0, 1)
        cache = torch.empty(cut.shape, dtype=cut.dtype, device=device)  # contiguous, also with one row
        cache[places] = cut
        return cache

    def counted(step: int, *, ends: bool) -> Tensor:
        return torch.arange(rows + ends, dtype=torch.int32, device=device) * step

    batch = Batch(
        slots=counted(1, ends=False),
        lengths=torch.full((rows,), context, dtype=torch.int32, device=device),
        cu_queries=counted(width, ends=True),
        block_tables=places.int().view(rows, blocks),
    )
    layer = Attention(shape.heads, heads, dim, dim**-0.5)
    return Problem(layer, batch, normal(rows * width, shape.heads, dim), keys, values, (paged(keys), paged(values)))


def contenders(case: Problem, machine: Machine, *, decode: bool) -> Mapping[str, Callable[[], Tensor]]:
    """Returns the implementations by name, each of which computes [R, Hq, W, d].

    The split plan is made here, because a step has one for all layers.
    """
    queries, keys, values = case.queries, case.keys, case.values
    out = torch.empty_like(case.query)
    device, layer, batch = machine.runtime.device, case.layer, case.batch
    plan = decode_attention.new_plan(
        layer,
        len(batch.slots),
        capacity(machine.runtime.multiprocessors, layer.kv_heads),
        device,
        case.query.dtype,
        case.caches[0].dtype,
    )
    decode_attention.plan_batch(layer, batch, plan)

    def ours() -> Tensor:
        if decode:
            decode_attention.split_attention(layer, batch, plan, case.query, *case.caches, out)
        else:
            paged_attention(layer, batch, case.query, *case.caches, out)
        return out.view(len(keys), -1, *out.shape[1:]).transpose(1, 2)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=not decode, enable_gqa=True)

    flex: Any = flex_attention
    if device.type == "cuda":
        torch.compiler.reset()  # it compiles a function for few shapes, and then for none
        flex = torch.compile(flex_attention, dynamic=False)
    length = keys.shape[2]
    mask = None if decode else create_block_mask(lambda _b, _h, q, kv: q >= kv, None, None, length, length, str(device))

    def flexible() -> Tensor:
        output: Tensor = flex(queries, keys, values, block_mask=mask, enable_gqa=True)
        return output

    return {"pagewire": ours, "PyTorch SDPA": sdpa, "FlexAttention": flexible}


def kernels(
    machine: Machine,
    models: dict[str, dict[str, Any]],
    cells: Sequence[Cell],
    prompts: Sequence[int],
    repeats: int = REPEATS,
) -> Iterator[KernelRun]:
    """Measures decodes of all `cells`, and one prompt of each length in `prompts`."""
    sizes = [(cell, 1) for cell in cells] + [(Cell(1, tokens), tokens) for tokens in prompts]
    for name, config in models.items():
        shape = shape_of(config)
        for cell, width in sizes:
            case = problem(shape, cell.rows, cell.context, width, machine)
            exact = last_queries(case)
            for name_of_kernel, work in contenders(case, machine, decode=width == 1).items():
                run = KernelRun(name, "decode" if width == 1 else "prefill", cell.rows, cell.context, name_of_kernel)
                with torch.inference_mode():
                    output = work().transpose(1, 2).flatten(0, 1)[-len(exact) :]
                    run.error = float((output.double() - exact).abs().max())
                    run.us = [seconds * 1e6 for seconds in replayed(machine.runtime, work, repeats)]
                seconds = statistics.median(run.us) / 1e6
                moved = sum(part.nbytes for part in case.caches)
                run.share = (
                    moved / seconds / machine.bandwidth
                    if width == 1
                    else attention_flops(shape, width) / seconds / machine.rate
                )
                yield run


def last_queries(case: Problem) -> Tensor:
    """Returns the attention of each sequence's last queries, at most `CHECKED`, in float64: [R * queries, Hq, d].

    Scores take 8 bytes per query and key, so the sequences are computed one after the other.
    """
    queries = case.queries[:, :, -CHECKED:]
    checked, length = queries.shape[2], case.keys.shape[2]
    seen = torch.ones(checked, length, dtype=torch.bool, device=queries.device).tril(length - checked)
    exact = [
        F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=seen, enable_gqa=True)
        for q, k, v in zip(queries[:, None], case.keys[:, None], case.values[:, None], strict=True)
    ]
    return torch.cat(exact).transpose(1, 2).flatten(0, 1)


def replayed(runtime: Runtime, work: Callable[[], object], repeats: int) -> list[float]:
    """Returns the seconds of each replay of `work` as a graph."""

    def once() -> None:
        work()

    (graph,) = runtime.capture([once])
    return timed(runtime, graph, repeats)


def table(runs: Sequence[KernelRun]) -> list[str]:
    """Returns a line per implementation and size, in Markdown."""
    return markdown(
        "model | kind | sequences | tokens each | kernel | us | share | largest error",
        (
            f"{run.model} | {run.kind} | {run.rows} | {run.context} | {run.name} | {statistics.median(run.us):.1f}"
            f" | {run.share:.1%} | {run.error:.1e}"
            for run in runs
        ),
    )
