"""Service discovery by NATS ADR-32: `nats service ls`, `info` and `stats` find every Pagewire service."""

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import NoResponders, RequestTimeout
from pagewire.shared.messages import WIRE_VERSION
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.models import model_folder
from pagewire.shared.settings.config import Settings

STALL_TIMEOUT = 0.5
"""Seconds without a further reply after which all instances are assumed to have replied."""

_ENDPOINTS: dict[str, dict[str, str]] = {
    "tokenizer": {
        "generate": subjects.GENERATE + ".*",
        "tokenize": subjects.TOKENIZE + ".*",
        "models": subjects.MODELS,
    },
    "detokenizer": {
        "detokenize": subjects.DETOKENIZE + ".*",
        "cancel": subjects.CANCEL + ".*",
        "resume": subjects.RESUME + ".*",
    },
}
"""The subjects that clients may send requests to, by service. The other services have none."""


class Responder:
    """Answers `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS` for one instance: for all services, by name, and by id."""

    def __init__(
        self, bus: Bus, name: str, instance: str, settings: Settings, heartbeat: Callable[[], Heartbeat]
    ) -> None:
        self._bus = bus
        self._heartbeat = heartbeat
        self._started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._askers = tuple(f"{subjects.service_inbox(service)}." for service in (name, "supervisor"))
        """Prefixes of the inboxes that get answers beside clients: the probe of the container, and the supervisor."""
        self._endpoints = [
            {"name": endpoint, "subject": subject, "queue_group": name}
            for endpoint, subject in _ENDPOINTS.get(name, {}).items()
        ]
        self._identity: dict[str, Any] = {
            "name": f"pagewire-{name}",
            "id": instance,
            "version": version("pagewire"),
            "metadata": {
                "model": "" if name == "gateway" else model_folder.served_name(settings),
                "wire_version": str(WIRE_VERSION),
                "host": socket.gethostname(),
            },
        }

    async def listen(self) -> None:
        """Subscribes to the discovery subjects."""
        answers: dict[str, Callable[[], dict[str, Any]]] = {"PING": dict, "INFO": self._info, "STATS": self._stats}
        name, instance = self._identity["name"], self._identity["id"]
        for verb, answer in answers.items():
            for suffix in ("", f".{name}", f".{name}.{instance}"):
                await self._bus.subscribe(f"$SRV.{verb}{suffix}", self._replier(verb, answer))

    def _replier(self, verb: str, answer: Callable[[], dict[str, Any]]) -> Callable[[Message], None]:
        kind = f"io.nats.micro.v1.{verb.lower()}_response"

        def reply(message: Message) -> None:
            if subjects.is_client_inbox(message.reply) or message.reply.startswith(self._askers):
                body = {"type": kind, **self._identity, **answer()}
                self._bus.publish(message.reply, msgspec.json.encode(body))

        return reply

    def _info(self) -> dict[str, Any]:
        endpoints = [{**endpoint, "metadata": {}} for endpoint in self._endpoints]
        return {"description": "Part of Pagewire, a server of language models", "endpoints": endpoints}

    def _stats(self) -> dict[str, Any]:
        """Returns counts per service in the metadata. The counts per endpoint, which ADR-32 demands, are zero."""
        beat = self._heartbeat()
        load = {f"load.{name}": f"{value:.10g}" for name, value in beat.load.items()}
        states = {
            "ready": str(beat.ready).lower(),
            "draining": str(beat.draining).lower(),
            "problem": beat.problem,
        }
        counts = {
            "num_requests": 0,
            "num_errors": 0,
            "last_error": "",
            "processing_time": 0,
            "average_processing_time": 0,
        }
        return {
            "metadata": {**self._identity["metadata"], **states, **load},
            "started": self._started,
            "endpoints": [{**endpoint, **counts} for endpoint in self._endpoints],
        }


class Stats(msgspec.Struct):
    """The fields that Pagewire reads of an instance's reply to `$SRV.STATS`."""

    name: str
    id: str
    started: str
    metadata: dict[str, str]


def load_of(stats: bytes, name: str, *, draining: bool) -> float:
    """Returns the figure `name` of the load in a reply to `$SRV.STATS`.

    With `draining`, the figure is 1 until the service drains.
    """
    metadata = msgspec.json.decode(stats, type=Stats).metadata
    if draining and metadata.get("draining") != "true":
        return 1.0
    return float(metadata.get(f"load.{name}", 0.0))


async def ask(bus: Bus, service: str | None = None) -> list[Stats]:
    """Returns the replies of all instances, or of the instances of one service, ordered by name and id.

    Services of other programs on the same broker, which answer, too, are left out.
    """
    subject = f"$SRV.STATS.pagewire-{service}" if service else "$SRV.STATS"
    replies: list[Stats] = []
    try:
        async for reply in bus.request_many(subject, b"", stall=STALL_TIMEOUT):
            with suppress(msgspec.DecodeError):  # of another program
                replies.append(msgspec.json.decode(reply.data, type=Stats))
    except (NoResponders, RequestTimeout):
        pass  # no instance is running, or all have replied
    own = (stats for stats in replies if stats.name.startswith("pagewire-"))
    return sorted(own, key=lambda stats: (stats.name, stats.id))
