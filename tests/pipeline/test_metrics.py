"""Every metric that is declared has a value in a stack that has served and refused, and agrees with what was asked."""

from pathlib import Path

import pytest

from pagewire.services.gateway.metrics.vllm_metrics import ALIASES
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Kind, Sample
from pagewire.shared.process.linux_process import BROKER_FOLDER
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import SERVICES, Pipeline, running

pytestmark = pytest.mark.anyio

CHOICES, TOKENS = 3, 8
SAME = {
    "scheduler": {
        "blocks": "pagewire.kv.blocks",
        "blocks_held": "pagewire.kv.blocks.used",
        "budget": "pagewire.step.budget",
    },
    "executor": {"steps": "pagewire.steps", "rows": "pagewire.step.rows", "sampled": "pagewire.tokens.sampled"},
    "detokenizer": {"streams": "pagewire.streams", "tokens": "pagewire.tokens.generated"},
    "tokenizer": {"in_flight": "pagewire.tokenizer.in_flight", "store_refuses": "pagewire.store.refuses"},
}
"""Figures of `pagewire status`, which come from heartbeats, and the metrics that count the same."""
_report = Decoder(MetricsReport)


async def reports(pipeline: Pipeline) -> dict[str, MetricsReport]:
    """Returns the metrics of every service, by its name."""
    by_service: dict[str, MetricsReport] = {}

    def add(message: Message) -> None:
        report = _report.decode(message.data)
        by_service[report.service] = report

    inbox = "_INBOX.gateway.test"
    await pipeline.bus.subscribe(inbox, add)
    pipeline.bus.publish(subjects.METRICS, b"", reply=inbox)
    while len(by_service) < len(SERVICES):
        await pipeline.bus.flush()
    return by_service


def only(report: MetricsReport, name: str) -> Sample:
    (sample,) = [sample for sample in report.samples if sample.name == name]
    return sample


DRAFTING = (table.DRAFTS, table.DRAFTED, table.ACCEPTED)
"""Metrics that are written where tokens are drafted alone."""


async def test_every_metric_is_written_and_agrees_with_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BROKER_FOLDER, str(tmp_path))
    settings = Settings(
        model=str(checkpoint("llama")), served_model_name="tiny", max_model_len=96, num_kv_blocks=64, nats_port=0
    )
    async with running(settings) as pipeline:
        prompt = [5] * 40
        for _ in range(2):
            await pipeline.client.generate(prompt, n=CHOICES, max_tokens=TOKENS, ignore_eos=True)
        with pytest.raises(InvalidRequest):
            await pipeline.client.generate(prompt, max_tokens=-1)
        await pipeline.until_idle()
        by_service = await reports(pipeline)
        loads = {service: pipeline.load(service) for service in SAME}

    for metric in table.METRICS.values():
        for service in set(metric.services) & set(SERVICES):
            if metric not in DRAFTING and (metric is not table.REFUSED or service == "tokenizer"):
                assert any(sample.name == metric.name for sample in by_service[service].samples), (metric.name, service)
    for service, report in by_service.items():
        assert all(service in table.METRICS[sample.name].services for sample in report.samples)

    for service, names in SAME.items():
        for load, name in names.items():
            assert loads[service][load] == only(by_service[service], name).value, (service, load)

    scheduler, executor, detokenizer = (by_service[name] for name in ("scheduler", "executor", "detokenizer"))
    assert only(detokenizer, "pagewire.tokens.generated").value == 2 * CHOICES * TOKENS
    assert only(executor, "pagewire.tokens.sampled").value == 2 * CHOICES * TOKENS
    assert sum(only(detokenizer, "pagewire.inter_token.latency").counts) == 2 * CHOICES * (TOKENS - 1)
    assert sum(only(detokenizer, "gen_ai.server.time_to_first_token").counts) == 2
    assert sum(only(detokenizer, "gen_ai.server.time_per_output_token").counts) == 2 * CHOICES
    for name in ("queue", "prefill", "decode", "inference"):
        assert sum(only(scheduler, f"pagewire.request.{name}.duration").counts) == 2
    assert only(scheduler, "pagewire.prefix_cache.queries").value == 2 * CHOICES * len(prompt)
    assert only(scheduler, "pagewire.kv.usage").value == 0
    steps = only(executor, "pagewire.steps").value
    assert (
        sum(only(executor, "pagewire.lease.left").counts) == sum(only(executor, "pagewire.step.size").counts) == steps
    )
    phases = {s.labels[0]: s.value for s in executor.samples if s.name == "pagewire.step.tokens"}
    assert phases["decode"] == 2 * CHOICES * (TOKENS - 1)
    refused = [sample for sample in by_service["tokenizer"].samples if sample.name == table.REFUSED.name]
    assert [(sample.labels, sample.value) for sample in refused] == [(("invalid_request",), 1)]


def test_every_metric_is_reported_by_a_tested_service() -> None:
    others = {metric.name for metric in table.METRICS.values() if not set(metric.services) & set(SERVICES)}
    assert others == {name for name in table.METRICS if name.startswith("pagewire.http.")}


def test_an_alias_of_vllm_has_the_kind_that_vllm_gives_it() -> None:
    counters = {
        *("num_preemptions", "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success"),
        *("admission_rejections", "prefix_cache_queries", "prefix_cache_hits", "corrupted_requests"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        "spec_decode_num_accepted_tokens_per_pos",
    }
    assert {name for name, alias in ALIASES.items() if alias.metric.kind is Kind.COUNTER} == counters
