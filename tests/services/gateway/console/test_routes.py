import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.services.gateway.console import feed, history, waterfall
from pagewire.services.gateway.routes.request_log import LENGTH, LoggedRequest, RequestLog
from pagewire.shared import subjects
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.client import Delta, Final, FinalChoice, Usage
from pagewire.shared.messages.fault import Fault, FaultKind
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.recent_requests import RecentRequests, RequestFigures
from pagewire.shared.messages.recent_steps import RecentSteps, StepFigures
from pagewire.shared.messages.request_metrics import Metrics
from tests.services.gateway.http_client import Answer, Gateway
from tests.support.responder import settle
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

METRICS = Metrics(queued_time=0.1, prefill_time=0.2, decode_time=0.4, e2e_latency=0.7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "INTERVAL", 0.005)


@asynccontextmanager
async def opened(gateway: Gateway, tenant: str = "") -> AsyncIterator[tuple[Answer, list[Any]]]:
    """A page that follows the event stream; yields its answer and the events so far."""
    events: list[Any] = []

    class Events(list[bytes]):
        def append(self, chunk: bytes) -> None:
            events.extend(msgspec.json.decode(part[6:]) for part in chunk.split(b"\n\n") if part)

    answer, gone = Answer(chunks=Events()), asyncio.Event()
    feeding = asyncio.create_task(gateway.console.run())
    page = asyncio.create_task(gateway.call("GET", "/console/events", b"", {}, gone=gone, tenant=tenant, answer=answer))
    await until(lambda: events)
    try:
        yield answer, events
    finally:
        gone.set()
        await page
        feeding.cancel()
        await asyncio.wait({feeding})


def beat(gateway: Gateway, service: str, **load: float) -> None:
    message = Heartbeat(service, f"{service}1", True, 3, 0, 7, load)
    gateway.responder.bus.publish(f"{subjects.HEARTBEAT}.{service}.{service}1", encode(message))


async def test_a_page_sees_services_and_the_figures_of_the_latest_steps_once(gateway: Gateway) -> None:
    beat(gateway, "scheduler", blocks=8, running=1.23456)

    def answer_steps(message: Any) -> None:
        figures = RecentSteps("e1234567", (StepFigures(1, 2, 30, 2, 1500, 6), StepFigures(2, 2, 0, 2, 900, 7)))
        gateway.responder.bus.publish(message.reply, encode(figures))

    await gateway.responder.bus.subscribe(subjects.RECENT_STEPS, answer_steps)
    async with opened(gateway) as (_, events):
        await until(lambda: len(events) > 6)
    (scheduler,) = events[0]["services"]
    assert (scheduler["instance"], scheduler["term"], scheduler["load"]) == (
        "scheduler1",
        3,
        {"blocks": 8, "running": 1.235},
    )
    steps = [step for event in events for step in event.get("steps", ())]
    assert steps == [["e123", 1, 2, 30, 2, 1500, 6], ["e123", 2, 2, 0, 2, 900, 7]]


async def test_no_executor_is_asked_while_no_console_is_open(gateway: Gateway) -> None:
    questions: list[Any] = []
    await gateway.responder.bus.subscribe(subjects.RECENT_STEPS, questions.append)
    async with opened(gateway):
        await until(lambda: questions)
    feeding = asyncio.create_task(gateway.console.run())
    count = len(questions)
    await asyncio.sleep(10 * feed.INTERVAL)
    assert len(questions) == count
    feeding.cancel()


async def test_a_page_sees_requests_begin_and_end_without_their_texts(gateway: Gateway) -> None:
    async with opened(gateway) as (_, events):
        await gateway.post({"prompt": "a secret", "stream": True})
        await until(lambda: any(row["ended"] for event in events for row in event.get("requests", ())))
    rows = [row for event in events for row in event.get("requests", ())]
    assert (rows[-1]["path"], rows[-1]["model"], rows[-1]["status"]) == ("/v1/completions", "tiny", 200)
    assert (rows[-1]["prompt"], rows[-1]["tokens"]) == (3, 5)
    assert rows[-1]["began"] <= rows[-1]["first"] <= rows[-1]["ended"]
    assert "secret" not in str(events)
    assert "once" not in str(events)


async def test_a_tenant_sees_its_own_requests_and_no_load(gateway: Gateway) -> None:
    beat(gateway, "scheduler", running=5)
    for name in ("alice", "bob", "alice"):
        stream = gateway.client.stream("x")
        gateway.requests.begin(stream, f"/v1/{name}", name)
    async with opened(gateway, "alice") as (answer, events):
        await until(lambda: any("requests" in event for event in events))
        beat(gateway, "executor", steps=3)
        await until(lambda: any(len(event.get("services", ())) == 2 for event in events))
    rows = [row for event in events for row in event.get("requests", ())]
    assert {row["path"] for row in rows} == {"/v1/alice"}
    assert "load" not in str(events)
    assert not any({"steps", "history", "sample", "ended"} & event.keys() for event in events)
    assert answer.headers["pagewire-faults"] == "0"


async def test_a_page_hears_that_a_process_has_ended(gateway: Gateway) -> None:
    async with opened(gateway) as (_, events):
        gateway.responder.bus.publish(f"{subjects.HEARTBEAT}.executor.e1", b"")
        await until(lambda: any(event.get("ended") for event in events))
    (_, service, instance) = next(event["ended"] for event in events if event.get("ended"))[0]
    assert (service, instance) == ("executor", "e1")


async def test_the_stream_of_a_gateway_that_drains_ends(gateway: Gateway) -> None:
    feeding = asyncio.create_task(gateway.console.run())
    page = asyncio.create_task(gateway.get("/console/events"))
    await settle()
    gateway.health.draining = "the server is stopping"
    assert (await page).status == 200
    feeding.cancel()


async def test_a_slow_page_loses_events_and_memory_stays_bounded(gateway: Gateway) -> None:
    feeding = asyncio.create_task(gateway.console.run())
    slow, gone = asyncio.Event(), asyncio.Event()
    page = asyncio.create_task(gateway.call("GET", "/console/events", b"", {}, gone=gone, slow=slow))
    await until(lambda: any(queue.full() for queue in gateway.console._feed._pages))
    slow.set()
    gone.set()
    await page
    assert not gateway.console._feed._pages
    feeding.cancel()


async def test_a_request_has_a_waterfall_by_link(gateway: Gateway) -> None:
    def script(request: Any) -> list[Any]:
        last = Final(request.request_id, [FinalChoice(0, "length")], Usage(3, 1), metrics=METRICS)
        return [Delta(0, 0, "x", [100]), last, None]

    gateway.responder.script = script
    answer = await gateway.post({"prompt": "x", "stream": True})
    record = (await gateway.get(f"/console/requests/{answer.headers['x-request-id']}")).json
    assert [stage["name"] for stage in record["stages"]] == ["request", "receive", "queue", "prefill", "decode"]
    assert (record["traced"], record["request"]["tokens"]) == (False, 1)
    assert (await gateway.get("/console/requests/nowhere")).status == 404


async def test_the_waterfall_of_a_traced_request_is_that_of_the_trace_command(gateway: Gateway, tmp_path: Path) -> None:
    lines = [
        {"name": "receive", "service": "tokenizer", "start": 1.0, "end": 1.1, "attributes": {"request_id": "alice~r1"}},
        {"name": "decode", "service": "executor", "start": 1.1, "end": 2.0},
        {"name": "step", "service": "executor", "start": 1.1, "end": 1.2},
    ]
    rows = [{**line, "instance": "i", "trace_id": "t1", "span_id": "s"} for line in lines]
    (tmp_path / "spans.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    assert [stage["name"] for stage in waterfall.traced(tmp_path, "r1", "alice")] == ["receive", "decode"]
    assert waterfall.traced(tmp_path, "r1", None) == waterfall.traced(tmp_path, "r1", "alice")
    assert waterfall.traced(tmp_path, "r1", "bob") == []


async def test_a_request_of_another_tenant_does_not_exist(gateway: Gateway) -> None:
    request = gateway.requests.begin(gateway.client.stream("x"), "/v1/completions", "alice")
    path = f"/console/requests/{request.request_id}"
    assert (await gateway.call("GET", path, b"", {}, tenant="bob")).status == 404
    assert (await gateway.call("GET", path, b"", {}, tenant="alice")).status == 200
    assert (await gateway.get(path)).status == 200


class TestFaults:
    async def test_a_fault_needs_the_setting_an_operator_and_json(self, gateway: Gateway) -> None:
        beat(gateway, "executor")
        await settle()
        body = msgspec.json.encode({"instance": "executor1", "fault": "kill"})
        json = {"content-type": "application/json"}
        faults: list[Any] = []
        await gateway.responder.bus.subscribe(subjects.FAULTS, faults.append)
        assert (await gateway.call("POST", "/console/faults", body, json)).status == 403
        gateway.console._demo_faults = True
        assert (await gateway.call("POST", "/console/faults", body, json, tenant="alice")).status == 403
        assert (await gateway.call("POST", "/console/faults", body, {})).status == 415
        assert (await gateway.call("POST", "/console/faults", body, {"content-type": "text/plain"})).status == 415
        for wrong in (
            b"{",
            b'{"instance":"executor1"}',
            b'{"instance":"executor1","fault":"melt"}',
            b'{"instance":"x","fault":"kill"}',
        ):
            assert (await gateway.call("POST", "/console/faults", wrong, json)).status == 400
        assert not faults
        assert (await gateway.call("POST", "/console/faults", body, json)).status == 202
        await settle()
        assert Decoder(Fault).decode(faults[0].data) == Fault("executor1", FaultKind.KILL)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_gets_nothing(gateway: Gateway, site: str) -> None:
    gateway.console._demo_faults = True
    foreign = {"sec-fetch-site": site, "content-type": "application/json"}
    assert (await gateway.get("/console/events", **foreign)).status == 403
    assert (await gateway.get("/console/requests/r1", **foreign)).status == 403
    assert (await gateway.call("POST", "/console/faults", b"{}", foreign)).status == 403


class TestRequestLog:
    async def test_the_console_keeps_the_latest_requests(self, gateway: Gateway) -> None:
        log = RequestLog()
        for _ in range(LENGTH + 5):
            request = log.begin(gateway.client.stream("x"), "/v1/completions", "")
            log.end(request, 200, None)
        rows = list(log.changed(0, None))
        assert len(rows) == LENGTH
        assert rows[-1].request_id == request.request_id
        assert not list(log.changed(log.changes, None))
        assert all(row.stream is None for row in rows)


class TestHistory:
    async def test_a_sample_has_rates_and_latencies_of_its_interval(self, gateway: Gateway) -> None:
        log, health = RequestLog(), gateway.health
        kept = history.History(health, log)
        beat(gateway, "executor", sampled=100, prefilled=50)
        beat(gateway, "scheduler", running=2, waiting=1, queued=3)
        await settle()
        kept.sample(kept._sampled_at + 5)
        beat(gateway, "executor", sampled=200, prefilled=50)
        await settle()
        request = log.begin(gateway.client.stream("x"), "/v1/completions", "")
        log.end(request, 200, None)
        request.metrics, request.tokens, request.ended = METRICS, 5, kept._sampled_at + 1
        kept.sample(kept._sampled_at + 5)
        first, second = kept.samples
        assert (first["tokens"], second["tokens"], second["prompt_tokens"]) == (0, 20, 0)
        assert (second["running"], second["waiting"]) == (2, 4)
        assert second["first_token_ms"] == pytest.approx((300, 300))
        assert second["next_token_ms"] == pytest.approx((100, 100))
        assert kept.take_new() == second
        assert kept.take_new() is None

    def test_a_request_that_failed_has_no_stages_but_its_own(self) -> None:
        request = LoggedRequest("r1", "", "/v1/completions", 1.0, None, status=503, ended=2.0)
        assert [stage["name"] for stage in waterfall.measured(request)] == ["request"]
        assert history.first_token_ms(request) is history.next_token_ms(request) is None


async def test_a_page_sees_the_requests_of_nats_clients_beside_its_gateways_own(gateway: Gateway) -> None:
    await gateway.post({"prompt": "x", "request_id": "own", "stream": True})
    figures = RequestFigures("theirs", 0, 100.0, 101.0, 0.0, 7, 2, 3, None)
    own = figures._replace(request_id="own", tokens=9)
    tenants = figures._replace(request_id=subjects.owned("alice", "hers"), status=200, ended=102.0)
    answers = [(own, figures, tenants), (own, figures._replace(tokens=5), tenants)]

    def answer(message: Any) -> None:
        recent = RecentRequests("tiny", answers[0] if len(answers) == 1 else answers.pop(0))
        gateway.responder.bus.publish(message.reply, encode(recent))

    await gateway.responder.bus.subscribe(subjects.RECENT_REQUESTS, answer)
    async with opened(gateway) as (_, events):
        await until(lambda: any(row["tokens"] == 5 and row["id"] == "theirs" for row in rows_of(events)))
    rows = {row["id"]: row for row in rows_of(events)}
    assert (rows["own"]["path"], rows["own"]["tokens"]) == ("/v1/completions", 5)
    assert (rows["theirs"]["path"], rows["theirs"]["model"], rows["theirs"]["ended"]) == ("NATS", "tiny", 0)
    assert (rows["hers"]["tenant"], rows["hers"]["status"]) == ("alice", 200)
    assert sum(row["id"] == "hers" for row in rows_of(events)) == 1, "a request without a change is sent once"


def rows_of(events: list[Any]) -> list[Any]:
    return [row for event in events for row in event.get("requests", ())]
