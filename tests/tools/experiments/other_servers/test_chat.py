import json
from pathlib import Path

import pytest

from pagewire.shared.errors import ConfigurationError
from tests.pagewire.serving import serving
from tools.experiments.other_servers import chat
from tools.experiments.other_servers.chat import Answer, Round, read_questions, table


def test_the_table_has_medians_of_the_rounds() -> None:
    rounds = [
        Round(clients=clients, seconds=2.0, requests=4, tokens=tokens, ttft_ms=ttft, tpot_ms=10.0)
        for clients in (8, 1)
        for tokens, ttft in ((100, 30.0), (300, 10.0), (200, 20.0))
    ]
    assert table(rounds)[2:] == ["| pagewire, 1 | 100.0 | 20 | 10.0 |", "| pagewire, 8 | 100.0 | 20 | 10.0 |"]


def test_the_first_token_is_no_part_of_the_time_per_token() -> None:
    assert Answer(tokens=5, first=1.0, last=3.0).per_token == 0.5


def test_mt_bench_has_80_first_questions() -> None:
    questions = read_questions()
    assert len(questions) == 80
    assert questions[0].startswith("Compose an engaging travel blog post about a recent trip to Hawaii")


def test_a_missing_server_ends_the_experiment() -> None:
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:1"):
        chat.main(["--url", "http://127.0.0.1:1/", "--clients", "1", "--rounds", "1"])


def test_a_second_server_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat.main(["--against", "http://127.0.0.1:1"])
    assert "http://127.0.0.1:1 is not NAME=URL" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.alone
def test_a_stack_and_a_running_server_are_driven(tmp_path: Path) -> None:
    short = ["--model", "bundled", "--clients", "1", "2", "--rounds", "2", "--requests", "3", "--max-tokens", "8"]
    output = tmp_path / "chat.json"
    assert chat.main([*short, "--output", str(output)]) == 0
    runs = json.loads(output.read_text())["runs"]
    assert [(run["clients"], run["requests"]) for run in runs] == [(1, 3), (2, 3)] * 2
    assert all(0 < run["tokens"] <= 24 and run["ttft_ms"] > 0 for run in runs)
    with serving("--model", "bundled") as served:
        assert chat.main([*short, "--url", served.http + "/"]) == 0
        with pytest.raises(ConfigurationError, match="refuses the request"):
            chat.main([*short, "--url", served.http, "--model", "nobody"])
        assert (
            chat.main([*short, "--url", served.http, "--against", f"again={served.http}", "--output", str(output)]) == 0
        )
    servers = [run["server"] for run in json.loads(output.read_text())["runs"]]
    assert servers == ["pagewire", "again"] * 4
