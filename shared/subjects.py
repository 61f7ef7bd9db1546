"""Every subject in one place. Tokens are [A-Za-z0-9_-]; the version is the second one, identifiers come last."""

import re
import secrets

GENERATE = "pagewire.v1.generate"
TOKENIZE = "pagewire.v1.tokenize"
DETOKENIZE = "pagewire.v1.detokenize"
MODELS = "pagewire.v1.models"
CANCEL = "pagewire.v1.cancel"
RESUME = "pagewire.v1.resume"

DETOKENIZER = "pagewire.svc.detokenizer"
"""`.<instance>.open | attach | abort`: one subscription per instance, since their order matters."""
ABORT = "pagewire.svc.scheduler"
"""`.<instance>.abort`."""
PLAN = "pagewire.svc.plan"
"""`.<executor>`."""
STEPS = "pagewire.svc.steps"
"""`.<executor>`: read by its scheduler and by every detokenizer."""
REPLAY = "pagewire.svc.replay"
"""`.<executor>`."""
CLAIM = "pagewire.svc.claim"
"""`.<executor>`."""
HEARTBEAT = "pagewire.svc.heartbeat"
"""`.<service>.<instance>`."""

PREFIXES = "pagewire.svc.prefixes"
"""`.<model>.<scheduler>`: which prefixes a replica has cached."""

WORK = "pagewire.work"
"""`.<model>.<class>.<target>`: the work queues."""
DONE = "pagewire.done"
"""`.<request id>`, two minutes."""
TERM = "pagewire.term"
"""Its stream's sequence is the next term."""

SERVICE_INBOX = "_SVC"
"""Prefix of the inboxes in which services answer each other; clients may not read them."""

CLASSES = ("urgent", "normal", "background")
"""Classes of work: a priority below 0, of 0, and above."""
ANY = "any"
"""Target of work that no replica is to have before another; otherwise the target is a scheduler's instance id."""

INBOX_LENGTH = 255
"""Characters of a client's inbox, at most: a line of the protocol has room for two, and for a subject of ours."""
_CLIENT_INBOX = re.compile(r"_INBOX(\.[A-Za-z0-9_-]+)+")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def model_token(name: str) -> str:
    """The served name as a subject token: whatever is not [A-Za-z0-9_-] becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def work_queue(model: str, priority: int, target: str) -> str:
    """The queue of a request, as it follows `WORK` in subjects. `model` is a token, `target` `ANY` or a scheduler."""
    rank = (priority > 0) - (priority < 0)
    return f"{model}.{CLASSES[1 + rank]}.{target}"


def work_queues(model: str, target: str) -> list[str]:
    """The queues of one target, the most urgent first."""
    return [f"{model}.{name}.{target}" for name in CLASSES]


def is_client_inbox(reply: str) -> bool:
    """Whether a reply subject is an inbox. Anything else is never answered: it could be a subject of ours."""
    return len(reply) <= INBOX_LENGTH and _CLIENT_INBOX.fullmatch(reply) is not None


def is_token(text: str) -> bool:
    """Whether `text` can be one token of a subject, as request ids must."""
    return _TOKEN.fullmatch(text) is not None


def new_instance() -> str:
    """A random id for a service process."""
    return secrets.token_hex(6)
