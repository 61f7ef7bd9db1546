"""The users of the NATS server and the subjects that each one may publish and subscribe: those it needs, and no others.

The configuration of the embedded broker and `deploy/nats.conf` are made from this table. A service that uses another
subject needs it here; until then the server refuses it, and the bus logs `permission_denied`.
"""

from dataclasses import dataclass

from pagewire.shared import subjects
from pagewire.shared.bus.jetstream import API
from pagewire.shared.bus.streams import ADAPTER_STREAM, CHECK_DONE, DONE_STREAM, TERM_STREAM, WORK_STREAM

CLIENT = "client"
"""The user of clients that are no tenants."""
OPERATOR = "operator"
"""The user of whoever operates the broker, with all rights."""
STORING = frozenset({"scheduler", "detokenizer"})
"""The services that create the streams of the store. The right to create streams includes the right to read them."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """The rights of one user, as patterns of subjects."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    """Whether the user may also publish one answer to each message that it receives, to the reply subject, at once."""


def of_tenant(name: str) -> Permissions:
    """Returns the rights of a tenant of `--api-key-file`; with an empty name, the rights of other clients."""
    requests = (subjects.for_tenant(subject, name) for subject in _REQUESTS)
    return Permissions(publish=(*requests, "$SRV.>"), subscribe=(f"{subjects.client_inbox(name)}.>",))


_REQUESTS = (
    f"{subjects.GENERATE}.*",
    f"{subjects.TOKENIZE}.*",
    f"{subjects.DETOKENIZE}.*",
    subjects.MODELS,
    f"{subjects.CANCEL}.>",
    f"{subjects.RESUME}.>",
)
"""The requests of clients, without the tenant."""
_VERBS = ("PING", "INFO", "STATS")
"""The requests of discovery. They are listed, because nats-server takes `$SRV.>` for a part of `$SRV.*`."""
_CLIENTS = (f"{subjects.CLIENT_INBOX}.>", f"{subjects.TENANT_INBOX}.>")
"""The inboxes of all clients."""
_STREAMS = tuple(
    f"{API}.STREAM.{verb}.{stream}"
    for stream in (WORK_STREAM, DONE_STREAM, TERM_STREAM)
    for verb in ("CREATE", "UPDATE", "INFO")
)
_GET_ADAPTERS = (
    f"{API}.DIRECT.GET.{ADAPTER_STREAM}",
    f"{API}.DIRECT.GET.{ADAPTER_STREAM}.>",
    f"{API}.STREAM.MSG.GET.{ADAPTER_STREAM}",
)
_SET_ADAPTERS = (
    *(f"{API}.STREAM.{verb}.{ADAPTER_STREAM}" for verb in ("CREATE", "UPDATE", "INFO", "PURGE")),
    f"{subjects.ADAPTER}.>",
)
"""Subjects that create the store of adapters and write to it."""
_ADAPTERS = tuple(f"{subjects.ADAPTERS}.{verb}.*" for verb in ("load", "unload"))
"""The requests of operators."""
_GET_DONE = (f"{API}.DIRECT.GET.{DONE_STREAM}.>", f"{API}.STREAM.MSG.GET.{DONE_STREAM}")
"""Subjects that read a record: from the only server, and in a cluster from the leader."""
_ACKS = (f"$JS.ACK.{WORK_STREAM}.>", f"$JS.ACK.*.*.{WORK_STREAM}.>")
"""The acknowledgements of work items, in both forms that servers use."""


def _inbox(service: str) -> str:
    return f"{subjects.service_inbox(service)}.>"


def _everyone(*requests: str) -> tuple[str, ...]:
    return tuple(pattern for request in requests for pattern in subjects.for_everyone(request))


def _service(name: str, *, publish: tuple[str, ...], subscribe: tuple[str, ...], answers: bool = False) -> Permissions:
    """Returns the rights of a service and those of all services: heartbeats, discovery, metrics, inboxes of its own."""
    return Permissions(
        publish=(
            f"{subjects.HEARTBEAT}.{name}.*",
            subjects.ANNOUNCE,
            subjects.TRACES,
            f"$SRV.STATS.pagewire-{name}",
            _inbox(name),
            _inbox("supervisor"),
            *publish,
            *(_STREAMS if name in STORING else ()),
        ),
        subscribe=(
            f"{subjects.HEARTBEAT}.*.*",
            subjects.ANNOUNCE,
            subjects.METRICS,
            subjects.TRACES,
            *(f"$SRV.{verb}{suffix}" for verb in _VERBS for suffix in ("", f".pagewire-{name}", f".pagewire-{name}.*")),
            _inbox(name),
            *subscribe,
        ),
        answers=answers,
    )


ROLES: dict[str, Permissions] = {
    "tokenizer": _service(
        "tokenizer",
        publish=(
            *_CLIENTS,
            f"{subjects.DETOKENIZER}.*.open",
            f"{subjects.DETOKENIZER}.*.stored",
            f"{subjects.DETOKENIZER}.*.abort",
            f"{subjects.WORK}.>",
            CHECK_DONE,
            *(f"{API}.STREAM.INFO.{stream}" for stream in (WORK_STREAM, DONE_STREAM)),
            *_GET_ADAPTERS,
        ),
        subscribe=(
            f"{subjects.ADAPTER_NAME}.*.*",
            *_everyone(f"{subjects.GENERATE}.*", f"{subjects.TOKENIZE}.*", subjects.MODELS),
            f"{subjects.PREFIXES}.*.*",
            f"{subjects.BACKLOG}.*.*",
        ),
    ),
    "scheduler": _service(
        "scheduler",
        publish=(
            _inbox("detokenizer"),
            f"{subjects.CLAIM}.*",
            f"{subjects.PLAN}.*",
            f"{subjects.REPLAY}.*",
            f"{subjects.PREFIXES}.*.*",
            f"{subjects.BACKLOG}.*.*",
            f"{subjects.DETOKENIZER}.*.attach",
            f"{subjects.DETOKENIZER}.*.abort",
            subjects.TERM,
            f"{subjects.WORK}.*.*.*.*",
            f"{API}.DIRECT.GET.{WORK_STREAM}",
            *_GET_DONE,
            f"{API}.CONSUMER.CREATE.{WORK_STREAM}.>",
            f"{API}.CONSUMER.MSG.NEXT.{WORK_STREAM}.*",
            f"{API}.CONSUMER.INFO.{WORK_STREAM}.*",
            f"{API}.CONSUMER.DELETE.{WORK_STREAM}.*",
            *_ACKS,
        ),
        subscribe=(f"{subjects.ABORT}.*.*", f"{subjects.STEPS}.*", f"{subjects.BACKLOG}.*.*"),
        answers=True,
    ),
    "executor": _service(
        "executor",
        publish=(f"{subjects.STEPS}.*", _inbox("scheduler"), _inbox("detokenizer"), *_GET_ADAPTERS, *_SET_ADAPTERS),
        subscribe=(
            f"{subjects.PLAN}.*",
            f"{subjects.REPLAY}.*",
            f"{subjects.CLAIM}.*",
            subjects.RECENT_STEPS,
            *_ADAPTERS,
        ),
        answers=True,
    ),
    "detokenizer": _service(
        "detokenizer",
        publish=(
            *_CLIENTS,
            _inbox("tokenizer"),
            _inbox("scheduler"),
            f"{subjects.ABORT}.*.abort",
            f"{subjects.REPLAY}.*",
            f"{subjects.DONE}.*",
            *_GET_DONE,
            f"{API}.DIRECT.GET.{WORK_STREAM}",
            f"{subjects.DETOKENIZER}.*.ping",
            f"{subjects.ADOPTED}.*",
            *_ACKS,
        ),
        subscribe=(
            *_everyone(f"{subjects.CANCEL}.>", f"{subjects.RESUME}.>", f"{subjects.DETOKENIZE}.*"),
            f"{subjects.DETOKENIZER}.*.*",
            f"{subjects.ADOPTED}.*",
            f"{subjects.STEPS}.*",
            subjects.RECENT_REQUESTS,
        ),
    ),
    "gateway": _service(
        "gateway",
        publish=(
            *_everyone(*_REQUESTS),
            *_ADAPTERS,
            subjects.METRICS,
            subjects.RECENT_STEPS,
            subjects.RECENT_REQUESTS,
            subjects.FAULTS,
        ),
        subscribe=tuple(f"{subjects.gateway_inbox(tenant)}.>" for tenant in ("", "*")),
        answers=True,
    ),
    "supervisor": Permissions(
        publish=(f"{subjects.HEARTBEAT}.*.*", subjects.ANNOUNCE, "$SRV.PING.>", "$SRV.STATS.>", f"{API}.INFO"),
        subscribe=(f"{subjects.HEARTBEAT}.*.*", subjects.FAULTS, _inbox("supervisor")),
    ),
}
"""The rights of each service's user, and of the supervisor's."""
