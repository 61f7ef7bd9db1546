"""The page `docs/timers.md`: every timer of the code, and what happens where the world takes ten times longer."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("services", "shared", "pagewire/embedded", "pagewire/client")
"""Folders whose timers are listed."""
MENTION = 60
"""Characters at the beginning of a constant's documentation that name seconds if the constant is a timer."""

_HEAD = """# Timers

Each time that the code knows is a constant beside its use. The question of this page is what happens where a queue, a
prompt, a load or a pause is ten times longer than the timer. Silence means death only as
[Architecture](architecture.md#who-is-alive) says.

The tables are made from the constants and their documentation, by `python -m tools.reference`.
"""


@dataclass(frozen=True, slots=True)
class Timer:
    """A constant that is a time."""

    path: str
    """File that declares it."""
    name: str
    value: str
    """Value as the code writes it."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Timers with one answer to the question of the page."""

    title: str
    answer: str
    """Consequence where the queue, the prompt, the load or the pause is ten times longer."""
    timers: Mapping[str, tuple[str, ...]]
    """Names of the timers, by file."""


KINDS = (
    Kind(
        "Intervals",
        "Nothing is lost: the next look finds what the last one has missed, later by the length of the pause.",
        {
            "pagewire/client/adapter_changes.py": ("RESEND_INTERVAL",),
            "pagewire/client/directory.py": ("FRESH_FOR",),
            "pagewire/client/stream.py": ("ROOM_INTERVAL", "CHECK_INTERVAL", "RESEND_INTERVAL"),
            "services/gateway/console/feed.py": ("INTERVAL",),
            "services/gateway/console/history.py": ("SAMPLE_INTERVAL",),
            "services/tokenizer/adapters.py": ("READ_EVERY", "RETRY_EVERY"),
            "shared/adapters/adapter_store.py": ("PAUSE",),
            "pagewire/embedded/broker_care.py": ("ROOM_CHECK_INTERVAL", "RETRY_DELAY"),
            "pagewire/embedded/drainer.py": ("INTERVAL",),
            "pagewire/embedded/idle_models.py": ("INTERVAL",),
            "pagewire/embedded/watchdog.py": ("CHECK_INTERVAL",),
            "services/detokenizer/adopter.py": ("LOOK_INTERVAL", "CHECK_INTERVAL"),
            "services/detokenizer/frames/frame_sender.py": ("RETRY_INTERVAL",),
            "services/detokenizer/record_writer.py": ("RETRY_INTERVAL",),
            "services/detokenizer/service.py": ("KEEP_ALIVE_INTERVAL",),
            "services/executor/adapters/registrar.py": ("SWEEP_INTERVAL",),
            "services/executor/devices/cpu/cores.py": ("INTERVAL",),
            "services/executor/devices/ranks/follower.py": ("HEARTBEAT_INTERVAL",),
            "services/executor/devices/ranks/followers.py": ("CHECK_INTERVAL",),
            "services/executor/spans.py": ("STEP_INTERVAL",),
            "services/gateway/http/http_protocol.py": ("CHECK_INTERVAL",),
            "services/gateway/http/server.py": ("DATE_INTERVAL",),
            "services/scheduler/attacher.py": ("LOOK_EVERY",),
            "services/scheduler/backlog_reporter.py": ("SAMPLE_EVERY", "REPORT_EVERY"),
            "services/scheduler/item_restorer.py": ("CHECK_INTERVAL",),
            "services/scheduler/prefix_advertiser.py": ("CHECK_EVERY", "REPEAT_AFTER"),
            "services/scheduler/service.py": ("CHECK_EVERY",),
            "services/scheduler/work_consumer.py": ("LOOK_EVERY", "RETRY_AFTER"),
            "services/tokenizer/chat/renderer.py": ("RETRY_AFTER",),
            "services/tokenizer/dispatch/dispatcher.py": (
                "ABORT_INTERVAL",
                "RECONNECT_INTERVAL",
                "ELECTION_INTERVAL",
            ),
            "services/tokenizer/dispatch/store_monitor.py": ("INTERVAL",),
            "shared/bus/jetstream.py": ("ELECTION_INTERVAL",),
            "shared/bus/nats_store.py": ("RECONNECT_INTERVAL",),
            "shared/models/fetch.py": ("POLL_INTERVAL",),
            "shared/process/clock_monitor.py": ("INTERVAL", "RETRY_INTERVAL"),
            "shared/process/heartbeater.py": ("INTERVAL", "ANSWER_DELAY"),
            "shared/process/polling.py": ("INTERVAL",),
            "shared/process/store_keeper.py": ("INTERVAL",),
            "shared/security/api_keys.py": ("WATCH_INTERVAL",),
        },
    ),
    Kind(
        "Silence of a process",
        "A process that waits for a core is spoken for by the supervisor, which knows it from Linux. Without a "
        "supervisor, as in containers of their own, the process counts as gone: others go on with its work, it ends "
        "or obeys a higher term when it runs again, and nothing is lost.",
        {
            "pagewire/embedded/watchdog.py": ("PING_TIMEOUT", "RECONNECT_TIMEOUT"),
            "services/detokenizer/fence.py": ("LIMIT", "RENEW_EVERY"),
            "services/executor/devices/ranks/adapters.py": ("PACK_TIMEOUT",),
            "services/executor/devices/ranks/followers.py": ("SILENCE",),
            "services/scheduler/executor_client.py": ("ABSENCE",),
            "services/scheduler/request_manager.py": ("RENEW_EVERY",),
            "services/scheduler/service.py": ("HAND_BACK_AFTER",),
            "shared/bus/protocol.py": ("ACK_WAIT",),
            "shared/process/peers.py": ("SILENCE", "DEAF"),
        },
    ),
    Kind(
        "Answers that are asked for again",
        "The question is sent again, or put to another instance, for as long as the request has time. A late answer "
        "to an earlier question does no harm, since questions and answers are numbered or identified.",
        {
            "pagewire/client/directory.py": ("LIST_TIMEOUT",),
            "pagewire/client/stream.py": ("FRAME_TIMEOUT", "RESULT_TIMEOUT", "SAME_ABSENCE"),
            "services/detokenizer/abort_notifier.py": ("ABORT_TIMEOUT", "ABSENCE"),
            "services/detokenizer/adopter.py": ("OBJECTION_TIME", "PING_TIMEOUT"),
            "services/detokenizer/step_feed.py": ("STALL",),
            "services/scheduler/attacher.py": ("ATTACH_TIMEOUT",),
            "services/scheduler/executor_client.py": ("CLAIM_TIMEOUT", "RESEND_AFTER"),
            "services/scheduler/work_consumer.py": ("PULL_EXPIRES",),
            "services/tokenizer/dispatch/dispatcher.py": (
                "ANSWER_TIMEOUT",
                "STOOD_STILL",
                "BROKER_ANSWERS_WITHIN",
                "ABSENCE",
                "ABORT_TIMEOUT",
            ),
            "shared/bus/jetstream.py": ("LEADER_TIMEOUT",),
            "shared/bus/nats_client.py": (
                "PING_INTERVAL",
                "CLUSTER_PING_INTERVAL",
                "HANDSHAKE_TIMEOUT",
                "CLUSTER_HANDSHAKE_TIMEOUT",
            ),
            "shared/bus/nats_store.py": ("TIMEOUT", "READ_TIMEOUT"),
            "shared/bus/requests.py": ("LAST_LOOK",),
            "shared/bus/stream_keeper.py": ("TIMEOUT", "REMOVAL_TIME"),
        },
    ),
    Kind(
        "Time that a new request has to be accepted",
        "The request is refused with 503 and the reason before its client has heard that it is accepted, and may be "
        "sent again.",
        {
            "pagewire/client/frames.py": ("CANCEL_TIMEOUT",),
            "pagewire/client/connection.py": ("RECONNECT_TIMEOUT",),
            "pagewire/client/stream.py": ("RETRY_FOR", "ROOM_TIMEOUT"),
            "services/detokenizer/adopter.py": ("UNSTORED_AFTER", "LOOK_FOR"),
            "services/detokenizer/client_handlers.py": ("OTHERS_ANSWER_WITHIN", "FIRST_ANSWERS_WITHIN"),
            "services/gateway/http/rotation.py": ("RETRY_AFTER_MS",),
            "services/gateway/service.py": ("START_TIMEOUT",),
            "services/tokenizer/dispatch/dispatcher.py": ("OPEN_TIMEOUT", "RECONNECT_TIMEOUT", "SUCCESSOR_TIMEOUT"),
            "shared/bus/nats_store.py": ("PUT_TIMEOUT", "ELECTION_TIMEOUT"),
            "shared/bus/streams.py": ("DUPLICATE_WINDOW",),
        },
    ),
    Kind(
        "Time that a request has",
        "The request ends with 408, once. Its client sets the time; these are the defaults.",
        {
            "pagewire/client/stream.py": ("GRACE",),
            "services/gateway/requests/completion_request.py": ("TIMEOUT_MS",),
        },
    ),
    Kind(
        "Time that is measured without waiting for a core",
        "A conversation that needs so much computation is refused, on any machine. A worker that waits for a core "
        "has more time.",
        {
            "services/tokenizer/chat/chat_template.py": ("SEARCH_SECONDS",),
            "services/tokenizer/chat/renderer.py": ("ANSWER_WITHIN", "START_WITHIN"),
            "services/tokenizer/chat/worker.py": ("CPU_SECONDS",),
            "services/tokenizer/chat/worker_process.py": ("STARVATION_CHECK",),
        },
    ),
    Kind(
        "Memory of what has ended",
        "A client that sends its request again after so long has it computed again. A consumer that is gone, or "
        "has had no leader for so long, is created again.",
        {
            "services/detokenizer/leaving_clients.py": ("REPEAT_WITHIN",),
            "services/detokenizer/state/registry.py": ("KEEP_ENDED",),
            "shared/bus/nats_store.py": ("ELECTION_TIME",),
            "shared/bus/queue_consumers.py": ("INACTIVE_AFTER",),
            "shared/bus/protocol.py": ("DONE_AGE",),
        },
    ),
    Kind(
        "Adapters",
        "A request whose adapter does not come in time, or was removed for longer than its content is kept, ends with "
        "an error that names it. The next request asks for the adapter again.",
        {
            "pagewire/client/adapter_changes.py": ("RETRY_FOR",),
            "services/executor/adapters/patterns.py": ("PATTERN_SECONDS", "TOTAL_SECONDS"),
            "shared/adapters/adapter_store.py": ("TIMEOUT", "PART_TIMEOUT", "KEPT_SECONDS"),
        },
    ),
    Kind(
        "Delays of the end of a stream",
        "The last frame is sent without waiting any longer. What is not stored or delivered by then is so afterwards.",
        {
            "services/detokenizer/finalizer.py": ("DELIVERY_TIMEOUT",),
            "services/detokenizer/record_writer.py": ("WRITE_TIMEOUT",),
        },
    ),
    Kind(
        "Starts and ends of processes",
        "A start that takes longer ends with an error that names the time. A process that ends is killed at last; "
        "what it has not finished, others take over.",
        {
            "pagewire/embedded/broker.py": ("START_TIMEOUT", "STOP_TIMEOUT"),
            "pagewire/embedded/cluster.py": ("ANSWER_TIMEOUT",),
            "pagewire/embedded/drainer.py": ("STATS_TIMEOUT",),
            "pagewire/embedded/memory_shares.py": ("QUERY_TIMEOUT",),
            "pagewire/embedded/stack.py": ("END_TIMEOUT",),
            "pagewire/embedded/watchdog.py": ("START_TIMEOUT",),
            "services/detokenizer/service.py": ("CLOSE_TIMEOUT",),
            "services/executor/devices/cuda/ranks/collectives.py": ("DISCONNECT_TIMEOUT",),
            "services/executor/devices/cuda/ranks/leader.py": ("LOST_TIMEOUT",),
            "services/executor/devices/ranks/followers.py": ("START_TIMEOUT", "CLOSE_TIMEOUT"),
            "services/gateway/http/http_protocol.py": ("LAST_IDLE_TIME",),
            "services/gateway/http/server.py": ("CLOSE_TIMEOUT",),
            "services/tokenizer/service.py": ("DRAIN_TIMEOUT",),
            "shared/bus/nats.py": ("CLOSE_TIMEOUT",),
            "shared/bus/nats_client.py": ("CLOSE_GRACE",),
            "shared/models/fetch.py": ("SILENCE",),
            "shared/process/device_choice.py": ("CHECK_TIME",),
            "shared/process/heartbeater.py": ("LOST_AFTER",),
            "shared/process/runtime.py": ("CLOSE_WITHIN",),
        },
    ),
    Kind(
        "Estimates and reports",
        "The figures lag behind. They decide about speed and about refusals with 429, never about a request that is "
        "accepted.",
        {
            "services/gateway/metrics/metrics_page.py": ("TIMEOUT",),
            "services/scheduler/policy/budget.py": ("STEP_TARGET_MS",),
            "services/scheduler/policy/event_rate.py": ("TAU",),
            "services/scheduler/policy/service_rate.py": ("TAU", "KNOWN_AFTER"),
            "services/scheduler/policy/waiting_queue.py": ("AGEING",),
            "services/tokenizer/dispatch/admission.py": ("AGEING", "MAX_AGE"),
            "shared/process/clock_monitor.py": ("LARGE",),
            "shared/process/discovery.py": ("STALL_TIMEOUT",),
            "shared/process/otlp_metrics.py": ("INTERVAL_MS",),
        },
    ),
    Kind(
        "Steps",
        "A step is late only if the device has made no progress for so long: a starved device computes for as long "
        "as it takes.",
        {"services/executor/steps/in_flight_steps.py": ("STEP_SECONDS", "TOKEN_SECONDS")},
    ),
)


def timers() -> Iterator[Timer]:
    """Yields all timers, in the order of files and lines."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield from _declared(file)


def reference() -> str:
    """Returns `docs/timers.md`."""
    declared = {(timer.path, timer.name): timer for timer in timers()}
    lines = [_HEAD]
    for kind in KINDS:
        lines += [f"## {kind.title}", "", kind.answer, "", "| file | timer | value | meaning |", "|---|---|---|---|"]
        for path, names in kind.timers.items():
            for name in names:
                timer = declared[path, name]
                lines.append(f"| `{path}` | `{name}` | `{timer.value}` | {timer.meaning} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _declared(file: Path) -> Iterator[Timer]:
    body = ast.parse(file.read_text()).body
    for statement, text in pairwise(body):
        match statement, text:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value),
                ast.Expr(value=ast.Constant(value=str(words))),
            ) if name.isupper() and "seconds" in words[:MENTION].lower() and not isinstance(value, ast.Tuple):
                meaning = " ".join(words.split()).replace("|", "\\|")
                yield Timer(str(file.relative_to(ROOT)), name, ast.unparse(value), meaning)
