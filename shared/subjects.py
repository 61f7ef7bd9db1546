"""The subjects of all messages. Tokens match [A-Za-z0-9_-]+; the second is the version, identifiers come last."""

import re
import secrets

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
HEARTBEAT = "pagewire.svc.heartbeat"
"""`.<service>.<instance>`. An empty message says that the process of the instance has ended."""

PREFIXES = "pagewire.svc.prefixes"
"""`.<model>.<scheduler>`: the prefixes that a replica has cached."""

WORK = "pagewire.work"
"""`.<model>.<class>.<target>`: the work queues."""
DONE = "pagewire.done"
"""`.<request id>`: how a request ended, kept for two minutes."""
TERM = "pagewire.term"
"""The sequence number of a message in its stream is the next term."""

SERVICE_INBOX = "_SVC"
"""Prefix of the services' inboxes, which clients may not read."""

CLASSES = ("urgent", "normal", "background")
"""Classes of work: priority below 0, 0, and above 0."""
ANY = "any"
"""Target of work that any replica may take; otherwise the target is a scheduler's instance id."""

INBOX_LENGTH = 255
"""Maximum length of a client's inbox: a line of the protocol must fit two of them and a subject of Pagewire."""
_CLIENT_INBOX = re.compile(r"_INBOX(\.[A-Za-z0-9_-]+)+")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def model_token(name: str) -> str:
    """Returns the served name as a subject token: every character outside [A-Za-z0-9_-] becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def work_queue(model: str, priority: int, target: str) -> str:
    """Returns a request's queue, which follows `WORK` in subjects. `target` is `ANY` or a scheduler's instance id."""
    rank = (priority > 0) - (priority < 0)
    return f"{model}.{CLASSES[1 + rank]}.{target}"


def work_queues(model: str, target: str) -> list[str]:
    """Returns the queues of one target, most urgent first."""
    return [f"{model}.{name}.{target}" for name in CLASSES]


def is_client_inbox(reply: str) -> bool:
    """Returns whether a reply subject is a client's inbox. No others are answered: they may be internal subjects."""
    return len(reply) <= INBOX_LENGTH and _CLIENT_INBOX.fullmatch(reply) is not None


def is_token(text: str) -> bool:
    """Returns whether `text` can be a token of a subject. Request ids must be tokens."""
    return _TOKEN.fullmatch(text) is not None


def new_instance() -> str:
    """Returns a random instance id for a service process."""
    return secrets.token_hex(6)
