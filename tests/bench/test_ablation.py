"""The ablation's cells, and its tables from a handful of requests."""

import json
import math
from pathlib import Path

import pytest

from pagewire.bench import ablation
from pagewire.bench._simulation.loads import LOADS
from pagewire.bench._simulation.systems import Variant
from pagewire.bench.ablation import GROUPS, SYSTEMS, Cell, Run, main, simulate


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


def test_larger_blocks_waste_more() -> None:
    small, large = (figures(Variant(block_size=size), qps=8.0) for size in (1, 256))
    assert small["waste"] < large["waste"] / 3


def test_a_shared_beginning_is_computed_once() -> None:
    on, off = (figures(Variant(prefix_cache=on), "prefill-heavy", 32.0) for on in (True, False))
    assert on["ttft_p95"] < off["ttft_p95"]


def test_a_slow_rate_sends_a_minutes_requests() -> None:
    assert simulate(Run(Cell(SYSTEMS[0], "prefill-heavy", 1.0, Variant()), 0, 500))["row_steps"] < 60 * 20


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ablation, "GROUPS", {name: GROUPS[name] for name in ("Lease window", "SplitFuse")})
    monkeypatch.setattr(ablation, "LOADS", {"prefill-heavy": LOADS["prefill-heavy"]})
    assert main(["--requests", "4", "--qps", "inf", "--jobs", "1", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    headings = [line for line in printed.splitlines() if line.startswith("###")]
    assert len(headings) == 2 * 2
    assert all(line.endswith("(simulated)") for line in headings)
    records = json.loads((tmp_path / "ablation.json").read_text())
    assert len(records) == 2 * 6
    assert all(record["simulated"] and len(record["seeds"]) == 3 for record in records)
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "ablation-llama-3-8b.svg",
        "ablation-llama-3-70b.svg",
    }
