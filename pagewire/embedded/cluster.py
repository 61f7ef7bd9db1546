"""The embedded brokers: one server, or several that form a cluster and keep copies of their streams."""

import asyncio
import secrets
import socket
from contextlib import ExitStack
from typing import Self

import structlog

from pagewire.embedded.broker import HOST, Broker, RoutePortTaken
from pagewire.embedded.broker_config import Membership
from pagewire.shared.bus import Bus
from pagewire.shared.bus.jetstream import NO_JETSTREAM
from pagewire.shared.errors import BusError, ConfigurationError, NoResponders
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings.config import Settings, store_replicas, without_logins

MAX_PORT = 65535
START_ATTEMPTS = 3
"""Attempts to start the servers, each with other ports for each other."""
ANSWER_TIMEOUT = 1.0
"""Seconds within which JetStream must answer."""

_log = structlog.get_logger()


class Cluster:
    """The servers that the settings ask for, used as an async context manager or by `start` and `stop`.

    Attributes:
        brokers: the servers.
    """

    def __init__(self, settings: Settings, api_keys: ApiKeys | None = None) -> None:
        """Does not start anything yet. The first server takes the port `nats_port`, the others take the next ones.

        Args:
            settings: the number, ports, replicas and sizes of the servers.
            api_keys: the tenants.
        """
        count = settings.nats_cluster
        members = memberships(count) if count > 1 else [None]
        self.brokers = [
            Broker(
                port=settings.nats_port + i if settings.nats_port else settings.nats_port,
                api_key=settings.api_key,
                api_keys=api_keys,
                max_store=settings.nats_max_store + settings.adapter_store * settings.enable_lora,
                membership=member,
            )
            for i, member in enumerate(members)
        ]
        for broker in self.brokers:
            broker.password, broker.passwords = self.password, self.passwords

    @property
    def url(self) -> str:
        """The URLs of the servers, separated by commas."""
        return ",".join(broker.url for broker in self.brokers)

    @property
    def passwords(self) -> dict[str, str]:
        """Password of each service's user, by the service's name, at every server."""
        return self.brokers[0].passwords

    @property
    def user(self) -> str:
        """The user of the operator, who has all rights."""
        return self.brokers[0].user

    @property
    def password(self) -> str:
        """The password of the operator."""
        return self.brokers[0].password

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts all servers; raises what `Broker.start` raises.

        Between the choice of the ports for each other and the start of the servers, another process may take one of
        them: then they all start again, with other ports.
        """
        for remaining in reversed(range(START_ATTEMPTS)):
            results = await asyncio.gather(*(broker.start() for broker in self.brokers), return_exceptions=True)
            failures = [failure for failure in results if failure is not None]
            if not failures:
                return
            await self.stop()
            others = [failure for failure in failures if not isinstance(failure, RoutePortTaken)]
            if others or not remaining:
                raise (others or failures)[0]
            for broker, member in zip(self.brokers, memberships(len(self.brokers)), strict=True):
                broker.membership = member

    def reload(self) -> None:
        """Has all servers read the tenants' keys again."""
        for broker in self.brokers:
            broker.reload()

    def kill(self) -> None:
        """Ends all servers at once, without waiting for them."""
        for broker in self.brokers:
            broker.kill()

    async def stop(self) -> None:
        """Ends all servers. May be called twice."""
        await asyncio.gather(*(broker.stop() for broker in self.brokers))


def check_servers(settings: Settings) -> str:
    """Returns a sentence about the NATS servers that the settings name or start.

    Raises:
        ConfigurationError: the settings contradict each other.
    """
    servers, replicas = settings.nats_cluster, store_replicas(settings)
    if settings.nats_url:
        if servers > 1:
            raise ConfigurationError(
                f"nats-cluster {servers} starts servers, and nats-url names servers that run: set one of them"
            )
        return f"{without_logins(settings.nats_url)}; copies of what is stored: {replicas}"
    if replicas > servers:
        raise ConfigurationError(
            f"nats-replicas {replicas} needs {replicas} servers: set nats-cluster to {replicas}, or give the URLs of a "
            "cluster in nats-url"
        )
    if (settings.nats_port or 0) + servers - 1 > MAX_PORT:
        raise ConfigurationError(
            f"nats-cluster {servers} needs the {servers} ports from nats-port on: set nats-port to at most "
            f"{MAX_PORT - servers + 1}"
        )
    return f"{servers} embedded; copies of what is stored: {replicas}"


def memberships(count: int) -> list[Membership]:
    """Returns the memberships of a new cluster on this machine, on ports that are free now."""
    password = secrets.token_urlsafe(24)
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        ports = [int(probe.getsockname()[1]) for probe in probes]
    return [
        Membership(f"pagewire-{i}", port, tuple(other for other in ports if other != port), password)
        for i, port in enumerate(ports)
    ]


async def require_jetstream(bus: Bus) -> None:
    """Raises ConfigurationError if the broker has no JetStream. Services would wait for it."""
    try:
        await bus.request("$JS.API.INFO", b"", timeout=ANSWER_TIMEOUT)
    except NoResponders:
        raise ConfigurationError(NO_JETSTREAM) from None
    except BusError as error:
        _log.warning("jetstream_unknown", reason=str(error))
