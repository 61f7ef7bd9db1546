"""The class of machines whose kernels a CPU runs."""

from itertools import pairwise

import pytest

from pagewire.kernels.cpu.targets import TARGETS, best_target

ZEN_2 = frozenset(["fpu", "sse4_2", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave", "sha_ni"])
SKYLAKE_X = ZEN_2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ZEN_4 = SKYLAKE_X | {"avx512_vnni", "avx512_bf16", "avx512_vbmi2"}
SAPPHIRE_RAPIDS = ZEN_4 | {"amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, "x86-64-v4-amx"),
        ("x86_64", ZEN_4, "x86-64-v4-bf16"),
        ("x86_64", SKYLAKE_X, "x86-64-v4"),
        ("x86_64", ZEN_2, "x86-64-v3"),
        ("aarch64", frozenset({"fp", "asimd"}), "aarch64"),
        ("x86_64", frozenset({"sse4_2", "avx"}), None),
        ("riscv64", ZEN_4, None),
    ],
)
def test_the_best_class_of_the_cpu_is_chosen(machine: str, features: frozenset[str], name: str | None) -> None:
    target = best_target(machine, features)
    assert (target.name if target is not None else None) == name


def test_an_earlier_class_of_an_architecture_needs_all_that_a_later_one_needs() -> None:
    for machine in {target.machine for target in TARGETS}:
        needs = [target.needs for target in TARGETS if target.machine == machine]
        assert all(before > after for before, after in pairwise(needs))
