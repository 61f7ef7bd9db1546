"""The machine classes that the kernels are compiled for where they are not compiled on the machine that runs them."""

from dataclasses import dataclass

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")


@dataclass(frozen=True, slots=True)
class Target:
    """A class of machines."""

    name: str
    machine: str
    """Architecture, as `platform.machine` names it."""
    flags: tuple[str, ...]
    """Flags of the compiler, in place of -march=native."""
    needs: frozenset[str]
    """Features of the CPU, as /proc/cpuinfo names them."""


TARGETS = (
    Target(
        "x86-64-v4-amx",
        "x86_64",
        (*_V4_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    ),
    Target("x86-64-v4-bf16", "x86_64", _V4_FLAGS, _V4 | {"avx512_vnni", "avx512_bf16"}),
    Target("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Target("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Target("aarch64", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
)
"""All machine classes; of an architecture the one that needs most comes first."""


def targets_of(machine: str) -> list[Target]:
    """Returns the classes of an architecture, the one that needs most first."""
    return [target for target in TARGETS if target.machine == machine]


def best_target(machine: str, features: frozenset[str]) -> Target | None:
    """Returns the first class that a CPU with these features belongs to, None if there is none.

    >>> best_target("x86_64", _V4).name
    'x86-64-v4'
    >>> best_target("x86_64", frozenset({"sse2"})) is None
    True
    """
    return next((target for target in targets_of(machine) if target.needs <= features), None)
