"""Reports whether requests can be served now, by model."""

from collections.abc import Callable, Collection

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Subscription
from pagewire.shared.errors import ModelNotFound
from pagewire.shared.messages.heartbeat import UNLOADED, Heartbeat
from pagewire.shared.metrics.table import SERVICES
from pagewire.shared.process.peers import Peers

REQUIRED = ("tokenizer", "detokenizer", "scheduler")
"""The services that every request passes. The executor is left out: a scheduler is ready only with one, and the next
request loads an unloaded model."""


class Health:
    """Follows the services' heartbeats and reports whether requests can be served.

    Requests can be served while those for one model can. At the start all models that are `awaited` must be ready.
    """

    def __init__(self, bus: Bus, on_change: Callable[[], None], awaited: Collection[str] = ()) -> None:
        """Starts nothing yet.

        Args:
            bus: the connection.
            on_change: called when a heartbeat changes whether requests can be served.
            awaited: tokens of the models that must have been ready once.
        """
        self._bus = bus
        self._peers = Peers(bus)
        self._on_change = on_change
        self._healthy = False
        self._awaited = set(awaited)
        self._tokens: dict[str, str] = {}
        """Token of each model that was served since the start, by the token of each of its names."""
        self.draining = ""
        """Why this gateway takes no more requests; empty: it takes some."""

    async def listen(self) -> None:
        """Subscribes to heartbeats."""
        await self._peers.listen(on_change=self._on_heartbeat)

    async def follow_ended(self, on_ended: Callable[[str, str], None]) -> Subscription:
        """Has `on_ended` called with the service and the instance of each process that has ended."""
        return await self._peers.listen(on_ended=on_ended)

    def missing(self) -> str:
        """Returns why requests cannot be served now; empty when they can, of at least one model."""
        if reason := self._out_of_order():
            return reason
        reasons = self.reasons()
        self._awaited -= {model for model, reason in reasons.items() if not reason}
        lacking = {model: reason for model, reason in reasons.items() if reason}
        if len(lacking) < len(reasons) and not self._awaited:
            return ""
        if len(reasons) < 2:
            return next(iter(lacking.values()), "") or self._missing_of("")
        return "; ".join(f"{model}: {reason}" for model, reason in lacking.items())

    def missing_of(self, name: str) -> str:
        """Returns why requests for the model of a name cannot be served now; empty when they can.

        Raises:
            ModelNotFound: no such model was served since the start.
        """
        model = self._tokens.get(subjects.model_token(name))
        if model is None:
            raise ModelNotFound(f"no model {name} is served: GET /v1/models lists the served models")
        return self._out_of_order() or self._missing_of(model)

    def reasons(self) -> dict[str, str]:
        """Returns why requests for each model cannot be served, empty where they can, by the model's token."""
        return {model: self._missing_of(model) for model in sorted({*self._tokens.values(), *self._awaited})}

    def alive(self) -> list[Heartbeat]:
        """Returns the last heartbeats of all live instances, ordered by service and instance id. No executor is alive
        for which its supervisor sends heartbeats."""
        beats = [beat for service in SERVICES for beat in self._peers.alive(service)]
        return [beat for beat in beats if not (beat.service == "executor" and beat.load.get(UNLOADED))]

    def has_successor(self, instance: str, port: float) -> bool:
        """Returns whether a gateway other than `instance` is ready at the same port."""
        gateways = self._peers.alive("gateway")
        return any(beat.ready and beat.instance != instance and beat.load.get("port") == port for beat in gateways)

    def _out_of_order(self) -> str:
        """Returns why no model can be served here; empty when the services decide that."""
        return self.draining or ("" if self._bus.connected else "there is no connection to the broker")

    def _missing_of(self, model: str) -> str:
        """Returns the service that a model lacks; of no model in particular, if its token is empty."""
        for service in REQUIRED:
            alive = [beat for beat in self._peers.alive(service) if not model or beat.model in (model, "")]
            if not alive:
                return f"no {service} is running"
            if all(beat.problem for beat in alive):
                return alive[0].problem
            if not any(beat.ready or beat.load.get(UNLOADED) for beat in alive):
                return f"no {service} is ready"
        return ""

    def _on_heartbeat(self) -> None:
        for beat in self._peers.alive("tokenizer"):
            self._tokens |= {subjects.model_token(info.name): beat.model for info in beat.models}
        healthy = not self.missing()
        if healthy != self._healthy:
            self._healthy = healthy
            self._on_change()
