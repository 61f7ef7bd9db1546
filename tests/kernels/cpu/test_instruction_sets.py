"""Products of integers, and attention to keys and values in int8, on CPUs with fewer instructions than this one."""

from pathlib import Path

import pytest
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from tests.kernels.cpu.test_integers import RATIOS, Stored, largest, weights
from tests.kernels.cpu.test_linear import random
from tests.kernels.cpu.test_paged_attention import Case, Heads, Row

NEEDS = {"x86-64-v2": "sse4_2", "haswell": "avx2", "skylake-avx512": "avx512bw"}
"""Targets of the compiler, and the flag of a CPU that runs them."""
BOUND = 2**-18
"""Plain vectors multiply and add in two steps, which rounds twice."""


@pytest.mark.full
@pytest.mark.parametrize("target", NEEDS)
def test_instruction_sets_give_the_same_products(
    kernels: CpuKernels, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if NEEDS[target] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this CPU cannot run {target}")
    flags = tuple(f"-march={target}" if flag == build.NATIVE else flag for flag in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", flags)
    other = CpuKernels(build.load(cache=tmp_path), 1)
    layouts: tuple[tuple[int, int | None, bool, Stored], ...] = (
        (8, None, False, "float16"),
        (4, 32, True, "float16"),
        (5, 64, False, "float16"),
        (6, 16, True, "float16"),
        (4, 32, True, "multiples"),
        (6, 16, False, "multiples"),
    )
    for bits, group, minima, stored in layouts:
        matrix = weights(70, 192, bits, group, minima, biased=True, stored=stored)
        ids = torch.arange(70)
        assert torch.equal(other.embed(matrix.packed(other), ids), kernels.embed(matrix.packed(kernels), ids))
        for rows in (1, 2, 3, 7):
            x = random(rows, 192)
            expected = kernels.linear(x, matrix.packed(kernels))
            product = other.linear(x, matrix.packed(other))
            magnitude = (x.abs().double() @ matrix.magnitudes().T).float()
            assert ((product - expected).abs() <= BOUND * magnitude).all()
            if target != "x86-64-v2":
                assert torch.equal(product, expected)
    for bits in RATIOS:
        x, matrix = largest(bits)
        assert torch.equal(other.linear(x, matrix.packed(other)), kernels.linear(x, matrix.packed(kernels)))
    for heads in (Heads(4, 2, 64, 16), Heads(6, 2, 17, 5, window=40), Heads(8, 1, 80, 24)):
        Case(other, [Row(0, 33), Row(700, 1), Row(255, 2)], heads, torch.int8).check()
