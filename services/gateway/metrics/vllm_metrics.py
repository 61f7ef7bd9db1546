"""The metrics that vLLM's dashboards, load balancers and autoscalers read, under vLLM's names, from the same values.

Types and labels are vLLM's; `engine` is the instance id of the executor, or of the detokenizer that reports the figure.
Buckets are finer than vLLM's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from pagewire.services.gateway.metrics.prometheus import family, fits
from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Metric, Sample

Label = Callable[[Sample], str | None]
"""Returns the value of a further label; None: the sample does not count."""


class Alias(NamedTuple):
    """One of vLLM's metrics: the sum of one of ours over the labels that vLLM does not have."""

    metric: Metric
    label: str = ""
    """Name of a further label; empty: there is none."""
    value: Label = lambda _: ""
    """Value of the further label."""


def _waits(reasons: dict[str, str]) -> Label:
    return lambda sample: reasons.get(sample.labels[1])


_FINISHES = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""vLLM's names of the reasons why a request ends."""
_REASONS = {"queued": "capacity", "capacity": "capacity", "preempted": "deferred"}
"""vLLM's names of the reasons why a request waits."""

ALIASES: dict[str, Alias] = {
    "num_requests_running": Alias(table.RUNNING),
    "num_requests_waiting": Alias(table.WAITING),
    "num_requests_waiting_by_reason": Alias(table.WAITING, "reason", _waits(_REASONS)),
    "kv_cache_usage_perc": Alias(table.KV_USAGE),
    "num_preemptions": Alias(table.PREEMPTIONS),
    "prefix_cache_queries": Alias(table.CACHE_QUERIES),
    "prefix_cache_hits": Alias(table.CACHE_HITS),
    "prompt_tokens": Alias(table.PROMPT_TOKENS),
    "prompt_tokens_cached": Alias(table.CACHED_TOKENS),
    "generation_tokens": Alias(table.GENERATED_TOKENS),
    "request_success": Alias(table.REQUESTS, "finished_reason", lambda sample: _FINISHES.get(sample.labels[0])),
    "corrupted_requests": Alias(table.NOT_FINITE),
    "admission_rejections": Alias(table.ADMISSION_REFUSALS, "reason", lambda _: "queue_wait"),
    "spec_decode_num_drafts": Alias(table.DRAFTS),
    "spec_decode_num_draft_tokens": Alias(table.DRAFTED),
    "spec_decode_num_accepted_tokens": Alias(table.ACCEPTED),
    "spec_decode_num_accepted_tokens_per_pos": Alias(table.ACCEPTED, "position", lambda sample: sample.labels[0]),
    "iteration_tokens_total": Alias(table.STEP_TOKENS),
    "time_to_first_token_seconds": Alias(table.FIRST_TOKEN),
    "inter_token_latency_seconds": Alias(table.INTER_TOKEN),
    "time_per_output_token_seconds": Alias(table.INTER_TOKEN),
    "request_time_per_output_token_seconds": Alias(table.TIME_PER_TOKEN),
    "e2e_request_latency_seconds": Alias(table.DURATION),
    "request_queue_time_seconds": Alias(table.QUEUE_TIME),
    "request_inference_time_seconds": Alias(table.INFERENCE_TIME),
    "request_prefill_time_seconds": Alias(table.PREFILL_TIME),
    "request_decode_time_seconds": Alias(table.DECODE_TIME),
    "request_prompt_tokens": Alias(table.REQUEST_PROMPT),
    "request_generation_tokens": Alias(table.REQUEST_GENERATED),
    "request_max_num_generation_tokens": Alias(table.REQUEST_GENERATED),
}
"""The metrics by vLLM's name, without the prefix `vllm:` and the `_total` of counters."""

INFO = table.CACHE_INFO
"""The metric that is `vllm:cache_config_info`."""


class VllmMetrics(Collector):
    """The metrics of `ALIASES`, and the settings of the cache."""

    def __init__(self, reports: Sequence[MetricsReport]) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Family]:
        """Returns nothing: the families are known with the values."""
        return iter(())

    @override
    def collect(self) -> Iterator[Family]:
        for name, alias in ALIASES.items():
            labels = ["model_name", "engine", *([alias.label] if alias.label else [])]
            series = [(list(values), sample) for values, sample in self._sums(alias).items()]
            if series:
                yield family(f"vllm:{name}", alias.metric, labels, series)
        settings = [
            ([report.model, _engine(report), *sample.labels], sample)
            for report in self._reports
            for sample in report.samples
            if sample.name == INFO.name
        ]
        if settings:
            yield family("vllm:cache_config_info", INFO, ["model_name", "engine", *INFO.labels], settings)

    def _sums(self, alias: Alias) -> dict[tuple[str, ...], Sample]:
        """Returns the sums of an alias by the values of its labels."""
        sums: dict[tuple[str, ...], Sample] = {}
        for report in self._reports:
            for sample in report.samples:
                if sample.name != alias.metric.name or not fits(alias.metric, sample):
                    continue
                value = alias.value(sample)
                if value is None:
                    continue
                key = (report.model, _engine(report), *([value] if alias.label else []))
                earlier = sums.get(key)
                counts = (
                    [a + b for a, b in zip(earlier.counts, sample.counts, strict=True)] if earlier else sample.counts
                )
                total = sample.value + (earlier.value if earlier else 0.0)
                sums[key] = Sample(sample.name, total, (), counts)
        return sums


def _engine(report: MetricsReport) -> str:
    """Returns the instance id of the executor that a report is about, or of the service if it is about none."""
    return next((sample.labels[0] for sample in report.samples if sample.name == table.PAIR.name), report.instance)
