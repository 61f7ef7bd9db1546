"""Compares the products with quantized weights with PyTorch's in the model's dtype.

The products of the feed-forward layers of a model, as its layers compute them: where activations are rounded, that
counts too. All are replayed as graphs over several copies of the weights, which no cache holds.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.bench._common.output import markdown
from pagewire.bench._gpu.kernels import replayed
from pagewire.bench._gpu.machine import REPEATS, Machine
from pagewire.kernels.triton.layers.eight_bit_linear import EightBitMatrix
from pagewire.kernels.triton.layers.integer_linear import pack
from pagewire.kernels.triton.layers.split_inputs import counters_of
from pagewire.services.executor.devices.cuda.quantized_linear import EightBitLinear, IntegerLinear

TOGETHER = 256 << 20
"""Least bytes of all copies of a weight together."""
GROUP = 128


@dataclass
class LinearRun:
    """One product in one format."""

    model: str
    layer: str
    outputs: int
    inputs: int
    weights: str
    """Name of the format."""
    rows: int
    us: list[float] = field(default_factory=list)
    share: float = 0.0
    """Share of the copy bandwidth: bytes of the weights per second of the median time."""


def formats(device: torch.device, dtype: torch.dtype) -> Mapping[str, Callable[[int, int], nn.Module]]:
    """Returns by name what makes a layer of random weights from the numbers of its outputs and inputs."""
    random = torch.Generator(device).manual_seed(0)

    def scales(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=random, device=device)

    def integers(bits: int, group: int | None) -> Callable[[int, int], nn.Module]:
        def made(outputs: int, inputs: int) -> nn.Module:
            codes = torch.randint(1 << bits, (outputs, inputs), generator=random, dtype=torch.uint8, device=device)
            groups = inputs // (group or inputs)
            return IntegerLinear(pack(codes, bits, scales(outputs, groups), 1 << (bits - 1), None), None)

        return made

    def eight_bits(stored: torch.dtype, group: int | None) -> Callable[[int, int], nn.Module]:
        def made(outputs: int, inputs: int) -> nn.Module:
            values = (torch.randn(outputs, inputs, generator=random, device=device) * 20).to(stored)
            every = scales(inputs // (group or inputs), outputs)
            return EightBitLinear(EightBitMatrix(values, every, counters_of(outputs, device)), None)

        return made

    def plain(outputs: int, inputs: int) -> nn.Module:
        layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
        return layer.requires_grad_(requires_grad=False)

    return {
        str(dtype).removeprefix("torch."): plain,
        f"int4, groups of {GROUP}": integers(4, GROUP),
        "int8 per output": integers(8, None),
        f"fp8, blocks of {GROUP}": eight_bits(torch.float8_e4m3fn, GROUP),
        "int8, int8 activations": eight_bits(torch.int8, None),
    }


def linear(
    machine: Machine, models: dict[str, dict[str, Any]], rows: Sequence[int], repeats: int = REPEATS
) -> Iterator[LinearRun]:
    """Measures both products of the feed-forward layers in every format, with each number of rows."""
    device = machine.runtime.device
    for name, config in models.items():
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        for layer, outputs, inputs in (("gate and up", 2 * inner, hidden), ("down", hidden, inner)):
            for weights, build in formats(device, machine.dtype).items():
                copies = [build(outputs, inputs)]
                size = sum(part.nbytes for part in (*copies[0].parameters(), *copies[0].buffers()))
                copies += [build(outputs, inputs) for _ in range(TOGETHER // size)]
                for count in rows:
                    x = torch.randn(count, inputs, dtype=machine.dtype, device=device)

                    def work(copies: list[nn.Module] = copies, x: Tensor = x) -> list[Tensor]:
                        return [copy(x) for copy in copies]

                    run = LinearRun(name, layer, outputs, inputs, weights, count)
                    with torch.inference_mode():
                        times = replayed(machine.runtime, work, repeats)
                    run.us = [seconds * 1e6 / len(copies) for seconds in times]
                    run.share = size / (statistics.median(run.us) / 1e6) / machine.bandwidth
                    yield run


def table(runs: Sequence[LinearRun]) -> list[str]:
    """Returns a line per product, format and number of rows, in Markdown."""
    return markdown(
        "model | layer | weights | rows | us | of the copy bandwidth",
        (
            f"{run.model} | {run.layer}, {run.inputs} to {run.outputs} | {run.weights} | {run.rows}"
            f" | {statistics.median(run.us):.1f} | {run.share:.1%}"
            for run in runs
        ),
    )
