"""The subjects of all messages. Tokens match [A-Za-z0-9_-]+; the second is the version, identifiers come last."""

import re
import secrets

CLIENTS = "pagewire.v1"
"""What clients without a key, or with the one key of `--api-key`, ask. They are the tenant with the empty name."""
TENANT = "pagewire.v1.tenant"
"""`.<name>.<request>`: what a tenant of `--api-key-file` asks; the rest of the subject is as under `CLIENTS`.

The broker lets only the user of that name publish there, so that the subject says who asks. A reply subject does not:
the broker does not check it.
"""
GENERATE = "pagewire.v1.generate"
TOKENIZE = "pagewire.v1.tokenize"
DETOKENIZE = "pagewire.v1.detokenize"
MODELS = "pagewire.v1.models"
CANCEL = "pagewire.v1.cancel"
RESUME = "pagewire.v1.resume"

DETOKENIZER = "pagewire.svc.detokenizer"
"""`.<instance>.open | attach | abort`: one subscription per instance, because the order of messages matters."""
ADOPTED = "pagewire.svc.adopted"
"""`.<instance>`: what a detokenizer tells all others."""
ABORT = "pagewire.svc.scheduler"
"""`.<instance>.abort`."""
PLAN = "pagewire.svc.plan"
"""`.<executor>`."""
STEPS = "pagewire.svc.steps"
"""`.<executor>`: read by the executor's scheduler and by every detokenizer."""
REPLAY = "pagewire.svc.replay"
"""`.<executor>`."""
CLAIM = "pagewire.svc.claim"
"""`.<executor>`."""
METRICS = "pagewire.svc.metrics"
"""What the gateway asks every service for the values of its metrics."""
TRACES = "pagewire.svc.traces"
"""What all services tell each other: a trace whose spans shall be exported although it was not sampled."""
HEARTBEAT = "pagewire.svc.heartbeat"
"""`.<service>.<instance>`. An empty message says that the process of the instance has ended."""
ANNOUNCE = "pagewire.svc.announce"
"""Asks every service for a heartbeat at once: whoever has just begun to listen need not wait for the next ones."""

PREFIXES = "pagewire.svc.prefixes"
"""`.<model>.<scheduler>`: the prefixes that a replica has cached."""

BACKLOG = "pagewire.svc.backlog"
"""`.<model>.<scheduler>`: what waits, and how fast it starts."""

WORK = "pagewire.work"
"""`.<model>.<class>.<target>`: the work queues."""
DONE = "pagewire.done"
"""`.<request id>`: how a request ended, kept for two minutes."""
TERM = "pagewire.term"
"""The sequence number of a message in its stream is the next term."""

SERVICE_INBOX = "_SVC"
"""`.<service>`: prefix of the inboxes of a service, which nobody else may read."""
CLIENT_INBOX = "_INBOX"
"""Prefix of the inboxes of clients that are no tenants: each of them may read all."""
TENANT_INBOX = "_TENANT"
"""`.<name>`: prefix of the inboxes of a tenant, which nobody else may read."""

CLASSES = ("urgent", "normal", "background")
"""Classes of work: priority below 0, 0, and above 0."""
ANY = "any"
"""Target of work that any replica may take; otherwise the target is a scheduler's instance id."""

INBOX_LENGTH = 255
"""Maximum length of a client's inbox: a line of the protocol must fit two of them and a subject of Pagewire."""
_INBOX = re.compile(r"(?:_INBOX|_TENANT\.([A-Za-z0-9_-]+))(?:\.[A-Za-z0-9_-]+)+")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OWNED = "~"
"""Separates a tenant's name from what belongs to it. No name and no request id has it."""


def model_token(name: str) -> str:
    """Returns the served name as a subject token: every character outside [A-Za-z0-9_-] becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def work_queue(model: str, priority: int, target: str) -> str:
    """Returns a request's queue, which follows `WORK` in subjects. `target` is `ANY` or a scheduler's instance id."""
    return f"{model}.{CLASSES[class_of(priority)]}.{target}"


def class_of(priority: int) -> int:
    """Returns the index in `CLASSES` of a priority's class."""
    return 1 + (priority > 0) - (priority < 0)


def work_queues(model: str, target: str) -> list[str]:
    """Returns the queues of one target, most urgent first."""
    return [f"{model}.{name}.{target}" for name in CLASSES]


def tenant_of(subject: str) -> str:
    """Returns the name of the tenant that asks at a subject of clients, empty for clients that are no tenants."""
    return subject.split(".", 4)[3] if subject.startswith(f"{TENANT}.") else ""


def for_tenant(subject: str, tenant: str) -> str:
    """Returns the subject under `CLIENTS` at which a tenant asks what others ask at `subject`."""
    return f"{TENANT}.{tenant}{subject.removeprefix(CLIENTS)}" if tenant else subject


def for_everyone(pattern: str) -> tuple[str, str]:
    """Returns the patterns to subscribe to for requests of all clients, from that of clients that are no tenants."""
    return pattern, for_tenant(pattern, "*")


def client_inbox(tenant: str) -> str:
    """Returns the prefix of a tenant's inboxes, or that of clients that are no tenants if the name is empty."""
    return f"{TENANT_INBOX}.{tenant}" if tenant else CLIENT_INBOX


def gateway_inbox(tenant: str) -> str:
    """Returns the prefix of the inboxes in which the gateway acts for a tenant, or for other clients."""
    return f"{client_inbox(tenant)}.gateway"


def service_inbox(service: str) -> str:
    """Returns the prefix of the inboxes of a service."""
    return f"{SERVICE_INBOX}.{service}"


def owner_of(reply: str) -> str | None:
    """Returns the tenant whose inbox a reply subject is, empty if it is that of another client.

    Returns None for anything else. That is not answered: it may be an internal subject.
    """
    if len(reply) > INBOX_LENGTH or (inbox := _INBOX.fullmatch(reply)) is None:
        return None
    return inbox[1] or ""


def is_client_inbox(reply: str) -> bool:
    """Returns whether a reply subject is an inbox of any client."""
    return owner_of(reply) is not None


def owned(tenant: str, text: str) -> str:
    """Returns a request id, or another text of a client, such that no two tenants have the same one.

    Request ids of clients that are no tenants stay as they are.
    """
    return f"{tenant}{_OWNED}{text}" if tenant or _OWNED in text else text


def owner_and_text(text: str) -> tuple[str, str]:
    """Returns the tenant and the text from which `owned` has made `text`."""
    tenant, owner_is_named, rest = text.partition(_OWNED)
    return (tenant, rest) if owner_is_named else ("", text)


def is_token(text: str) -> bool:
    """Returns whether `text` can be a token of a subject. Request ids must be tokens."""
    return _TOKEN.fullmatch(text) is not None


def new_instance() -> str:
    """Returns a random instance id for a service process."""
    return secrets.token_hex(6)
