"""The page `docs/metrics.md`: every metric, and its name in vLLM."""

from pagewire.services.gateway.metrics.prometheus import OWN_LABELS
from pagewire.services.gateway.metrics.vllm_metrics import ALIASES, INFO
from pagewire.shared.metrics.metric import Kind, Metric
from pagewire.shared.metrics.table import METRICS

_HEAD = """# Metrics

`GET /metrics` of the gateway answers with the metrics of all services of the stack, as Prometheus reads them. A service
that does not answer within half a second is left out. Where keys are set, send that of `--api-key`: tenants
do not see the page. If several gateways serve a stack, scrape one of them: each answers for all.

`deploy/prometheus.yml` scrapes a stack, `deploy/alerts.yml` has alerts, and `deploy/dashboard.json` is a dashboard for
Grafana.

With `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, every service also sends its metrics to
that collector, once a minute or every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds, under their OpenTelemetry names;
`OTEL_METRICS_EXPORTER=none` prevents that.

Every series has the labels {own}. Counters begin at 0 in each process. The table is made
from `shared/metrics/table.py`, and this page by `python -m tools.reference`.

| Prometheus | OpenTelemetry | kind | unit | reported by | labels | meaning |
|---|---|---|---|---|---|---|
"""
_BUCKETS = """
Upper bounds of the buckets of histograms:

| Prometheus | buckets |
|---|---|
"""
_VLLM = """
## Names of vLLM

With `--metrics-compat vllm`, the page also has the metrics that dashboards, load balancers and autoscalers for vLLM
read, with vLLM's labels `model_name` and `engine`. The engine is the instance id of the executor, or that
of the service that reports the figure. Buckets are finer than vLLM's.

| vLLM | further label | the same as |
|---|---|---|
"""


def reference() -> str:
    """Returns `docs/metrics.md`."""
    own = ", ".join(f"`{label}`" for label in OWN_LABELS)
    buckets = [
        f"| `{metric.prometheus_name}` | {', '.join(f'{bound:g}' for bound in metric.buckets)} |"
        for metric in METRICS.values()
        if metric.kind is Kind.HISTOGRAM
    ]
    aliases = [
        f"| `vllm:{name}{_total(alias.metric)}` | {_code(alias.label)} | `{_full(alias.metric)}` |"
        for name, alias in ALIASES.items()
    ]
    aliases.append(f"| `vllm:cache_config_info` | {', '.join(map(_code, INFO.labels))} | `{_full(INFO)}` |")
    rows = map(_row, METRICS.values())
    return "".join((_HEAD.format(own=own), _lines(rows), _BUCKETS, _lines(buckets), _VLLM, _lines(aliases)))


def _row(metric: Metric) -> str:
    labels = ", ".join(map(_code, metric.labels))
    services = "all" if len(metric.services) > 2 else ", ".join(metric.services)
    cells = (f"`{_full(metric)}`", f"`{metric.name}`", metric.kind, metric.unit, services, labels, metric.help)
    return f"| {' | '.join(cells)} |"


def _full(metric: Metric) -> str:
    return metric.prometheus_name + _total(metric)


def _total(metric: Metric) -> str:
    return "_total" if metric.kind is Kind.COUNTER else ""


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _lines(lines: "list[str] | map[str]") -> str:
    return "".join(f"{line}\n" for line in lines)
