"""The AsyncAPI document of the subjects: what may be sent there, by whom, and what answers.

Messages come from the structs of `shared/messages`, senders and receivers from `shared/security/permissions.py`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus.streams import CHECK_DONE, CHECK_WORK
from pagewire.shared.messages import client, tokenize
from pagewire.shared.messages.abort import AbortedSequences, AbortSequences
from pagewire.shared.messages.adapters import AdapterRecord, AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.messages.adopted import Adopted
from pagewire.shared.messages.attach import Attach, Attached
from pagewire.shared.messages.backlog import Backlog
from pagewire.shared.messages.codec import Wire
from pagewire.shared.messages.done import Done
from pagewire.shared.messages.fault import Fault
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.messages.open import AbortStream, Opened, OpenStream, StoredWork
from pagewire.shared.messages.plan import Claim, Claimed, Plan, Replay
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.recent_requests import RecentRequests
from pagewire.shared.messages.recent_steps import RecentSteps
from pagewire.shared.messages.step import StepOutput
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.security import permissions
from pagewire.shared.wire_version import WIRE_VERSION

Kind = type[msgspec.Struct]

FRAMES: tuple[Kind, ...] = (
    client.Accepted,
    client.Queued,
    client.Delta,
    client.DeltaBatch,
    client.Final,
    client.Result,
    client.ErrorFrame,
)


@dataclass(frozen=True)
class Channel:
    """A subject.

    Attributes:
        address: the subject; what stands in braces differs.
        text: what it is for.
        messages: what is sent there; none: an empty message.
        replies: what answers it, at the reply subject; none: nothing does.
    """

    address: str
    text: str
    messages: Sequence[Kind] = ()
    replies: Sequence[Kind] = ()

    @property
    def pattern(self) -> "re.Pattern[str]":
        """Matches the subjects of the channel."""
        return re.compile(re.sub(r"\\\{\w+\\\}", "[A-Za-z0-9_~-]+", re.escape(self.address)))

    @property
    def example(self) -> str:
        """A subject of the channel."""
        return re.sub(r"\{\w+\}", "x", self.address)

    def kinds(self) -> Iterator[Kind]:
        """Yields all messages."""
        yield from self.messages
        yield from self.replies


CHANNELS = {
    "generate": Channel(
        f"{subjects.GENERATE}.{{model}}", "Generates; the replies are the stream.", [client.GenerateRequest], FRAMES
    ),
    "tokenize": Channel(
        f"{subjects.TOKENIZE}.{{model}}",
        "Turns a text or a conversation into tokens.",
        [tokenize.TokenizeRequest],
        [tokenize.TokenizeReply, client.ErrorFrame],
    ),
    "detokenize": Channel(
        f"{subjects.DETOKENIZE}.{{model}}",
        "Turns tokens into a text.",
        [tokenize.DetokenizeRequest],
        [tokenize.DetokenizeReply, client.ErrorFrame],
    ),
    "models": Channel(subjects.MODELS, "Lists the models that are served.", [], [client.ModelList]),
    "loadAdapter": Channel(
        f"{subjects.ADAPTERS}.load.{{model}}",
        "Whoever operates the stack loads an adapter.",
        [LoadAdapterRequest],
        [AdapterReply, client.ErrorFrame],
    ),
    "unloadAdapter": Channel(
        f"{subjects.ADAPTERS}.unload.{{model}}",
        "Whoever operates the stack removes an adapter.",
        [UnloadAdapterRequest],
        [AdapterReply, client.ErrorFrame],
    ),
    "cancel": Channel(
        f"{subjects.CANCEL}.{{instance}}.{{request}}.{{secret}}", "Cancels a request.", [], [client.CancelReply]
    ),
    "cancelById": Channel(
        f"{subjects.CANCEL}.{{request}}", "Cancels a request of which only the id is known.", [], [client.CancelReply]
    ),
    "resume": Channel(
        f"{subjects.RESUME}.{{instance}}.{{request}}.{{secret}}",
        "Repeats the frames of a stream from a position on.",
        [client.ResumeRequest],
        FRAMES,
    ),
    "open": Channel(f"{subjects.DETOKENIZER}.{{instance}}.open", "Opens a stream.", [OpenStream], [Opened]),
    "stored": Channel(
        f"{subjects.DETOKENIZER}.{{instance}}.stored",
        "The work of a stream is stored; an empty message answers.",
        [StoredWork],
    ),
    "attach": Channel(
        f"{subjects.DETOKENIZER}.{{instance}}.attach", "Tells which sequences a stream has.", [Attach], [Attached]
    ),
    "abortStream": Channel(
        f"{subjects.DETOKENIZER}.{{instance}}.abort",
        "Ends a stream with an error; an empty message answers.",
        [AbortStream],
    ),
    "ping": Channel(
        f"{subjects.DETOKENIZER}.{{instance}}.ping",
        "Asks whether a detokenizer is reachable; an empty message answers.",
    ),
    "adopted": Channel(f"{subjects.ADOPTED}.{{instance}}", "Streams have another detokenizer.", [Adopted]),
    "abortSequences": Channel(
        f"{subjects.ABORT}.{{instance}}.abort",
        "Ends sequences whose text has ended or whose client is gone.",
        [AbortSequences],
        [AbortedSequences],
    ),
    "plan": Channel(f"{subjects.PLAN}.{{executor}}", "What changes, and how far the executor may run.", [Plan]),
    "steps": Channel(f"{subjects.STEPS}.{{executor}}", "What a step has sampled.", [StepOutput]),
    "replay": Channel(f"{subjects.REPLAY}.{{executor}}", "Asks for steps again.", [Replay], [StepOutput]),
    "claim": Channel(f"{subjects.CLAIM}.{{executor}}", "Takes an executor, with a new term.", [Claim], [Claimed]),
    "work": Channel(
        f"{subjects.WORK}.{{model}}.{WIRE_VERSION}.{{class}}.{{target}}",
        "The work queues, which schedulers read through JetStream.",
        [WorkItem],
    ),
    "done": Channel(
        f"{subjects.DONE}.{{request}}",
        "How a request has ended, kept for two minutes and read through JetStream.",
        [Done],
    ),
    "term": Channel(subjects.TERM, "The sequence number of a message in its stream is the next term."),
    "adapterName": Channel(
        f"{subjects.ADAPTER_NAME}.{{model}}.{{adapter}}",
        "The content that an adapter's name stands for, kept by the broker.",
        [AdapterRecord],
    ),
    "adapterContent": Channel(
        f"{subjects.ADAPTER_CONTENT}.{{hash}}.{{part}}",
        "A part of the content of an adapter, kept by the broker and read through JetStream.",
    ),
    "adapterRetired": Channel(
        f"{subjects.ADAPTER_RETIRED}.{{hash}}", "Content has lost a name; its age decides when it is deleted."
    ),
    "backlog": Channel(f"{subjects.BACKLOG}.{{model}}.{{scheduler}}", "What waits, and how fast it starts.", [Backlog]),
    "prefixes": Channel(
        f"{subjects.PREFIXES}.{{model}}.{{scheduler}}", "The prefixes that a replica has cached.", [CachedPrefixes]
    ),
    "traces": Channel(
        subjects.TRACES, "Every service exports what it holds of a trace, whose id is the message, as 32 hex digits."
    ),
    "heartbeat": Channel(
        f"{subjects.HEARTBEAT}.{{service}}.{{instance}}", "The state of a service; empty: it has ended.", [Heartbeat]
    ),
    "announce": Channel(subjects.ANNOUNCE, "Asks every service for a heartbeat at once."),
    "metrics": Channel(subjects.METRICS, "Asks every service for its metrics.", [], [MetricsReport]),
    "recentRequests": Channel(
        subjects.RECENT_REQUESTS, "Asks every detokenizer for its latest requests.", [], [RecentRequests]
    ),
    "recentSteps": Channel(subjects.RECENT_STEPS, "Asks every executor for its latest steps.", [], [RecentSteps]),
    "faults": Channel(subjects.FAULTS, "A fault that somebody has asked for in a demonstration.", [Fault]),
    "checkWork": Channel(CHECK_WORK, "Zeros that show whether the store takes work."),
    "checkDone": Channel(CHECK_DONE, "Zeros that show whether the store takes records."),
}
"""Every subject of Pagewire. A tenant's requests go to `pagewire.v1.tenant.<name>.` instead of `pagewire.v1.`."""


def document() -> dict[str, Any]:
    """Returns the document."""
    kinds = list(dict.fromkeys(kind for channel in CHANNELS.values() for kind in channel.kinds()))
    refs, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    messages = {
        kind.__name__: {
            "contentType": f"application/x-pagewire-{WIRE_VERSION}" if issubclass(kind, Wire) else "application/json",
            "payload": ref,
        }
        for kind, ref in zip(kinds, refs, strict=True)
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Pagewire",
            "version": version("pagewire"),
            "description": "Requests of clients may be MessagePack too, with the header Content-Type. Messages between "
            "services are one byte with the wire version, then MessagePack; bytes there are not base64.",
        },
        "defaultContentType": "application/json",
        "channels": dict(_channels()),
        "operations": dict(_operations()),
        "components": {"messages": messages, "schemas": schemas},
    }


def users(channel: Channel) -> tuple[list[str], list[str]]:
    """Returns who may publish and who may subscribe to the subjects of a channel."""
    subject = channel.example
    roles = {permissions.CLIENT: permissions.of_tenant(""), **permissions.ROLES}
    return (
        [role for role, rights in roles.items() if _allows(rights.publish, subject, role)],
        [role for role, rights in roles.items() if _allows(rights.subscribe, subject, role)],
    )


def _channels() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, channel in CHANNELS.items():
        parameters = re.findall(r"\{(\w+)\}", channel.address)
        yield (
            name,
            {
                "address": channel.address,
                "description": channel.text,
                **({"parameters": {parameter: {} for parameter in parameters}} if parameters else {}),
                "messages": {kind.__name__: _message(kind) for kind in channel.messages},
            },
        )
        if channel.replies:
            yield (
                f"{name}Reply",
                {"address": None, "messages": {kind.__name__: _message(kind) for kind in channel.replies}},
            )


def _operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, channel in CHANNELS.items():
        place = {"$ref": f"#/channels/{name}"}
        reply = {"reply": {"channel": {"$ref": f"#/channels/{name}Reply"}}} if channel.replies else {}
        for action, roles in zip(("send", "receive"), users(channel), strict=True):
            for role in roles:
                yield f"{role}_{action}_{name}", {"action": action, "channel": place, **reply}


def _message(kind: Kind) -> dict[str, str]:
    return {"$ref": f"#/components/messages/{kind.__name__}"}


def _allows(patterns: Sequence[str], subject: str, role: str) -> bool:
    """Returns whether one of the patterns of a user covers a subject; heartbeats name their service."""
    own = subject.replace(f"{subjects.HEARTBEAT}.x", f"{subjects.HEARTBEAT}.{role}")
    return any(covers(pattern, candidate) for pattern in patterns for candidate in (subject, own))


def covers(pattern: str, subject: str) -> bool:
    """Returns whether a pattern of NATS matches a subject."""
    regex = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(regex, subject) is not None
