import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.bench._common.loads import sharegpt_lengths
from pagewire.shared.models.model_folder import read_config
from tools.experiments.other_servers import vllm_cpu
from tools.experiments.other_servers.vllm.inputs import tokenizer, write_model, write_prompts
from tools.experiments.other_servers.vllm_cpu import MEASURES, comparison, headline, table

PEER = '''#!{python}
"""Takes vLLM's arguments: a server that is healthy, or a load generator that makes its figures up."""
import http.server, json, pathlib, sys

def value(name):
    return sys.argv[sys.argv.index(name) + 1]

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

if sys.argv[1] == "serve":
    http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Health).serve_forever()
figures = dict.fromkeys({measures}, float(value("--max-concurrency")))
figures["completed"] = int(value("--num-prompts")) - {lost}
pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(figures))
'''


def peer(folder: Path, lost: int = 0) -> str:
    file = folder / "vllm"
    file.write_text(PEER.format(python=sys.executable, measures=list(MEASURES), lost=lost))
    file.chmod(0o755)
    return str(file)


def figures(rate: float, latency: float) -> dict[str, float]:
    return {key: rate if key == "output_throughput" else latency for key in MEASURES}


def test_ratios_above_one_are_better_for_us() -> None:
    ours, theirs = [figures(300, 2), figures(900, 9), figures(500, 4)], [figures(100, 8)] * 3
    lines = table({"pagewire": {32: ours}, "vllm": {32: theirs}})
    assert lines[-1] == "| 32 | ratio | 5.00x | 2.00x | 2.00x | 2.00x |"
    assert lines[2] == "| 32 | pagewire | 500.00 | 4.00 | 4.00 | 4.00 |"


def test_raw_results_are_compared_by_model_and_clients() -> None:
    def raw(model: str, temperature: float, clients: int, rate: float) -> dict[str, Any]:
        sides = {"pagewire": [figures(rate, 2), figures(3 * rate, 4)], "vllm": [figures(100, 4), figures(100, 4)]}
        return {
            "model": model,
            "temperature": temperature,
            "figures": {side: {str(clients): rounds} for side, rounds in sides.items()},
        }

    runs = [raw("nano", 0.0, 1, 100), raw("s135", 1.0, 128, 200)]
    head, _, *rows = comparison(runs, "output_throughput")
    assert head == "| tokens/s, ratio by clients | 1 | 128 |"
    assert rows == ["| nano, greedy | 2.00 (1.00–3.00) |  |", "| s135, temperature 1 |  | 4.00 (2.00–6.00) |"]
    assert comparison(runs, "median_ttft_ms")[2] == "| nano, greedy | 1.33 (1.00–2.00) |  |"
    assert headline(runs) == "nano, greedy: 2.0; s135, temperature 1: 4.0"


def test_a_missing_vllm_is_named_with_its_installation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_cpu.main([str(tmp_path / "nothing")])
    assert "setup_vllm_cpu.sh" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["200", "x", "200x", "fewxmany", "ShareGPT"])
def test_prompts_of_no_kind_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_cpu.main([sys.executable, "--prompts", wrong])
    assert f"{wrong} is neither sharegpt nor INxOUT" in capsys.readouterr().err


def test_prompts_have_the_lengths_of_conversations(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_prompts(tmp_path / name, 20)
    lines = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert len(lines) == 20
    assert len({line["output_tokens"] for line in lines}) > 10
    lengths = set(sharegpt_lengths())
    speaks = tokenizer()
    assert all((len(speaks.encode(line["prompt"]).ids), line["output_tokens"]) in lengths for line in lines)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


@pytest.mark.full
def test_both_servers_are_started_and_driven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    assert vllm_cpu.main([peer(tmp_path), "--clients", "1", "3", "--rounds", "2", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "| 3 | ratio | 1.00x | 1.00x | 1.00x | 1.00x |" in printed
    assert "ready after seconds: pagewire " in printed
    raw = json.loads(output.read_text())
    (run,) = raw["runs"]
    rounds = {side: {c: len(runs) for c, runs in by.items()} for side, by in run["figures"].items()}
    assert rounds == {"pagewire": {"1": 2, "3": 2}, "vllm": {"1": 2, "3": 2}}


@pytest.mark.full
def test_an_unanswered_request_ends_the_experiment(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="only 7 of 8 requests"):
        vllm_cpu.main([peer(tmp_path, lost=1), "--rounds", "1"])


def test_the_model_is_one_that_both_can_read(tmp_path: Path) -> None:
    write_model("nano", tmp_path)
    config = read_config(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 50304
    assert (tmp_path / "tokenizer.json").exists()
