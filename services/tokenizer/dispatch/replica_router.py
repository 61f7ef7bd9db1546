"""Which replica of a model a request is sent to.

The replica that has most of the prompt's prefix cached gets the request, as in SGLang's router, unless it is busier
than the least busy replica by more than `SLACK`: then it is faster to compute the prefix again than to wait.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.messages import Decoder, unpack
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.prefixes import CachedPrefixes
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.prefix_hashes import prefix_hashes
from pagewire.shared.process.peers import Peers
from pagewire.shared.rendezvous import rank

SLACK = 0.25
"""Share of its slots by which a replica may be busier than the least busy one and still get what it has cached."""

_prefixes = Decoder(CachedPrefixes)


@dataclass(frozen=True, slots=True)
class Replica:
    """One scheduler and its executor, as far as a tokenizer knows."""

    instance: str
    """Instance id of the scheduler."""
    slots: int
    """Sequences that the replica runs at once."""
    load: int
    """Sequences that run there or wait for it."""
    cached: AbstractSet[int]
    """Hashes of prefixes that the replica has computed lately."""


def route(request_id: str, hashes: Sequence[int], replicas: Sequence[Replica]) -> str:
    """Returns the target of a request whose prompt has these `pagewire.shared.prefix_hashes`.

    The target is `ANY` with fewer than two replicas, and when every replica is full and none has the prefix: then the
    first replica with a free slot takes the request. Tokenizers and the simulation call this function.

    >>> route("r1", [11, 12], [Replica("a", 4, 0, {11, 12}), Replica("b", 4, 0, {11})])
    'a'
    >>> route("r1", [11, 12], [Replica("a", 4, 3, {11, 12}), Replica("b", 4, 0, {11})])
    'b'
    """
    if len(replicas) < 2:
        return subjects.ANY
    least = min(replica.load / replica.slots for replica in replicas)
    near = {r.instance: r for r in replicas if r.load / r.slots <= least + SLACK}
    # `max` keeps the first of equals; the order by request id keeps the tokenizers from all choosing the same replica.
    best = max(
        (near[instance] for instance in rank(request_id, near)),
        key=lambda replica: (matched(hashes, replica.cached), -replica.load / replica.slots),
    )
    full = best.load >= best.slots
    return subjects.ANY if full and not matched(hashes, best.cached) else best.instance


def matched(hashes: Sequence[int], cached: AbstractSet[int]) -> int:
    """Returns how many spans of the prompt are cached, counted from its beginning.

    >>> matched([11, 12, 13], {11, 12})
    2
    """
    return next((length for length in range(len(hashes), 0, -1) if hashes[length - 1] in cached), 0)


class ReplicaRouter:
    """Routes the requests for one model.

    Heartbeats and cached prefixes may be half a second old, so a target is only a hint: every replica gives the same
    text.
    """

    def __init__(self, bus: Bus, peers: Peers, model: str) -> None:
        """`model` is the model's token in subjects."""
        self._bus = bus
        self._model = model
        self._peers = peers
        self._cached: dict[str, tuple[int, frozenset[int]]] = {}
        """Slots and prefix hashes of each replica."""
        self._sent: dict[str, tuple[Heartbeat, int]] = {}
        """Last heartbeat of each replica, and the number of sequences that were sent there since."""

    async def listen(self) -> None:
        """Subscribes to the heartbeats and the cached prefixes of schedulers."""
        await self._peers.listen("scheduler")
        await self._bus.subscribe(f"{subjects.PREFIXES}.{self._model}.*", self._on_prefixes)

    def choose(self, work: WorkItem) -> str:
        """Returns the target of a request, and counts the request as sent there."""
        if len(self._cached) < 2:
            return subjects.ANY
        replicas = self._replicas()
        hashes = prefix_hashes(work.prompts[0], work.cache_salt) if len(replicas) > 1 else []
        target = route(work.request_id, hashes, replicas)
        if target != subjects.ANY:
            beat, sent = self._sent[target]
            self._sent[target] = beat, sent + len(work.prompts) * max(work.n, work.sampling.beam_width)
        return target

    def _replicas(self) -> list[Replica]:
        """Returns the replicas that could run a request of this model now."""
        alive = {beat.instance: beat for beat in self._peers.alive("scheduler")}
        self._sent = {instance: sent for instance, sent in self._sent.items() if instance in alive}
        self._cached = {instance: cached for instance, cached in self._cached.items() if instance in alive}
        replicas = []
        for instance, beat in alive.items():
            if beat.ready and instance in self._cached:
                slots, cached = self._cached[instance]
                last, sent = self._sent.get(instance, (beat, 0))
                sent = sent if last is beat else 0
                self._sent[instance] = beat, sent
                load = beat.load.get("running", 0) + beat.load.get("waiting", 0)
                replicas.append(Replica(instance, slots, int(load) + sent, cached))
        return replicas

    def _on_prefixes(self, message: Message) -> None:
        prefixes = _prefixes.try_decode(message.data)
        if prefixes is not None:
            self._cached[prefixes.scheduler] = (prefixes.slots, frozenset(unpack(prefixes.hashes)))
