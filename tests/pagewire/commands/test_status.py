import pytest

from pagewire import cli
from pagewire.commands import status
from pagewire.embedded.programs import PIPELINE
from pagewire.shared.process.discovery import Stats
from pagewire.shared.settings.config import Settings


def test_columns_are_apart_however_long_their_cells_are() -> None:
    metadata = {"ready": "true", "model": "smollm2-135m-instruct", "load.running": "2"}
    lines = status.table([Stats("pagewire-tokenizer", "3f2a9c1b0d4e", "", metadata)])
    assert [line.split() for line in lines] == [
        ["service", "instance", "state", "model", "load"],
        ["tokenizer", "3f2a9c1b0d4e", "ready", "smollm2-135m-instruct", "running=2"],
    ]
    assert lines[0].index("load") == lines[1].index("running=2")


def reply(service: str, model: str, *, ready: bool = True, **load: float) -> Stats:
    metadata = {
        "ready": str(ready).lower(),
        "model": model,
        **{f"load.{name}": str(value) for name, value in load.items()},
    }
    return Stats(f"pagewire-{service}", f"{service}{model}", "", metadata)


def test_each_problem_is_a_line_with_the_services_that_report_it() -> None:
    replies = [reply("detokenizer", "a"), *(reply("scheduler", model) for model in ("a", "b"))]
    for stats in replies:
        stats.metadata["problem"] = "the stream is gone" if "scheduler" in stats.name else ""
    lines, _ = status.report([*replies, reply("gateway", "")], None, Settings())
    assert [line for line in lines if "gone" in line] == ["scheduler: the stream is gone"]


def test_each_model_has_a_line_with_its_services_memory_and_queue() -> None:
    replies = [reply("gateway", "")]
    for model in ("a", "b"):
        replies += [reply("executor", model, ready=model == "a", memory=1.5e9), reply("detokenizer", model)]
        replies += [reply("scheduler", model, requests=5, queued=2), reply("tokenizer", model, queued=7, memory=1e9)]
    lines, missing = status.report(replies, None, Settings())
    assert missing
    assert lines[-1] == "not ready: b: executor"
    counts = ["detokenizer=1", "executor=1", "scheduler=1", "tokenizer=1"]
    assert lines[1].split() == ["a", "ready", "1", *counts, "2.50GB", "3", "7"]
    assert lines[2].split() == ["b", "not", "ready", "0", *counts, "2.50GB", "3", "7"]


def test_a_gateway_that_is_not_ready_is_missing() -> None:
    replies = [reply(service, model) for model in "ab" for service in PIPELINE]
    _, missing = status.report([*replies, reply("gateway", "")], None, Settings())
    assert not missing
    lines, missing = status.report([*replies, reply("gateway", "", ready=False)], None, Settings())
    assert missing
    assert lines[-1] == "not ready: gateway"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--service", "a b"], "'a b' cannot be a service"),
        (["--service", "tokenizer", "--alive", "--watch"], "--alive answers once"),
    ],
)
def test_a_status_that_cannot_be_meant_is_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", *arguments]) == 2
    assert reason in capsys.readouterr().err
