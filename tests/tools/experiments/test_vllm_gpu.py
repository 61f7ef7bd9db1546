"""The comparison with vLLM on one GPU, as far as a machine without one can tell."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.experiments import vllm_gpu
from tools.experiments.vllm.client import Record
from tools.experiments.vllm.inputs import GPU_SHAPES, write_shape
from tools.experiments.vllm.stages import STAGES, Stage, figures, planned
from tools.experiments.vllm_gpu import SHOWN, command_of, table

SERVER = '''#!{python}
"""Takes the arguments of a server, and answers each request with its tokens, one a chunk."""
import http.server, json, sys

class Completions(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count = min(body["max_tokens"], 8)
        events = [{{"choices": [{{"text": "x"}}]}}] * count
        events.append({{"choices": [], "usage": {{"prompt_tokens": 3, "completion_tokens": count}}}})
        text = "".join(f"data: {{json.dumps(event)}}\\n\\n" for event in events).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *values):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Completions).serve_forever()
'''


def options(**values: Any) -> argparse.Namespace:
    defaults = {"device": "cuda", "target": Path("/t"), "pagewire_args": "", "vllm_args": "", "vllm_command": ""}
    return argparse.Namespace(**(defaults | values))


def server(folder: Path) -> str:
    file = folder / "server"
    file.write_text(SERVER.format(python=sys.executable))
    file.chmod(0o755)
    return str(file)


def test_both_sides_have_the_same_limits() -> None:
    (ours, _), (theirs, environment) = (
        command_of(side, options(pagewire_args="--a 1", vllm_args="--b 2"), Path("m"), 1) for side in vllm_gpu.SIDES
    )
    shared = ["--max-model-len", "8192", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.9"]
    assert set(shared) <= set(ours) & set(theirs)
    assert (ours[-2:], theirs[-2:]) == (["--a", "1"], ["--b", "2"])
    assert environment["PYTHONPATH"] == "/t/vllm"


def test_a_stage_sends_the_same_requests_to_both_sides() -> None:
    first, second = (planned("burst", STAGES["burst"], 0.02) for _ in range(2))
    assert first == second
    assert len(first) == 10
    assert all(request.at == 0 for request in first)
    arrivals = [request.at for request in planned("rate32", STAGES["rate32"], 0.02)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] > 0


def test_drawn_lengths_keep_to_their_limits() -> None:
    requests = planned("x", Stage("", (2600, 60, 0.3), 50))
    words = [request.prompt.count(" ") for request in requests]
    assert 16 <= min(words) < 2600 < max(words) <= 4000
    assert min(request.max_tokens for request in requests) >= 1


def test_figures_are_those_of_vllms_benchmark() -> None:
    good = Record(sent=1.0, chunks=[1.5, 1.6, 1.9], tokens=4, prompt_tokens=7, error="")
    result = figures([good, Record()])
    assert (result["requests"], result["answered"], result["errors"]) == (2, 1, ["late"])
    expected = {"seconds": 0.9, "output_per_s": 4 / 0.9, "ttft_median": 500, "tpot_median": 400 / 3, "itl_p99": 298}
    assert {name: result[name] for name in expected} == pytest.approx(expected)


def test_ratios_above_one_are_better_for_us() -> None:
    def side(rate: float, time: float) -> dict[str, Any]:
        values = {key: rate if key == "output_per_s" else time for key in SHOWN}
        return {"ready_after_s": 3.0, "stages": {"burst": values | {"answered": 5, "requests": 5}}}

    lines = table({"pagewire": side(300, 2), "vllm": side(100, 8)})
    assert "| ShareGPT, all at once | ratio | 3.00x | 4.00x | 4.00x | 4.00x | 4.00x | 4.00x |  |" in lines
    assert lines[-1] == "ready after seconds: pagewire 3.0, vllm 3.0"


def test_a_side_is_served_loaded_and_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for vLLM, whose long answers are too short."""
    monkeypatch.setattr(vllm_gpu, "WARM_UP", Stage("warm-up", (20, 4, 0.0), 4, clients=1))
    file = tmp_path / "vllm.json"
    command = ["--only", "vllm", "--vllm-command", server(tmp_path), "--shape", "tiny", "--scale", "0.01"]
    assert vllm_gpu.main([*command, "--device", "cpu", "--stages", "single", "--output", str(file)]) == 0
    stages = json.loads(file.read_text())["sides"]["vllm"]["stages"]
    assert {name: (stage["requests"], stage["answered"]) for name, stage in stages.items()} == {
        "warm-up": (4, 4),
        "single": (4, 0),
    }
    assert stages["single"]["errors"] == ["cut short"]
    assert vllm_gpu.main(["--table", str(file)]) == 0


def test_a_side_that_does_not_serve_is_written_down(tmp_path: Path) -> None:
    file = tmp_path / "vllm.json"
    command = ["--only", "vllm", "--vllm-command", "false", "--shape", "tiny", "--device", "cpu", "--output", str(file)]
    assert vllm_gpu.main(command) == 1
    assert "does not serve" in json.loads(file.read_text())["sides"]["vllm"]["failed"]


def test_every_id_of_the_model_has_a_text_of_its_own(tmp_path: Path) -> None:
    write_shape("tiny", tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(GPU_SHAPES["tiny"]["vocab_size"]))
    assert all(re.fullmatch("[!-~Ġ]+", token) for token in vocabulary)
