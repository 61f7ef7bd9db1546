"""Replicas behind one queue, in virtual time: routing, look-ahead and policy are those of the services.

One tokenizer, which hears of each replica twice a second, addresses requests; replicas pull what is addressed to them,
and what is addressed to any, while they have room.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from pagewire.bench._common.loads import Request
from pagewire.services.scheduler import prefix_advertiser
from pagewire.services.scheduler.policy.recent_prefixes import RecentPrefixes
from pagewire.services.scheduler.policy.sequence import Sequence as Running
from pagewire.services.scheduler.policy.sequence import SequenceState
from pagewire.services.scheduler.request_manager import LOOKAHEAD
from pagewire.services.tokenizer.dispatch.replica_router import Replica, route
from pagewire.shared.messages import pack, unpack
from pagewire.shared.prefix_hashes import prefix_hashes
from pagewire.shared.subjects import ANY
from tools.experiments.simulated_devices.virtual_time.clock import Clock
from tools.experiments.simulated_devices.virtual_time.pipeline import VirtualPipeline


class Fleet:
    """Hands requests to pipelines that share a clock. `then` is called with every request that has ended."""

    def __init__(self, clock: Clock, pipelines: Sequence[VirtualPipeline], then: Callable[[Request], None]) -> None:
        self._computed: Counter[str] = Counter()
        self._clock = clock
        self._then = then
        self._any: deque[Request] = deque()
        self._members = {str(i): _Member(pipeline) for i, pipeline in enumerate(pipelines)}
        self._sent: Counter[str] = Counter()
        self._views: dict[str, Replica] = {}
        self._requests = 0
        self._open = True
        for i, (name, member) in enumerate(self._members.items()):
            member.pipeline.read = self._pull
            member.pipeline.then = partial(self._ended, name)
            clock.at(i * prefix_advertiser.CHECK_EVERY / len(pipelines), self._hear, name)

    def send(self, request: Request) -> None:
        """Routes a request as the tokenizer does."""
        self._requests += 1
        replicas = [
            Replica(name, view.slots, view.load + self._sent[name], view.cached) for name, view in self._views.items()
        ]
        target = route(str(self._requests), prefix_hashes(pack(request.prompt)), replicas)
        if target == ANY:
            self._any.append(request)
        else:
            self._sent[target] += 1
            self._members[target].addressed.append(request)
        self._pull()

    @property
    def computed(self) -> list[int]:
        """Positions that each replica has computed for requests that have ended."""
        return [self._computed[name] for name in self._members]

    def forget(self) -> None:
        """Begins to count computed positions at 0."""
        self._computed.clear()

    def close(self) -> None:
        """Ends the heartbeats: no more requests will be sent."""
        self._open = False

    def _pull(self) -> None:
        for member in self._members.values():
            member.pull(member.addressed)
        while self._any:
            # The server answers the pulls of a queue in turn: whoever got something goes to the end.
            name = next((name for name, member in self._members.items() if member.room(self._any) > 0), None)
            if name is None:
                return
            member = self._members.pop(name)
            self._members[name] = member
            member.take(self._any)

    def _ended(self, name: str, request: Request) -> None:
        self._computed[name] += len(request.prompt) - request.cached + request.output
        self._members[name].cached.add(request.prompt + request.tokens)
        self._then(request)

    def _hear(self, name: str) -> None:
        """Takes in the heartbeat and the cached prefixes of a replica."""
        member = self._members[name]
        policy = member.pipeline.policy
        cached = frozenset(unpack(member.cached.packed()))
        self._views[name] = Replica(name, policy.limits.max_running, policy.num_unfinished, cached)
        del self._sent[name]
        if self._open:
            self._clock.at(self._clock.now + prefix_advertiser.CHECK_EVERY, self._hear, name)


class _Member:
    """One replica, and the requests that are addressed to it."""

    def __init__(self, pipeline: VirtualPipeline) -> None:
        self.pipeline = pipeline
        self.addressed: deque[Request] = deque()
        limits = pipeline.policy.limits
        self.cached = RecentPrefixes(limits.num_blocks * limits.block_size)
        self._waiting: dict[int, list[Running]] = {}

    def room(self, queue: deque[Request]) -> int:
        """Returns how many requests of a queue the replica can take now."""
        policy = self.pipeline.policy
        waiting = [running for running in self._waiting.get(id(queue), ()) if running.state is SequenceState.WAITING]
        self._waiting[id(queue)] = waiting
        return max(0, policy.limits.max_running - policy.num_unfinished) + LOOKAHEAD - len(waiting)

    def pull(self, queue: deque[Request]) -> None:
        """Takes requests of a queue while there is room."""
        while queue and self.room(queue) > 0:
            self.take(queue)

    def take(self, queue: deque[Request]) -> None:
        """Takes the first request of a queue."""
        request = queue.popleft()
        self.cached.add(request.prompt)
        self.pipeline.expect()
        self._waiting.setdefault(id(queue), []).append(self.pipeline.arrive(request))
