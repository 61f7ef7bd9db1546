"""`/metrics`: reports of the services, as Prometheus and as vLLM's dashboards read them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.messages import encode
from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Histogram, Sample
from tests.services.gateway.http_client import Gateway
from tests.support.responder import settle

pytestmark = pytest.mark.anyio

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples() -> list[Sample]:
    durations = Histogram(table.QUEUE_TIME)
    durations.observe(0.03, times=2)
    durations.observe(1000.0)
    return [
        table.PAIR.sample(1.0, "e1"),
        table.WAITING.sample(3, "normal", "capacity"),
        table.WAITING.sample(4, "urgent", "queued"),
        table.WAITING.sample(5, "urgent", "preempted"),
        table.KV_USAGE.sample(0.25),
        table.QUEUE_TIME.sample(durations),
        table.CACHE_INFO.sample(1.0, "16", "64"),
        Sample("pagewire.of_another_release", 1.0),
        Sample("pagewire.requests.running", 1.0, ("one", "label too many")),
    ]


async def scrape(gateway: Gateway, *reports: MetricsReport) -> Series:
    """Returns the series of the page while services answer with these reports."""

    def answer(message: Message) -> None:
        for report in reports:
            gateway.responder.bus.publish(message.reply, encode(report))

    await gateway.responder.bus.subscribe(subjects.METRICS, answer)
    await gateway.health.listen()
    for report in reports:
        gateway.beat(report.service)
    await settle()
    response = await gateway.get("/metrics")
    assert response.status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.body.decode())
        for sample in family.samples
    }


async def test_the_page_has_every_series_with_its_process(gateway: Gateway) -> None:
    series = await scrape(
        gateway,
        MetricsReport("scheduler", "s1", "tiny", 0.0, samples()),
        MetricsReport("detokenizer", "d1", "tiny", 0.0, [table.REQUESTS.sample(7, "stop")]),
    )
    own = {"service_name": "pagewire-scheduler", "service_instance_id": "s1", "model": "tiny"}
    waiting = frozenset({**own, "priority": "normal", "reason": "capacity"}.items())
    assert series["pagewire_requests_waiting", waiting] == 3
    assert series["pagewire_kv_usage_ratio", frozenset(own.items())] == 0.25
    name = "pagewire_request_queue_duration_seconds"
    assert series[f"{name}_bucket", frozenset({**own, "le": "0.02"}.items())] == 0
    assert series[f"{name}_bucket", frozenset({**own, "le": "0.04"}.items())] == 2
    assert series[f"{name}_bucket", frozenset({**own, "le": "+Inf"}.items())] == 3
    assert series[f"{name}_count", frozenset(own.items())] == 3
    other = {"service_name": "pagewire-detokenizer", "service_instance_id": "d1", "model": "tiny", "finish": "stop"}
    assert series["pagewire_requests_total", frozenset(other.items())] == 7
    assert not any("another_release" in name or name == "pagewire_requests_running" for name, _ in series)


async def test_vllm_metrics_sum_over_labels_that_vllm_lacks(gateway: Gateway) -> None:
    reports = [
        MetricsReport("scheduler", "s1", "tiny", 0.0, samples()),
        MetricsReport(
            "detokenizer", "d1", "tiny", 0.0, [table.REQUESTS.sample(7, "stop"), table.REQUESTS.sample(1, "internal")]
        ),
    ]
    series = await scrape(gateway, *reports)
    own = {"model_name": "tiny", "engine": "e1"}
    assert series["vllm:num_requests_waiting", frozenset(own.items())] == 12
    assert series["vllm:num_requests_waiting_by_reason", frozenset({**own, "reason": "capacity"}.items())] == 7
    assert series["vllm:num_requests_waiting_by_reason", frozenset({**own, "reason": "deferred"}.items())] == 5
    assert series["vllm:kv_cache_usage_perc", frozenset(own.items())] == 0.25
    assert series["vllm:request_queue_time_seconds_count", frozenset(own.items())] == 3
    config = frozenset({**own, "block_size": "16", "num_gpu_blocks": "64"}.items())
    assert series["vllm:cache_config_info", config] == 1
    ended = {key: value for key, value in series.items() if key[0] == "vllm:request_success_total"}
    success = {"model_name": "tiny", "engine": "d1", "finished_reason": "stop"}
    assert ended == {("vllm:request_success_total", frozenset(success.items())): 7}


async def test_the_page_leaves_out_a_service_that_does_not_answer(gateway: Gateway) -> None:
    await gateway.health.listen()
    gateway.beat("scheduler")
    await settle()
    assert (await gateway.get("/metrics")).body == b""
