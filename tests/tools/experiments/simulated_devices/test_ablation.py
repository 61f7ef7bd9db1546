"""The ablation's cells, and its tables from a handful of requests."""

import json
import math
from pathlib import Path

import pytest

from pagewire.bench._common.loads import LOADS
from tools.experiments.simulated_devices import ablation
from tools.experiments.simulated_devices.ablation import CHANGES, SYSTEMS, Cell, Run, main, read, simulate
from tools.experiments.simulated_devices.virtual_time.systems import Variant


def figures(variant: Variant, load: str = "ShareGPT", qps: float = math.inf) -> dict[str, float]:
    return simulate(Run(Cell(SYSTEMS[0], load, qps, variant), seed=0, requests=24))


def test_a_run_is_repeatable() -> None:
    assert figures(Variant()) == figures(Variant())


def test_window_one_leaves_the_device_waiting() -> None:
    assert figures(Variant(window=1))["busy"] < 0.93
    assert figures(Variant(window=8))["busy"] > 0.98


def test_output_in_between_leaves_the_device_waiting() -> None:
    assert figures(Variant(asynchronous=False))["busy"] < figures(Variant())["busy"]


def test_prefill_first_stalls_streams() -> None:
    on, off = (figures(Variant(splitfuse=on), "prefill-heavy", 32.0) for on in (True, False))
    assert off["itl_p99"] > 1.3 * on["itl_p99"]


@pytest.mark.parametrize("window", [8, 16])
@pytest.mark.parametrize("qps", [8.0, math.inf])
def test_little_memory_is_wasted_however_long_the_lease_is(qps: float, window: int) -> None:
    assert figures(Variant(window=window), qps=qps)["waste"] <= 0.04


@pytest.mark.parametrize("qps", [8.0, math.inf])
def test_at_most_a_fiftieth_of_the_memory_is_wasted(qps: float) -> None:
    run = figures(Variant(), "prefill-heavy", qps)
    assert run["waste"] - run["waste_running"] - run["waste_queued"] <= 0.02


def test_larger_blocks_waste_more() -> None:
    small, large = (figures(Variant(block_size=size), qps=8.0) for size in (1, 256))
    assert small["waste"] < large["waste"] / 3


def test_a_shared_beginning_is_computed_once() -> None:
    on, off = (figures(Variant(prefix_cache=on), "prefill-heavy", 32.0) for on in (True, False))
    assert on["ttft_p95"] < off["ttft_p95"]


def test_a_slow_rate_sends_a_minutes_requests() -> None:
    assert simulate(Run(Cell(SYSTEMS[0], "prefill-heavy", 1.0, Variant()), 0, 500))["row_steps"] < 60 * 20


def test_the_command_prints_tables_and_writes_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {name: CHANGES[name] for name in ("lease window 1", "lease window 8", "whole prompts first")}
    monkeypatch.setattr(ablation, "CHANGES", changes)
    monkeypatch.setattr(ablation, "BLOCK_SIZES", {16: Variant()})
    monkeypatch.setattr(ablation, "LOADS", {"prefill-heavy": LOADS["prefill-heavy"]})
    output = tmp_path / "ablation.json"
    assert main(["--requests", "4", "--qps", "inf", "--jobs", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if line.startswith("| simulated")]) == 2
    assert len([line for line in printed.splitlines() if line.startswith("| waste, % (simulated)")]) == 2
    record = json.loads(output.read_text())
    assert record["simulated"] is True
    assert len(record["runs"]) == 2 * 3
    assert all(len(run["seeds"]) == 3 for run in record["runs"])
    cells = read(record["runs"])
    assert set(cells) == {
        Cell(system, "prefill-heavy", math.inf, variant) for system in SYSTEMS for variant in changes.values()
    }


def run(rate: float, interval: float = 1.0) -> dict[str, float]:
    return {"tokens_per_s": rate, "itl_p99": interval, **dict.fromkeys(ablation.PARTS, rate / 100)}


def test_changes_are_relative_to_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "LOADS", {"ShareGPT": LOADS["ShareGPT"]})
    changed = Variant(window=1)
    cells = {
        Cell(SYSTEMS[0], "ShareGPT", math.inf, Variant()): [run(10.0), run(20.0)],
        Cell(SYSTEMS[0], "ShareGPT", math.inf, changed): [run(5.0, 3.0), run(20.0, 1.0)],
    }
    lines = ablation.changes(cells, SYSTEMS[0], {"lease window 1": changed})
    assert lines[-1] == "| lease window 1 | 0.83 (0.50–1.00) | 2.00 |"
    monkeypatch.setattr(ablation, "BLOCK_SIZES", {16: Variant()})
    assert ablation.waste(cells, SYSTEMS[0], "ShareGPT")[-3] == "| block size 16 | 15.00 (10.00–20.00) |"
