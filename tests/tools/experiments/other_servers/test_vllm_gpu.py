import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.models.model_folder import read_config
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tools.experiments.other_servers import vllm_gpu
from tools.experiments.other_servers.vllm.gpu_inputs import STAGES, write_dummy_model, write_requests


def figures(rate: float, milliseconds: float) -> dict[str, Any]:
    times = {name: {"median": milliseconds, "p99": 2 * milliseconds} for name in ("ttft", "tpot", "itl")}
    return {"completed": 3, "failed": 1, "output_tokens_per_second": rate, "milliseconds": times}


def test_ratios_above_one_are_better_for_us() -> None:
    stages = {
        "pagewire": {"burst": figures(300, 2)},
        "vllm": {"burst": figures(100, 8), "single": {"error": "no time"}},
    }
    assert vllm_gpu.table(stages)[2:] == [
        "| ShareGPT, 500 requests at once | pagewire | 300.0 | 2.0 | 4.0 | 2.0 | 4.0 | 3/4 |",
        "| ShareGPT, 500 requests at once | vllm | 100.0 | 8.0 | 16.0 | 8.0 | 16.0 | 3/4 |",
        "| ShareGPT, 500 requests at once | ratio | 3.00x | 4.00x | 4.00x | 4.00x | 4.00x |  |",
    ]


def test_every_id_of_the_model_has_a_text_of_ascii(tmp_path: Path) -> None:
    write_dummy_model("llama-3-8b", tmp_path)
    tokenizer, size = load_tokenizer(tmp_path), read_config(tmp_path)["vocab_size"]
    texts = tokenizer.backend.decode_batch([[token] for token in range(0, size, 97)], skip_special_tokens=False)
    assert all(text and text.isascii() for text in texts)


def test_the_requests_of_a_stage_have_its_lengths_and_times(tmp_path: Path) -> None:
    assert write_requests(STAGES["single"], tmp_path / "a") == 8
    assert {json.loads(line)["output_tokens"] for line in (tmp_path / "a").read_text().splitlines()} == {256}
    assert write_requests(STAGES["rate32"], tmp_path / "b", scale=0.2) == 100
    moments = [json.loads(line)["at"] for line in (tmp_path / "b").read_text().splitlines()]
    assert moments == sorted(moments)
    assert 1 < moments[-1] < 10, "100 requests at 32/s"


def test_a_missing_vllm_is_named_with_its_installation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.experiments.__main__ import main

    arguments = ["vllm_gpu", str(tmp_path), "--sides", "vllm", "--packages", str(tmp_path / "nothing")]
    assert main(arguments) == 2
    assert "unpack.sh" in capsys.readouterr().err


@pytest.mark.full
def test_a_simulated_gpu_goes_through_the_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path), "--sides", "pagewire", "--device", "sim:h100", "--scale", "0.02", "--stages", "burst"]
    assert vllm_gpu.main(arguments) == 0
    assert "| ShareGPT, 500 requests at once | pagewire |" in capsys.readouterr().out
    run = json.loads((tmp_path / "pagewire.json").read_text())
    assert run["stages"]["burst"]["completed"] == 10, run
    assert run["command"][0] == sys.executable
