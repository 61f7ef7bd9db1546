"""The real services on a real broker, in one process and on one loop."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partialmethod
from unittest.mock import patch

import msgspec

from pagewire import AsyncClient
from pagewire.embedded.broker import Broker
from pagewire.embedded.cluster import Cluster
from pagewire.services.detokenizer import fence
from pagewire.services.detokenizer.service import Detokenizer
from pagewire.services.executor.service import Executor
from pagewire.services.scheduler.service import Scheduler
from pagewire.services.tokenizer.service import Tokenizer
from pagewire.shared import subjects
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process.context import Context, Service
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.runtime import run_service
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings.config import Settings
from tests.support.broker import connect_role, connect_service
from tests.support.waiting import PATIENCE

SERVICES: dict[str, Callable[[Context], Service]] = {
    "tokenizer": Tokenizer,
    "scheduler": Scheduler,
    "executor": Executor,
    "detokenizer": Detokenizer,
}

CLIENT_KEY = "client-key"

FLUSH_TIMEOUT = 20.0
"""Seconds for the broker to confirm a subscription: meanwhile a model may be loaded on the same cores."""
HELD = ("requests", "running", "waiting", "blocks_held")
"""Figures of a scheduler's heartbeat that are zero when it is idle."""


@dataclass(frozen=True)
class Pipeline:
    """A running stack."""

    client: AsyncClient
    bus: NatsBus
    """With all rights."""
    url: str
    peers: Peers
    brokers: list[Broker]
    """The NATS servers."""
    buses: dict[str, NatsBus]
    """The connection of each service."""

    def load(self, service: str) -> dict[str, float]:
        """Returns the load in the last heartbeat of the only instance of a service."""
        return self.beat(service).load

    def beat(self, service: str) -> Heartbeat:
        """Returns the last heartbeat of the only instance of a service."""
        (beat,) = self.peers.alive(service)
        return beat

    async def until_idle(self) -> None:
        """Returns once the scheduler holds nothing: no request, no slot, no block. All loads are fresh then."""
        async with asyncio.timeout(PATIENCE):
            await self._next_heartbeat("scheduler")  # the last one may be of before the work
            while any(self.load("scheduler").get(name, 1) for name in HELD):
                await self._next_heartbeat("scheduler")
            await self._next_heartbeat("executor")

    async def _next_heartbeat(self, service: str) -> None:
        received = asyncio.Event()
        subscription = await self.bus.subscribe(f"{subjects.HEARTBEAT}.{service}.*", lambda _: received.set())
        await received.wait()
        await subscription.unsubscribe()

    async def until_ready(self) -> None:
        """Returns once every service says that it is ready."""
        async with asyncio.timeout(PATIENCE):
            while not all(any(beat.ready for beat in self.peers.alive(name)) for name in SERVICES):
                await self._next_heartbeat("*")


@asynccontextmanager
async def running(settings: Settings, api_keys: ApiKeys | None = None) -> AsyncIterator[Pipeline]:
    """Starts a broker, or the cluster that the settings ask for, and the four services, and ends them.

    With tenants, the client is the one with `CLIENT_KEY`.
    """
    api_key = CLIENT_KEY if api_keys is not None else ""
    # All services share a loop: where one stands still, all do, and the answers of the broker wait.
    patient = partialmethod(NatsBus.flush, timeout=FLUSH_TIMEOUT)
    with patch.object(fence, "LIMIT", math.inf), patch.object(NatsBus, "flush", patient):
        async with _running(settings, api_keys, api_key) as pipeline:
            yield pipeline


@asynccontextmanager
async def _running(settings: Settings, api_keys: ApiKeys | None, api_key: str) -> AsyncIterator[Pipeline]:
    async with Cluster(msgspec.structs.replace(settings, nats_port=0, api_key=api_key), api_keys) as cluster:
        buses: dict[str, NatsBus] = {}
        tasks: list[asyncio.Task[None]] = []
        observer = await connect_service(cluster)
        peers = Peers(observer)
        await peers.listen()
        try:
            # A service that starts holds the loop, at times for longer than it may take to connect to the broker.
            for name in SERVICES:
                buses[name] = await connect_role(cluster, name)
            async with AsyncClient(cluster.url, api_key=api_key) as client:
                for name, cls in SERVICES.items():
                    service = run_service(name, cls, settings, buses[name], subjects.new_instance())
                    tasks.append(asyncio.create_task(service))
                pipeline = Pipeline(client, observer, cluster.url, peers, cluster.brokers, buses)
                ready = asyncio.create_task(pipeline.until_ready())
                await asyncio.wait({ready, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                await ready
                yield pipeline
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for bus in (*buses.values(), observer):
                await bus.close()
            assert not any(bus.denials for bus in buses.values()), "a service needs a right that it does not have"
