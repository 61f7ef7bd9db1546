"""Decode and prefill steps are measured on the real device, here under Triton's interpreter: no time means anything."""

import sys
from dataclasses import replace

import pytest
import torch

from pagewire.bench._gpu import steps as module
from pagewire.bench._gpu.machine import simulated
from pagewire.bench._gpu.plan import Cell, decode_bytes, prefill_flops
from pagewire.bench._gpu.steps import DecodeRun, PrefillRun, decode, decode_table, prefill, prefill_table, simulated_ms
from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.cuda.attention.flashinfer_backend import FlashInferBackend
from pagewire.services.executor.devices.sim.roofline import GPUS, shape_of
from tests.bench.gpu.cases import MACHINE, MODEL
from tests.services.executor.devices.cuda.attention import fake_flashinfer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")


def test_decode_steps_are_timed_in_every_cell_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARM_UP", 1)
    cells = [Cell(1, 16), Cell(2, 32), Cell(2, 1 << 20)]
    runs = list(decode(MACHINE, {"tiny": MODEL}, cells, steps=2, cached=torch.float32))
    assert [(run.rows, run.context) for run in runs] == [(1, 16), (2, 32)]
    shape = shape_of(MODEL)
    for run in runs:
        assert len(run.wall_ms) == 2
        assert min(run.wall_ms) > 0
        assert run.device_ms > 0
        assert run.bytes == decode_bytes(shape, run.rows, run.context - 1.5, itemsize=4)
        assert run.share == pytest.approx(run.bytes / (run.ms / 1e3) / MACHINE.bandwidth)


def test_a_model_that_does_not_fit_is_left_out() -> None:
    large = MODEL | {"vocab_size": 1 << 20}
    assert not list(decode(MACHINE, {"large": large}, [Cell(1, 32)], steps=1, cached=torch.float32))
    assert not list(prefill(MACHINE, {"large": large}, [16], repeats=1, cached=torch.float32))


def test_prompts_are_timed_in_one_step() -> None:
    runs = list(prefill(MACHINE, {"tiny": MODEL}, [5, 18], repeats=1, cached=torch.float8_e4m3fn))
    assert [run.tokens for run in runs] == [5, 18]
    for run in runs:
        assert len(run.device_ms) == len(run.wall_ms) == 1
        assert min(run.device_ms) > 0
        assert run.flops == prefill_flops(shape_of(MODEL), run.tokens)
        assert run.share > 0


def test_the_tables_have_times_rates_and_shares() -> None:
    decoded = DecodeRun("m", 8, 512, [2.0, 1.0, 4.0], 1.9, 3.2e9, 0.5)
    assert decode_table([decoded])[-1] == "| m | 8 | 512 | 2.000 | 1.900 |  | 3.20 | 50.0% | 4000 |"
    prompt = PrefillRun("m", 512, [2.0, 1.0, 4.0], [3.0, 3.0, 3.0], 4e12, 0.25)
    prompt.simulated_ms = 2.5
    assert prefill_table([prompt])[-1] == "| m | 512 | 2.00 | 3.00 | 2.50 | 4.00 | 25.0% | 256000 |"


def test_the_simulator_times_a_step_of_a_gpu_that_it_knows() -> None:
    shape = shape_of(SHAPES["llama-3-8b"])
    gpu = simulated("NVIDIA H200")
    assert gpu is GPUS["h200"]
    assert simulated("NVIDIA A100-SXM4-80GB") is GPUS["a100-80"]
    few, many = (simulated_ms(gpu, shape, 100, 1, rows) for rows in (1, 64))
    assert few is not None
    assert many is not None
    assert 0 < few < many
    assert simulated("NVIDIA GeForce RTX 4090") is None
    assert simulated_ms(None, shape, 100, 1, 1) is None


def test_another_backend_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = fake_flashinfer.module(float32=True)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(module, "WARM_UP", 1)
    machine = replace(MACHINE, backend=FlashInferBackend)
    assert list(decode(machine, {"tiny": MODEL}, [Cell(2, 32)], steps=2, cached=torch.float32))
    assert list(prefill(machine, {"tiny": MODEL}, [18], repeats=1, cached=torch.float32))
    assert flashinfer.BatchPrefillWithPagedKVCacheWrapper.num_created > 2
