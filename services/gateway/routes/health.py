"""Reports whether requests can be served now."""

from collections.abc import Callable

from pagewire.shared.bus import Bus
from pagewire.shared.metrics.table import SERVICES
from pagewire.shared.process.peers import Peers

REQUIRED = ("tokenizer", "detokenizer", "scheduler")
"""The services that every request passes. The executor is left out: a scheduler is ready only with one."""


class Health:
    """Follows the services' heartbeats and reports whether requests can be served."""

    def __init__(self, bus: Bus, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a heartbeat changes whether requests can be served."""
        self._bus = bus
        self._peers = Peers(bus)
        self._on_change = on_change
        self._healthy = False
        self.draining = ""
        """Why this gateway takes no more requests; empty: it takes some."""

    async def listen(self) -> None:
        """Subscribes to heartbeats."""
        await self._peers.listen(on_change=self._on_heartbeat)

    def missing(self) -> str:
        """Returns why requests cannot be served now; empty when they can."""
        if self.draining:
            return self.draining
        if not self._bus.connected:
            return "there is no connection to the broker"
        for service in REQUIRED:
            alive = self._peers.alive(service)
            if not alive:
                return f"no {service} is running"
            if all(beat.problem for beat in alive):
                return alive[0].problem
            if not any(beat.ready for beat in alive):
                return f"no {service} is ready"
        return ""

    @property
    def instances(self) -> int:
        """Instances of all services that are alive."""
        return sum(len(self._peers.alive(service)) for service in SERVICES)

    def has_successor(self, instance: str, port: float) -> bool:
        """Returns whether a gateway other than `instance` is ready at the same port."""
        gateways = self._peers.alive("gateway")
        return any(beat.ready and beat.instance != instance and beat.load.get("port") == port for beat in gateways)

    def _on_heartbeat(self) -> None:
        healthy = not self.missing()
        if healthy != self._healthy:
            self._healthy = healthy
            self._on_change()
