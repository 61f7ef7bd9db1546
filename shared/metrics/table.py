"""The metrics of all services, each declared once. `docs/metrics.md` is made from this table.

Names, units and buckets follow OpenTelemetry, those of latencies its conventions for generative AI as far as these go;
Prometheus sees `pagewire.step.duration` in seconds as `pagewire_step_duration_seconds`.
"""

from pagewire.shared.metrics.metric import Kind, Metric

SERVICES = ("tokenizer", "scheduler", "executor", "detokenizer", "gateway")

_INTERVALS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0),
)
"""Bounds in seconds, for the time between two tokens and for a step."""
_LATENCIES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Bounds in seconds, for parts of a request."""
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_LEASE = (1, 2, 3, 4, 6, 8, 12, 16, 32)

METRICS: dict[str, Metric] = {}
"""All metrics by name, in the order of the page."""


def _metric(
    name: str,
    kind: Kind,
    unit: str,
    text: str,
    services: str | tuple[str, ...],
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Metric:
    reporters = (services,) if isinstance(services, str) else services
    metric = METRICS[name] = Metric(name, kind, unit, text, reporters, labels, buckets)
    return metric


def _counter(name: str, unit: str, text: str, services: str | tuple[str, ...], *labels: str) -> Metric:
    return _metric(name, Kind.COUNTER, unit, text, services, labels)


def _gauge(name: str, unit: str, text: str, services: str | tuple[str, ...], *labels: str) -> Metric:
    return _metric(name, Kind.GAUGE, unit, text, services, labels)


def _histogram(name: str, unit: str, text: str, service: str, buckets: tuple[float, ...]) -> Metric:
    return _metric(name, Kind.HISTOGRAM, unit, text, service, (), buckets)


# Requests
WAITING = _gauge(
    "pagewire.requests.waiting",
    "{request}",
    "Requests that wait: in the store (reason queued; only one scheduler of a model counts these), at a scheduler for "
    "their first slot (capacity), or for another slot after a preemption or a failure (preempted)",
    "scheduler",
    "priority",
    "reason",
)
RUNNING = _gauge("pagewire.requests.running", "{request}", "Requests with a slot", "scheduler", "priority")
REQUESTS = _counter("pagewire.requests", "{request}", "Requests that have ended", "detokenizer", "finish")
NOT_FINITE = _counter(
    "pagewire.requests.not_finite", "{request}", "Requests whose logits were NaN or infinite", "detokenizer"
)
REFUSED = _counter(
    "pagewire.requests.refused",
    "{request}",
    "Requests that got an error instead of a stream, by the kind of the error",
    ("tokenizer", "detokenizer"),
    "error",
)
ADMISSION_REFUSALS = _counter(
    "pagewire.admission.refusals", "{request}", "Requests refused because they would have waited too long", "tokenizer"
)
EXPECTED_WAIT = _gauge(
    "pagewire.admission.expected_wait", "s", "Time that a new request of priority 0 would wait", "tokenizer"
)
IN_FLIGHT = _gauge("pagewire.tokenizer.in_flight", "{request}", "Requests being encoded and dispatched", "tokenizer")
STREAMS = _gauge("pagewire.streams", "{request}", "Streams that are open", "detokenizer")
REPLIES_DROPPED = _counter(
    "pagewire.replies.dropped", "{request}", "Requests without a valid inbox", ("tokenizer", "detokenizer")
)

CLOCK_OFFSET = _gauge(
    "pagewire.clock.offset",
    "s",
    "Time by which the broker's clock is ahead of the service's own",
    ("tokenizer", "scheduler", "detokenizer"),
)

# Latencies
FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "Time from the opening of the stream to its first token",
    "detokenizer",
    _LATENCIES,
)
INTER_TOKEN = _histogram(
    "pagewire.inter_token.latency", "s", "Time between two tokens of a completion", "detokenizer", _INTERVALS
)
TIME_PER_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time per token of a completion after its first one",
    "detokenizer",
    _INTERVALS,
)
DURATION = _histogram(
    "gen_ai.server.request.duration", "s", "Time from the opening of the stream to its end", "detokenizer", _LATENCIES
)
QUEUE_TIME = _histogram(
    "pagewire.request.queue.duration",
    "s",
    "Time from the storing of a request to its first slot",
    "scheduler",
    _LATENCIES,
)
PREFILL_TIME = _histogram(
    "pagewire.request.prefill.duration",
    "s",
    "Time from the first slot of a request to its first token",
    "scheduler",
    _LATENCIES,
)
DECODE_TIME = _histogram(
    "pagewire.request.decode.duration",
    "s",
    "Time from the first token of a request to its last one",
    "scheduler",
    _LATENCIES,
)

INFERENCE_TIME = _histogram(
    "pagewire.request.inference.duration",
    "s",
    "Time from the first slot of a request to its last token",
    "scheduler",
    _LATENCIES,
)

# Tokens
PROMPT_TOKENS = _counter("pagewire.tokens.prompt", "{token}", "Tokens of the prompts of ended requests", "detokenizer")
CACHED_TOKENS = _counter("pagewire.tokens.cached", "{token}", "Those of them whose KV was cached", "detokenizer")
GENERATED_TOKENS = _counter("pagewire.tokens.generated", "{token}", "Tokens that were generated", "detokenizer")
REQUEST_PROMPT = _histogram(
    "pagewire.request.prompt_tokens", "{token}", "Prompt tokens per request", "detokenizer", _TOKENS
)
REQUEST_GENERATED = _histogram(
    "pagewire.request.generated_tokens", "{token}", "Generated tokens per request", "detokenizer", _TOKENS
)

# KV cache
CACHE_INFO = _gauge(
    "pagewire.kv.config", "", "1 for the settings of the KV cache", "scheduler", "block_size", "num_gpu_blocks"
)
BLOCKS = _gauge("pagewire.kv.blocks", "{block}", "Blocks of the KV cache", "scheduler")
BLOCKS_USED = _gauge("pagewire.kv.blocks.used", "{block}", "Blocks of the KV cache in use", "scheduler")
KV_USAGE = _gauge("pagewire.kv.usage", "1", "Share of the KV cache in use", "scheduler")
CACHE_QUERIES = _counter(
    "pagewire.prefix_cache.queries", "{token}", "Tokens that were looked up in the prefix cache", "scheduler"
)
CACHE_HITS = _counter("pagewire.prefix_cache.hits", "{token}", "Tokens that the prefix cache had", "scheduler")
PREEMPTIONS = _counter("pagewire.preemptions", "{preemption}", "Sequences whose blocks an older one got", "scheduler")

# Steps
PAIR = _gauge("pagewire.scheduler.executor", "", "1 for the executor that the scheduler has", "scheduler", "executor")
STEPS = _counter("pagewire.steps", "{step}", "Steps that have ended", "executor")
STEP_TIME = _histogram("pagewire.step.duration", "s", "Time of a step", "executor", _INTERVALS)
STEP_TOKENS = _histogram("pagewire.step.size", "{token}", "Tokens of a step", "executor", _STEP_TOKENS)
STEP_PHASES = _counter(
    "pagewire.step.tokens", "{token}", "Tokens of all steps, by their phase: prefill or decode", "executor", "phase"
)
STEP_ROWS = _counter("pagewire.step.rows", "{row}", "Rows of all steps: one per sequence", "executor")
SAMPLED = _counter("pagewire.tokens.sampled", "{token}", "Tokens that were sampled", "executor")
DRAFTS = _counter("pagewire.speculation.drafts", "{draft}", "Drafts that steps have verified", "executor")
DRAFTED = _counter(
    "pagewire.speculation.tokens.drafted", "{token}", "Drafted tokens that steps have verified", "executor"
)
ACCEPTED = _counter(
    "pagewire.speculation.tokens.accepted",
    "{token}",
    "Drafted tokens that were right, by their place in the draft, from 0",
    "executor",
    "position",
)
LEASE_LEFT = _histogram(
    "pagewire.lease.left",
    "{step}",
    "Steps of the lease that were left at the launch of a step, with that step",
    "executor",
    _LEASE,
)
BUSY = _counter(
    "pagewire.device.busy", "s", "Time in which the device computed: its rate is the busy share", "executor"
)
STARVED = _counter(
    "pagewire.device.starved", "s", "Time without a step although there was work, for want of a lease", "executor"
)
SLOTS = _gauge("pagewire.slots.used", "{slot}", "Slots in use", "executor")
BUDGET = _gauge("pagewire.step.budget", "{token}", "Tokens that the next step may have", "scheduler")

# Faults and repairs
RECONNECTS = _counter("pagewire.bus.reconnects", "{reconnect}", "Connections to NATS made again", SERVICES)
GAPS = _counter(
    "pagewire.steps.gaps", "{gap}", "Times that the output of steps was missing", ("scheduler", "detokenizer")
)
REPAIRS = _counter(
    "pagewire.steps.repairs", "{gap}", "Gaps that a replay of the executor has closed", ("scheduler", "detokenizer")
)
RECOVERIES = _counter(
    "pagewire.recoveries",
    "{recovery}",
    "What goes on after a failure: a stream that was adopted from another detokenizer, a request that was delivered "
    "again, or requests whose executor was lost",
    ("scheduler", "detokenizer"),
    "kind",
)
RECORDS_FAILED = _counter(
    "pagewire.records.failed", "{record}", "Records that could not be stored at once", "detokenizer"
)
RECORDS_LOST = _counter("pagewire.records.lost", "{record}", "Records that were given up", "detokenizer")
RECORDS_WAITING = _gauge("pagewire.records.waiting", "{record}", "Records that wait for the store", "detokenizer")
VIOLATIONS = _counter("pagewire.integrity.violations", "{violation}", "Slots or blocks counted wrongly", "scheduler")
STORE_REFUSES = _gauge("pagewire.store.refuses", "", "1 while the store takes no work", "tokenizer")
STORE_LEFT = _gauge(
    "pagewire.store.left",
    "By",
    "Room that is left in the queue of work on the broker's disk; counted by one scheduler",
    "scheduler",
)
DISK_LEFT = _gauge(
    "pagewire.broker.disk.left", "By", "Room that is left on the disk of the embedded broker", "tokenizer"
)
DROPPED_SPANS = _counter("pagewire.spans.dropped", "{span}", "Spans that were lost on their way", SERVICES)

# Processes
READY = _gauge("pagewire.ready", "", "1 while the instance takes requests", SERVICES)
DRAINING = _gauge("pagewire.draining", "", "1 while the instance drains", SERVICES)
CPU_TIME = _counter("process.cpu.time", "s", "CPU time of the process", SERVICES)
MEMORY = _gauge("process.memory.usage", "By", "Resident memory of the process", SERVICES)

# HTTP
CONNECTIONS = _gauge("pagewire.http.connections", "{connection}", "Open HTTP connections", "gateway")
HTTP_LIMITED = _counter(
    "pagewire.http.limited", "{connection}", "Connections and requests that a limit of HTTP has hit", "gateway"
)
HTTP_RUNNING = _gauge("pagewire.http.running", "{request}", "HTTP requests for text in progress", "gateway")
HTTP_REQUESTS = _counter(
    "pagewire.http.requests",
    "{request}",
    "HTTP requests that have ended, by route and status; 499: the client had gone",
    "gateway",
    "route",
    "status",
)
