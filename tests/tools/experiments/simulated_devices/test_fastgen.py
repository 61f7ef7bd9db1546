"""FastGen's closed loop, and the tables from a handful of requests."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tools.experiments.simulated_devices import fastgen
from tools.experiments.simulated_devices.fastgen import (
    PREFILL_FIRST,
    SPLITFUSE,
    Cell,
    Run,
    closed_loop,
    curves,
    main,
    simulate,
    summary,
)


def run(engine: str, clients: int, requests: int = 24, budget: int = 512) -> Run:
    return Run(Cell(engine, 2600, 60, clients), budget, requests, seed=42)


def test_each_client_has_one_request_at_a_time() -> None:
    requests = closed_loop(run(SPLITFUSE, 4)).requests
    assert len(requests) == 24
    for client in range(4):
        own = sorted((r for r in requests if r.client == client), key=lambda r: r.at)
        assert len(own) >= 3
        assert all(later.at == earlier.tokens_at[-1] for earlier, later in pairwise(own))


def test_both_engines_get_the_same_requests_first() -> None:
    both = (closed_loop(run(engine, 8)).requests for engine in (SPLITFUSE, PREFILL_FIRST))
    ours, theirs = (sorted((r.at, len(r.prompt), r.output) for r in requests if r.at < 0.08) for requests in both)
    assert ours == theirs
    assert len(ours) == 8


def test_splitfuse_keeps_tokens_coming() -> None:
    ours, theirs = (simulate(run(engine, 16, requests=48)) for engine in (SPLITFUSE, PREFILL_FIRST))
    assert theirs["itl_p95"] > 3.7 * ours["itl_p95"]
    assert ours["4 tokens/s"] > theirs["4 tokens/s"]
    assert ours["throughput"] > 0.95 * theirs["throughput"]


def test_a_smaller_budget_is_smoother() -> None:
    small, large = (simulate(run(SPLITFUSE, 8, budget=budget)) for budget in (256, 1024))
    assert small["itl_p95"] < large["itl_p95"] / 2


def test_the_command_prints_tables_and_writes_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fastgen, "PAIRS", ((1200, 60),))
    output = tmp_path / "fastgen.json"
    assert main(["--requests", "20", "--clients", "1", "16", "--jobs", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "Simulated llama-2-70b on 4 x a100-80, budget 512 tokens (prefill first: prompts up to 4096" in printed
    assert "P95 ITL, 16 clients" in printed
    record = json.loads(output.read_text())
    assert record["simulated"] is True
    assert [(r["engine"], r["clients"]) for r in record["runs"]] == [
        (SPLITFUSE, 1),
        (SPLITFUSE, 16),
        (PREFILL_FIRST, 1),
        (PREFILL_FIRST, 16),
    ]


def figures(throughput: float, itl_p95: float) -> dict[str, float]:
    return {
        "throughput": throughput,
        "itl_p95": itl_p95,
        "2 tokens/s": 9.0,
        "4 tokens/s": 2 * throughput,
        "6 tokens/s": 0,
    }


def test_ratios_are_of_the_means_and_have_the_range_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastgen, "PAIRS", ((1200, 60),))
    cells = {
        Cell(SPLITFUSE, 1200, 60, 16): [figures(rate, 0.1) for rate in (2.0, 3.0, 4.0)],
        Cell(PREFILL_FIRST, 1200, 60, 16): [figures(1.0, 0.4)] * 3,
    }
    row = "1200 in, 60 out | 3.00 (2.00–4.00) | 3.00 (2.00–4.00) | 4.00 | 3.00 (2.00–4.00)"
    assert summary(cells)[-1] == f"| {row} |"
    few = {cell._replace(clients=1): runs for cell, runs in cells.items()}
    assert summary(few)[-1] == "| 1200 in, 60 out | 3.00 (2.00–4.00) | 3.00 (2.00–4.00) |  |  |"
    picture = curves(cells, 1200, 60)
    assert "simulated" in picture
    assert picture.count("<polyline") == 6
