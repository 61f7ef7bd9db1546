"""Traces of the whole stack, as a collector gets them: of a request, of one whose executor dies, and of failed ones."""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx2 as httpx
import nats
import pytest

from pagewire.embedded.address import Address
from pagewire.embedded.stack import Stack
from pagewire.shared.settings.config import Settings
from tests.support.collector import Received, collector
from tests.support.model_folders import change, model_folder
from tests.support.processes import kill
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

CALLER = "b7ad6b7169203331"
TOKENS = 200
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
"""A model of which a step takes milliseconds: what the client itself does takes no part of the time that shows."""
_numbers = count(1)


@dataclass(frozen=True)
class Served:
    """One request as its client knows it."""

    trace: str
    began: float
    ended: float
    request_id: str
    text: str
    usage: dict[str, int]


@dataclass(frozen=True)
class Traced:
    """A stack whose spans a collector gets; it samples only what its callers sample."""

    address: Address
    spans: list[Received]

    async def complete(self, *, victim: str = "") -> Served:
        """Streams a completion over HTTP; `victim` dies when a quarter of it is there."""
        trace = f"{next(_numbers):032x}"
        body = {
            "model": "tiny",
            "prompt": [5] * 40,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
        events: list[dict[str, object]] = []
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            await client.get(f"{self.address.http}/livez")  # so that the time has no connection in it
            began = time.time()
            async with client.stream(
                "POST", f"{self.address.http}/v1/completions", json=body, headers=headers
            ) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line[6:]))
                    if victim and len(events) > TOKENS // 4:
                        kill(victim)
                        victim = ""
            ended = time.time()
        text = "".join(choice["text"] for event in events for choice in event["choices"])  # type: ignore[attr-defined]
        return Served(trace, began, ended, str(events[0]["id"]), text, events[-1]["usage"])  # type: ignore[arg-type]

    async def of(self, trace: str, names: Iterable[str]) -> list[Received]:
        """The spans of a trace without those of steps, once all of these names are there, as often as given."""
        expected = Counter(names)
        await until(lambda: expected <= Counter(span.name for span in self.spans if span.trace_id == trace))
        return [span for span in self.spans if span.trace_id == trace and span.name != "step"]


@pytest.fixture
async def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Traced]:
    folder = model_folder(tmp_path)
    change(folder / "config.json", **LARGE)
    settings = Settings(
        model=str(folder),
        device="sim:h100",
        served_model_name="tiny",
        max_model_len=256,
        num_kv_blocks=64,
        nats_port=0,
        port=0,
        trace_slow="10m",
        log_level="error",
    )
    with collector() as (url, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        async with Stack(settings) as stack:
            yield Traced(await stack.ready(), spans)


def covered(spans: Iterable[Received], began: float, ended: float) -> float:
    """The share of a time in which at least one of the spans lies."""
    total, last = 0.0, began
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, last), min(span.end, ended)
        if end > start:
            total, last = total + end - start, end
    return total / (ended - began)


async def test_a_trace_covers_a_request_through_all_services_and_a_kill(traced: Traced) -> None:
    stages = ["receive", "queue", "admit", "run", "prefill", "decode", "stream"]
    root = "POST /v1/completions"

    # A request of a caller that samples: one trace through all services.
    served = await traced.complete()
    spans = await traced.of(served.trace, [root, *stages])
    assert sorted((span.service, span.name) for span in spans) == [
        ("detokenizer", "stream"),
        ("executor", "decode"),
        ("executor", "prefill"),
        ("gateway", root),
        ("scheduler", "admit"),
        ("scheduler", "queue"),
        ("scheduler", "run"),
        ("tokenizer", "receive"),
    ]
    by_name = {span.name: span for span in spans}
    receive, stream = by_name["receive"], by_name["stream"]
    assert by_name[root].parent_id == CALLER
    assert receive.parent_id == by_name[root].span_id
    assert {span.parent_id for span in spans if span.name not in {root, "receive"}} == {receive.span_id}
    assert by_name[root].attributes["http.response.status_code"] == 200
    assert receive.attributes["gen_ai.request.model"] == "tiny"
    assert receive.attributes["gen_ai.request.max_tokens"] == TOKENS
    answer = stream.attributes
    assert answer["gen_ai.response.finish_reasons"] == ["length"]
    assert answer["gen_ai.usage.input_tokens"] == served.usage["prompt_tokens"] == 40
    assert answer["gen_ai.usage.output_tokens"] == served.usage["completion_tokens"] == TOKENS
    assert served.request_id.endswith(answer["gen_ai.response.id"])
    assert by_name["run"].attributes["tokens"] == TOKENS
    assert covered((s for s in spans if s.name != root), served.began, served.ended) > 0.95
    steps = [span for span in traced.spans if span.name == "step"]
    assert steps
    assert {span.trace_id for span in steps} == {served.trace}

    # The same request hits the prefix cache, and its executor dies: it goes on elsewhere, in the same trace.
    killed = await traced.complete(victim="executor")
    assert killed.text == served.text
    spans = await traced.of(killed.trace, [root, "recover", "run", *stages])
    runs = sorted((span for span in spans if span.name == "run"), key=lambda span: span.start)
    assert [run.attributes["end"] for run in runs] == ["executor_lost", "finished"]
    recovers = [span for span in spans if span.name == "recover"]
    assert recovers
    for span in recovers:
        assert runs[0].end <= span.start + 0.001
        assert span.start <= span.end <= runs[1].start + 0.001
    (stream,) = [span for span in spans if span.name == "stream"]
    assert stream.attributes["gen_ai.usage.cache_read.input_tokens"] > 0
    assert covered((s for s in spans if s.name != root), killed.began, killed.ended) > 0.95

    # Nobody samples these. The one whose time is over is sent by all services nevertheless, the other one by none.
    client = await nats.connect(traced.address.nats)
    body = {"prompt": [5] * 8, "sampling": {"max_tokens": 4}}
    fails = {"traceparent": f"00-{'f' * 32}-{CALLER}-00"}
    quiet = {"traceparent": f"00-{'e' * 32}-{CALLER}-00"}
    for headers, changes in (
        (quiet, {}),
        (fails, {"timeout_ms": 100, "sampling": {"max_tokens": TOKENS, "ignore_eos": True}}),
    ):
        data = json.dumps(body | changes).encode()
        await client.request("pagewire.v1.generate.tiny", data, timeout=PATIENCE, headers=headers)
    await client.close()
    spans = await traced.of("f" * 32, ["receive", "queue", "admit", "run", "stream"])
    (stream,) = [span for span in spans if span.failed]
    assert stream.name == "stream"
    assert stream.attributes["error.type"] == "deadline_exceeded"
    assert not [span for span in traced.spans if span.trace_id == "e" * 32]
