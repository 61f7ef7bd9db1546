"""Ahead-of-time compilation for a part that is not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.kernels.gpu_arch import AMD_PARTS
from tests.kernels.triton.ahead.compile import MODULES, configurations

ROOT = Path(__file__).parents[3]


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: this one may have chosen the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.ahead.compile", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def rows(table: str) -> list[list[str]]:
    return [line.rsplit(maxsplit=4) for line in table.splitlines() if ": " in line]


@pytest.mark.full
def test_the_table_has_a_line_for_every_form() -> None:
    result = compiled("--arch", "sm_90", "--kernel", "step.scatter", "layers.gated")
    assert result.returncode == 0, result.stdout + result.stderr
    table = rows(result.stdout)
    assert len(table) == sum(module in ("step.scatter", "layers.gated") for module, _ in configurations())
    for name, registers, spills, shared, _ in table:
        assert 0 < int(registers) <= 255, name
        assert int(spills) == 0, name
        assert int(shared) <= 227 * 1024, name


def test_every_kernel_has_forms() -> None:
    assert {module for module, _ in configurations()} == set(MODULES)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_form_fits_the_part(arch: str) -> None:
    """For sm_90 this is what `make kernels` does before the tests."""
    result = compiled("--arch", arch)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.full
def test_a_kernel_compiles_for_amds_gpus() -> None:
    result = compiled("--arch", *AMD_PARTS, "--kernel", "step.scatter", "layers.integer_linear")
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(part in result.stdout for part in AMD_PARTS)


def test_forms_for_amds_gpus_ask_for_nothing_that_only_nvidias_have() -> None:
    for module, configuration in configurations():
        form = configuration.on(AMD_PARTS[0])
        assert not form.options.keys() & {"maxnreg", "launch_pdl"}, module
        assert not form.constants.get("PDL"), module
        instructions = form.constants.get("ASM")
        assert not isinstance(instructions, tuple) or not any(instructions), module


def test_an_unknown_part_is_refused() -> None:
    assert compiled("--arch", "sm_12").returncode == 2


@pytest.mark.full
def test_a_kernel_above_the_limit_fails() -> None:
    """With limits of a smaller part the same command says so and exits with 1."""
    code = (
        "import sys, tests.kernels.triton.ahead.compile as c; c.SHARED_MEMORY[90] = -1; "
        # In this process, because others have the true limits.
        "c.usages = lambda archs, modules: "
        "[c.usage(i, 90) for i, (module, _) in enumerate(c.configurations()) if module in modules]; "
        "sys.exit(c.main(['--arch', 'sm_90', '--kernel', 'layers.gated']))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "FAILED" in result.stdout
