"""The answers to a file of requests, over a pipeline that answers as it is told."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire import AsyncClient, cli
from pagewire.commands.run_batch import batch
from pagewire.commands.run_batch.batch import Line, Outcome, answers, read
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import BusUnavailable, Overloaded
from tests.support.responder import MODEL, WORDS, Responder

HELLO = [{"role": "user", "content": "Hello!"}]


def line(name: str, url: str, **body: Any) -> Line:
    return Line(name, url, msgspec.Raw(msgspec.json.encode({"model": MODEL, **body})))


@pytest.mark.anyio
async def test_each_line_is_answered_as_its_route_answers() -> None:
    broker = MemoryBroker()
    responder = await Responder(MemoryBus(broker)).start()
    refused: list[str] = []

    def busy_at_first(request: Any) -> Any:
        if request.messages is None or refused:
            return responder.answer(request)
        refused.append("once")
        return [Overloaded("busy", 1), None]

    lines = [
        line("chat", "/v1/chat/completions", messages=HELLO),
        line("text", "/v1/completions", prompt="x"),
        line("wrong", "/v1/completions", prompt="x", temperature="hot"),
        line("lost", "/v1/embeddings", input="x"),
        line("stream", "/v1/completions", prompt="x", stream=True),
        line("stream by default", "/api/generate", prompt="x"),
        line("ollama", "/api/generate", model=f"{MODEL}:latest", prompt="x", stream=False),
    ]
    responder.script = busy_at_first
    outcomes: dict[str, Outcome] = {}
    async for outcome in answers(AsyncClient(bus=MemoryBus(broker, inbox_prefix="_INBOX")), lines, 2):
        outcomes[outcome.custom_id] = outcome
    bodies = {name: msgspec.json.decode(outcome.response.body) for name, outcome in outcomes.items()}
    assert {name: outcome.response.status_code for name, outcome in outcomes.items()} == {
        "chat": 200,
        "text": 200,
        "wrong": 400,
        "lost": 400,
        "stream": 400,
        "stream by default": 400,
        "ollama": 200,
    }
    assert bodies["chat"]["choices"][0]["message"]["content"] == "".join(WORDS)
    assert bodies["text"]["object"] == "text_completion"
    assert bodies["wrong"]["error"]["param"] == "temperature"
    assert "/v1/chat/completions" in bodies["lost"]["error"]["message"]
    assert refused, "an overloaded stack is asked again"


@pytest.mark.anyio
async def test_a_lost_broker_ends_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsteady(AsyncClient):
        def stream(self, prompt: Any = None, *arguments: Any, **options: Any) -> Any:
            prompts.append(prompt)
            if prompt == "lost" or len(prompts) == 1:
                raise BusUnavailable("no connection")
            return super().stream(prompt, *arguments, **options)

    monkeypatch.setattr(batch, "BROKER_RETRY_MS", 1)
    broker, prompts = MemoryBroker(), list[Any]()
    await Responder(MemoryBus(broker)).start()
    lines = [line(name, "/v1/completions", prompt=name) for name in ("once", "lost")]
    client = Unsteady(bus=MemoryBus(broker, inbox_prefix="_INBOX"))
    statuses = {outcome.custom_id: outcome.response.status_code async for outcome in answers(client, lines, 1)}
    assert statuses == {"once": 200, "lost": 503}


@pytest.mark.anyio
async def test_a_fault_of_one_request_ends_no_batch() -> None:
    class Broken(AsyncClient):
        def stream(self, prompt: Any = None, *arguments: Any, **options: Any) -> Any:
            if prompt == "odd":
                raise TypeError("a fault of ours")
            return super().stream(prompt, *arguments, **options)

    broker = MemoryBroker()
    await Responder(MemoryBus(broker)).start()
    lines = [line(name, "/v1/completions", prompt=name) for name in ("odd", "even")]
    client = Broken(bus=MemoryBus(broker, inbox_prefix="_INBOX"))
    outcomes = {outcome.custom_id: outcome.response async for outcome in answers(client, lines, 1)}
    assert {name: response.status_code for name, response in outcomes.items()} == {"odd": 500, "even": 200}
    assert b"a fault of ours" not in bytes(outcomes["odd"].body)


def test_a_malformed_file_is_refused_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    good = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    file.write_bytes(good + b"\n")
    assert [bytes(line.body) for line in read(file)] == [b'{"prompt": "x"}']
    for wrong, reason in ((good, "custom_id a"), (b"{}", "line 2"), (b'{"custom_id": "b", "method": "GET"}', "line 2")):
        file.write_bytes(good + wrong)
        assert cli.main(["run-batch", "-i", str(file), "-o", str(tmp_path / "out.jsonl")]) == 2
        assert reason in capsys.readouterr().err


def test_the_requests_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    before = file.read_text()
    assert cli.main(["run-batch", "-i", str(file), "-o", str(tmp_path / "." / file.name)]) == 2
    assert "choose another file" in capsys.readouterr().err
    assert file.read_text() == before
