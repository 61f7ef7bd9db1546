"""Kernels that begin before the previous one has ended wait for it before they touch memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagewire.kernels.triton import dependent_launch
from pagewire.kernels.triton.dependent_launch import launch_options
from tests.kernels.triton.ahead.compile import MODULES, configurations
from tests.kernels.triton.dependent import before_the_wait

ROOT = Path(__file__).parents[3]
DEPENDENT = {
    "layers.eight_bit_linear",
    "layers.gated",
    "layers.grouped_linear",
    "layers.integer_linear",
    "layers.low_rank",
    "attention.paged_attention",
    "layers.rms_norm",
    "attention.rotary_cache",
    "layers.round_rows",
    "layers.moe_routing",
    "attention.decode_attention",
}
"""The kernels of a layer."""


def check(*modules: str) -> None:
    """Compiles all forms of the modules in a process of its own: this one may have chosen the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.dependent", *modules]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    launches: list[dict[str, Any]] = json.loads(done.stdout)
    assert {form["form"].partition(":")[0] for form in launches} == DEPENDENT & set(modules)
    assert {form["arch"] for form in launches} == {80, 90}
    for form in launches:
        dependent = form["arch"] == 90
        assert form["launched"] == form["waits"] == dependent, form
        assert form["before"] == ([] if dependent else None), form
        assert form["spills"] == 0, form


def test_activations_wait_for_the_product_before_them() -> None:
    check("layers.gated")


@pytest.mark.full
def test_every_kernel_that_is_launched_early_waits() -> None:
    check(*MODULES)


def test_kernels_of_a_layer_are_launched_early_on_newer_gpus_alone() -> None:
    forms = configurations()
    assert {module for module, form in forms if form.on(90).options.get("launch_pdl")} == DEPENDENT
    for arch, dependent in ((80, False), (89, False), (90, True), (100, True), (120, True)):
        for module, form in forms:
            launched = form.on(arch)
            assert launched.constants.get("PDL", False) is launched.options.get("launch_pdl", False)
            assert launched.constants.get("PDL", False) is (dependent and module in DEPENDENT)


def test_a_load_or_a_store_before_the_wait_is_noticed() -> None:
    code = ["LDC R1, c[0x0][0x28]", "@P0 LDG.E R2, desc[UR4][R2.64]", "BRA 0x100", "ACQBULK", "STG.E [R2], R3", "EXIT"]
    assert before_the_wait(code) == code[1:3]
    assert before_the_wait([code[0], *code[3:]]) == []
    assert before_the_wait(code[:3]) is None


@pytest.mark.parametrize(
    ("arch", "driver", "expected"),
    [
        (80, 13000, {"PDL": False}),
        (90, 12020, {"PDL": False}),
        (90, 12030, {"PDL": True, "launch_pdl": True}),
        (120, 13000, {"PDL": True, "launch_pdl": True}),
    ],
)
def test_early_launches_depend_on_gpu_and_driver(
    arch: int, driver: int, expected: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles = SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    monkeypatch.setattr(dependent_launch, "triton", compiles)
    monkeypatch.setattr(dependent_launch, "current", lambda: arch)
    monkeypatch.setattr(dependent_launch, "driver_version", lambda: driver)
    assert launch_options.__wrapped__() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")
def test_the_interpreter_ignores_early_launches() -> None:
    assert launch_options() == {"PDL": False}
