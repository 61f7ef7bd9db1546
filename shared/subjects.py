"""The subjects of all messages. Tokens match [A-Za-z0-9_-]+; the second is the version, identifiers come last."""

import re
import secrets
from functools import lru_cache

from pagewire.shared.wire_version import WIRE_VERSION

CLIENTS = "pagewire.v1"
"""Prefix of the subjects of clients without a key, or with the key of `--api-key`: the tenant with the empty name."""
TENANT = "pagewire.v1.tenant"
"""`.<name>.<request>`: requests of a tenant of `--api-key-file`; the rest of the subject is as under `CLIENTS`.

The broker lets only the user of that name publish there, so the subject proves who sends a request. A reply subject
proves nothing: the broker does not check it.
"""
GENERATE = "pagewire.v1.generate"
"""`.<model>`: a client asks for completions."""
TOKENIZE = "pagewire.v1.tokenize"
"""`.<model>`: a client asks for the tokens of a text."""
DETOKENIZE = "pagewire.v1.detokenize"
"""`.<model>`: a client asks for the text of tokens."""
MODELS = "pagewire.v1.models"
"""A client asks for the models that are served."""
ADAPTERS = "pagewire.v1.adapters"
"""`.<load | unload>.<model>`: operators load and remove adapters."""
CANCEL = "pagewire.v1.cancel"
RESUME = "pagewire.v1.resume"

DETOKENIZER = "pagewire.svc.detokenizer"
"""`.<instance>.open | attach | abort`: one subscription per instance, because the order of messages matters."""
ADOPTED = "pagewire.svc.adopted"
"""`.<instance>`: a detokenizer announces to all others the streams that it has adopted."""
ABORT = "pagewire.svc.scheduler"
"""`.<instance>.abort`: a detokenizer ends a request at its scheduler."""
PLAN = "pagewire.svc.plan"
"""`.<executor>`: a scheduler sends its executor a plan."""
STEPS = "pagewire.svc.steps"
"""`.<executor>`: read by the executor's scheduler and by every detokenizer."""
REPLAY = "pagewire.svc.replay"
"""`.<executor>`: a reader of steps asks for missing outputs."""
CLAIM = "pagewire.svc.claim"
"""`.<executor>`: a scheduler claims a free executor."""
METRICS = "pagewire.svc.metrics"
"""The gateway asks every service for the values of its metrics."""
RECENT_STEPS = "pagewire.svc.recent_steps"
"""The gateway asks every executor for the figures of its latest steps, while somebody looks at the console."""
RECENT_REQUESTS = "pagewire.svc.recent_requests"
"""The gateway asks every detokenizer for the figures of its latest requests, while somebody looks at the console."""
FAULTS = "pagewire.svc.faults"
"""The console has the supervisor kill, freeze or drain an instance, where `--demo-faults` allows it."""
TRACES = "pagewire.svc.traces"
"""A service announces to all others a trace whose spans shall be exported although it was not sampled."""
HEARTBEAT = "pagewire.svc.heartbeat"
"""`.<service>.<instance>`. An empty message says that the process of the instance has ended."""
ANNOUNCE = "pagewire.svc.announce"
"""A service that has just begun to listen asks every other for a heartbeat at once."""

PREFIXES = "pagewire.svc.prefixes"
"""`.<model>.<scheduler>`: the prefixes that a replica has cached."""

BACKLOG = "pagewire.svc.backlog"
"""`.<model>.<scheduler>`: the requests that wait, and how fast they start."""

WORK = "pagewire.work"
"""`.<model>.<wire version>.<class>.<target>`: the work queues; those of another version are never read."""
DONE = "pagewire.done"
"""`.<request id>`: how a request ended, kept for two minutes."""
ADAPTER = "pagewire.adapter"
ADAPTER_NAME = "pagewire.adapter.name"
"""`.<model>.<adapter>`: the content that an adapter's name stands for."""
ADAPTER_CONTENT = "pagewire.adapter.content"
"""`.<hash>.<number | parts>`: a part of an adapter's content, or the number of its parts."""
ADAPTER_RETIRED = "pagewire.adapter.retired"
"""`.<hash>`: the time at which content lost a name."""
TERM = "pagewire.term"
"""The sequence number of a message in its stream is the next term."""

SERVICE_INBOX = "_SVC"
"""`.<service>`: prefix of the inboxes of a service, which nobody else may read."""
FORWARD = f"{SERVICE_INBOX}.tokenizer.forward"
"""`.<generate | tokenize>.<model>`: a tokenizer passes a request on to those of another model. Nobody else may."""
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


@lru_cache(256)  # asked for every request
def model_token(name: str) -> str:
    """Returns the served name as a subject token: every character outside [A-Za-z0-9_-] becomes `_`.

    >>> model_token("org/Llama-3.1")
    'org_Llama-3_1'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def work_queue(model: str, priority: int, target: str) -> str:
    """Returns a request's queue, which follows `WORK` in subjects. `target` is `ANY` or a scheduler's instance id.

    >>> work_queue("llama", -1, ANY) == f"llama.{WIRE_VERSION}.urgent.any"
    True
    """
    return f"{all_work(model)}.{CLASSES[class_of(priority)]}.{target}"


def all_work(model: str) -> str:
    """Returns the first tokens of all queues of a model that services of this wire version read."""
    return f"{model}.{WIRE_VERSION}"


def class_of(priority: int) -> int:
    """Returns the index in `CLASSES` of a priority's class."""
    return 1 + (priority > 0) - (priority < 0)


def work_queues(model: str, target: str) -> list[str]:
    """Returns the queues of one target, most urgent first."""
    return [f"{all_work(model)}.{name}.{target}" for name in CLASSES]


def tenant_of(subject: str) -> str:
    """Returns the name of the tenant whose requests a subject carries, empty for clients that are no tenants.

    >>> tenant_of("pagewire.v1.tenant.alice.generate.llama")
    'alice'
    """
    return subject.split(".", 4)[3] if subject.startswith(f"{TENANT}.") else ""


def model_of(subject: str) -> str:
    """Returns the token of the model, or of its adapter, that a request is for.

    >>> model_of("pagewire.v1.tenant.alice.generate.llama")
    'llama'
    """
    return subject.rpartition(".")[2]


def salted(adapter: str, cache_salt: str) -> str:
    """Returns the salt of the cached prefixes of an adapter, from the salt that `owned` has made of a request's.

    No two of them are alike: an adapter is the hash of its content, and no name of a tenant has a slash.

    >>> salted("", "alice~s1"), salted("0f3c", "alice~s1")
    ('alice~s1', 'lora/0f3c~alice~s1')
    """
    return f"lora/{adapter}{_OWNED}{cache_salt}" if adapter else cache_salt


def for_tenant(subject: str, tenant: str) -> str:
    """Returns the subject at which a tenant sends the requests that other clients send to `subject`.

    >>> for_tenant("pagewire.v1.generate.llama", "alice")
    'pagewire.v1.tenant.alice.generate.llama'
    """
    return f"{TENANT}.{tenant}{subject.removeprefix(CLIENTS)}" if tenant else subject


def for_everyone(pattern: str) -> tuple[str, str]:
    """Returns the patterns to subscribe to for requests of all clients, from that of clients that are no tenants."""
    return pattern, for_tenant(pattern, "*")


def client_inbox(tenant: str) -> str:
    """Returns the prefix of a tenant's inboxes, or the prefix of clients that are no tenants if the name is empty."""
    return f"{TENANT_INBOX}.{tenant}" if tenant else CLIENT_INBOX


def gateway_inbox(tenant: str) -> str:
    """Returns the prefix of the inboxes in which the gateway acts for a tenant, or for other clients."""
    return f"{client_inbox(tenant)}.gateway"


def service_inbox(service: str) -> str:
    """Returns the prefix of the inboxes of a service."""
    return f"{SERVICE_INBOX}.{service}"


def owner_of(reply: str) -> str | None:
    """Returns the tenant whose inbox a reply subject is, empty if it is that of another client.

    Returns None for anything else, which must not be answered: it may be an internal subject.

    >>> owner_of("_TENANT.alice.x1"), owner_of("_INBOX.x1"), owner_of("pagewire.svc.plan.e1")
    ('alice', '', None)
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

    >>> owned("alice", "r1"), owned("", "r1")
    ('alice~r1', 'r1')
    """
    return f"{tenant}{_OWNED}{text}" if tenant or _OWNED in text else text


def owner_and_text(text: str) -> tuple[str, str]:
    """Returns the tenant and the text from which `owned` has made `text`.

    >>> owner_and_text("alice~r1")
    ('alice', 'r1')
    """
    tenant, owner_is_named, rest = text.partition(_OWNED)
    return (tenant, rest) if owner_is_named else ("", text)


def is_token(text: str) -> bool:
    """Returns whether `text` can be a token of a subject. Request ids must be tokens."""
    return _TOKEN.fullmatch(text) is not None


def new_instance() -> str:
    """Returns a random instance id for a service process."""
    return secrets.token_hex(6)
