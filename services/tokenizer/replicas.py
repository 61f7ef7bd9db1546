"""The replicas that serve a model, as their heartbeats and summaries tell, and which of them a request is for."""

import time
from collections import Counter

import msgspec

from pagewire.services.tokenizer.retry import retry_after_ms
from pagewire.services.tokenizer.routing import Replica, route
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import WireVersionError
from pagewire.shared.messages import Decoder, unpack
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.peers import SILENCE
from pagewire.shared.prefix_hashes import prefix_hashes

_heartbeat = Decoder(Heartbeat)
_prefixes = Decoder(CachedPrefixes)


class Replicas:
    """What this tokenizer knows of the schedulers. It may be half a second old: only a hint of where to go."""

    def __init__(self, bus: Bus, model: str) -> None:
        """`model` is the model's token in subjects."""
        self._bus = bus
        self._model = model
        self._beats: dict[str, tuple[float, Heartbeat]] = {}
        self._cached: dict[str, tuple[int, frozenset[int]]] = {}
        self._sent: Counter[str] = Counter()
        """Sequences addressed to a replica since its last heartbeat."""

    async def listen(self) -> None:
        """Starts to hear."""
        await self._bus.subscribe(f"{subjects.HEARTBEAT}.scheduler.*", self._on_heartbeat)
        await self._bus.subscribe(f"{subjects.PREFIXES}.{self._model}.*", self._on_prefixes)

    def choose(self, work: WorkItem) -> str:
        """The target of a request, which counts as sent there."""
        replicas = self._alive()
        hashes = prefix_hashes(work.prompts[0], work.cache_salt) if len(replicas) > 1 else []
        target = route(work.request_id, hashes, replicas)
        if target != subjects.ANY:
            self._sent[target] += len(work.prompts) * max(work.n, work.sampling.beam_width)
        return target

    def retry_after_ms(self) -> int:
        """When a client that is refused should come back."""
        return retry_after_ms(beat for _, beat in self._beats.values())

    def _alive(self) -> list[Replica]:
        """Those that could run a request of this model now."""
        now = time.monotonic()
        for name in [name for name, (heard, _) in self._beats.items() if now - heard >= SILENCE]:
            del self._beats[name], self._sent[name]
            self._cached.pop(name, None)
        found = []
        for name, (_, beat) in self._beats.items():
            if beat.ready and name in self._cached:
                slots, cached = self._cached[name]
                load = beat.load.get("running", 0) + beat.load.get("waiting", 0)
                found.append(Replica(name, slots, int(load) + self._sent[name], cached))
        return found

    def _on_heartbeat(self, message: Message) -> None:
        try:
            beat = _heartbeat.decode(message.data)
        except (WireVersionError, msgspec.DecodeError):
            return  # a peer that cannot be understood is not there
        self._beats[beat.instance] = (time.monotonic(), beat)
        del self._sent[beat.instance]

    def _on_prefixes(self, message: Message) -> None:
        try:
            told = _prefixes.decode(message.data)
        except (WireVersionError, msgspec.DecodeError):
            return  # the same
        self._cached[told.scheduler] = (told.slots, frozenset(unpack(told.hashes)))
