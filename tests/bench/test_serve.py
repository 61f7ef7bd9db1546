"""The load generator's definitions, and a run against a server of events."""

import asyncio
import json
import random
import statistics
from pathlib import Path

import pytest

from pagewire.bench import serve
from pagewire.bench.serve import Record, arrivals, goal, summarize
from tests.bench.common.test_event_stream import chunked, server


def test_latencies_are_defined_as_in_vllm() -> None:
    record = Record(sent=1.0, chunks=[0.2, 0.3, 0.6], ended=0.6, prompt_tokens=5, tokens=5)
    assert record.ttft == 0.2
    assert record.tpot == pytest.approx(0.1)
    assert record.itl == pytest.approx([0.1, 0.3])
    failed = Record(sent=0.0, ended=2.0, error="refused")
    figures = summarize([record, failed], {"ttft": 0.25, "e2el": 0.5})
    assert (figures["completed"], figures["failed"], figures["seconds"]) == (1, 1, 2.0)
    assert figures["goodput"] == 0.0, "it is too late at its end"
    assert summarize([record, failed], {"tpot": 0.11})["goodput"] == 0.5
    assert figures["output_tokens_per_second"] == 2.5
    assert figures["milliseconds"]["itl"]["mean"] == pytest.approx(200)
    assert figures["milliseconds"]["itl"]["p99"] == pytest.approx(298)


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    draw = random.Random(0)
    assert arrivals(3, float("inf"), 1.0, draw) == [0.0] * 3

    def variation(burstiness: float) -> float:
        times = arrivals(4000, 10.0, burstiness, draw)
        assert times[-1] == pytest.approx(400)
        gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert variation(1.0) == pytest.approx(1.0, rel=0.1), "a Poisson process"
    assert variation(0.25) == pytest.approx(2.0, rel=0.15), "bursts"
    assert variation(100.0) == pytest.approx(0.1, rel=0.1)


def test_a_goal_has_a_latency_and_a_limit() -> None:
    assert goal("ttft:250") == ("ttft", 0.25)
    with pytest.raises(Exception, match="itl:3 is no limit"):
        goal("itl:3")


def test_a_run_counts_answers_failures_and_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"choices": [{"index": 0, "text": "a"}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    output = tmp_path / "out.json"
    fixed = ["--model", "m", "--num-prompts", "3", "--max-concurrency", "2", "--output", str(output)]

    async def run() -> int:
        async with server(chunked(stream.encode(), 30)) as url:
            base = url.removesuffix("/v1/chat/completions")
            return await asyncio.to_thread(serve.main, ["--url", base, *fixed, "--goodput", "ttft:60000"])

    assert asyncio.run(run()) == 0
    assert "3 answered, 0 failed" in capsys.readouterr().out
    figures = json.loads(output.read_text())["figures"]
    assert figures["goodput"] == figures["requests_per_second"] > 0
    fixed += ["--processes", "2"]
    assert asyncio.run(run()) == 0, "two processes share the prompts"
    assert "3 answered, 0 failed" in capsys.readouterr().out
    assert serve.main(["--url", "http://127.0.0.1:1", *fixed]) == 1
    assert "failed: " in capsys.readouterr().err
