"""The whole pipeline on this machine: every service as a process, and a broker unless the settings name one."""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import msgspec
import structlog

from pagewire.embedded.broker import Broker
from pagewire.embedded.cluster import Cluster, check_servers
from pagewire.embedded.model_choice import choose_model
from pagewire.embedded.supervisor import Program, RestartPolicy, Supervisor
from pagewire.embedded.watchdog import Watchdog
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.bus.jetstream import NO_JETSTREAM
from pagewire.shared.errors import BusError, BusUnavailable, ConfigurationError, NoResponders, Unavailable
from pagewire.shared.process import device_choice, discovery
from pagewire.shared.process.linux_process import BROKER_FOLDER, INSTANCE, LISTENER
from pagewire.shared.process.listener import bracketed, listen
from pagewire.shared.security import credentials
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings import config
from pagewire.shared.settings.config import Settings, store_replicas
from pagewire.shared.settings.environment import PREFIX

PIPELINE = ("executor", "scheduler", "detokenizer", "tokenizer")
"""The services that every request passes; the slowest to start comes first."""
REPLICATED = ("executor", "scheduler")
"""The services with one process per replica."""
GATEWAY = "gateway"
BROKER = "broker"
FRONT = (GATEWAY, "tokenizer")
"""The services that take requests from outside."""
DRAIN_ORDER = (
    {"tokenizer": "in_flight"},
    {"detokenizer": "streams", "scheduler": "requests"},
    {GATEWAY: "running"},
)
"""Figures of load that must be zero before the stack ends, by service, in the order in which the stack waits."""
DRAIN_INTERVAL = 0.05
"""Seconds between two requests for a figure of load."""
STATS_TIMEOUT = 1.0
"""Seconds within which a service must answer with its load."""
END_TIMEOUT = 15.0
"""Seconds after the drain within which a process that has a successor must end."""
SUPERVISOR = "supervisor"
START_TIMEOUT = 300.0
"""Seconds within which all services must be ready; loading a large model takes long."""
ROOM_CHECK_INTERVAL = 0.5
"""Seconds between two checks whether a full disk has room again."""
BROKER_RETRY_DELAY = 0.2
"""Seconds between two attempts to restart the broker."""

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Address:
    """The URLs of a running stack."""

    nats: str
    """URL of the broker; several are separated by commas."""
    http: str
    """URL of the gateway; empty without one."""


class Stack:
    """`async with Stack(settings) as stack: address = await stack.ready()`. The stack ends with the block."""

    def __init__(
        self,
        settings: Settings,
        services: Sequence[str] = (*PIPELINE, GATEWAY),
        nats_urls: Mapping[str, str] | None = None,
    ) -> None:
        """`nats_urls`: URL by which a process reaches the broker, by process, where it is not the broker's own.

        Raises ConfigurationError for a setting that is not supported, by Pagewire or by this machine.
        """
        _refuse_unsupported(settings)
        settings = device_choice.resolve(settings)
        check_replicas(settings)
        check_servers(settings)
        self._settings = settings
        self._programs = {
            name: service for service in services for name in program_names(service, replicas_of(service, settings))
        }
        self._nats_urls = nats_urls or {}
        self._cluster: Cluster | None = None
        self._api_keys: ApiKeys | None = None
        self._bus: Bus | None = None
        self._supervisor: Supervisor | None = None
        self._watchdog: Watchdog | None = None
        self._listener: socket.socket | None = None
        """The socket on which the gateways listen, one after the other."""
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # Before anything is started: a wrong name shows at once, and a model is fetched once.
        settings = await choose_model(self._settings)
        try:
            if not settings.nats_url:
                self._api_keys = ApiKeys.load(settings.api_key_file) if settings.api_key_file else None
                self._cluster = Cluster(settings, self._api_keys)
                await self._cluster.start()
                settings = msgspec.structs.replace(
                    settings,
                    nats_url=self._cluster.url,
                    nats_cluster=1,
                    nats_replicas=store_replicas(settings),
                )
            self._settings = settings
            user, password = self._credentials(SUPERVISOR)
            self._bus = await nats.connect(
                settings.nats_url,
                name=SUPERVISOR,
                user=user,
                password=password,
                inbox_prefix=subjects.service_inbox(SUPERVISOR),
                tls=credentials.tls(settings),
            )
            await _require_jetstream(self._bus)
            if GATEWAY in self._programs:
                self._listener = listen(settings.host, settings.port)
            policy = RestartPolicy(drain=settings.drain_timeout + END_TIMEOUT)
            programs = [self._program(name) for name in self._programs]
            self._supervisor = supervisor = Supervisor(programs, policy, self._announce_end)
            self._watchdog = Watchdog(
                self._bus, supervisor.instances, supervisor.kill, supervisor.replace, supervisor.seconds_without_core
            )
            await self._watchdog.listen()
            self._running = asyncio.create_task(self._run(supervisor, self._watchdog))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def settings(self) -> Settings:
        """Settings of the services; once the stack is ready, with the path of the chosen model."""
        return self._settings

    @property
    def brokers(self) -> Sequence[Broker]:
        """The NATS servers that this stack runs; none if the settings name others."""
        return self._cluster.brokers if self._cluster is not None else ()

    @property
    def operator(self) -> tuple[str, str]:
        """The NATS user with all rights, and its password, where the stack has a broker of its own."""
        return self.brokers[0].user, self.brokers[0].password

    @property
    def programs(self) -> Mapping[str, str]:
        """The services by the names of their processes."""
        return self._programs

    def pid(self, program: str) -> int | None:
        """Returns the process id of a service, or of the first `broker`; None while it does not run."""
        if program == BROKER:
            return self.brokers[0].pid if self.brokers else None
        return self._supervisor.pid(program) if self._supervisor is not None else None

    async def ready(self, since: float = 0.0) -> Address:
        """Returns the addresses once every service has said, after `since` on the monotonic clock, that it is ready.

        Raises:
            ConfigurationError: a service cannot run with the settings.
            Unavailable: a service was not ready within `START_TIMEOUT` seconds.
        """
        assert self._running is not None
        assert self._watchdog is not None
        waiting = asyncio.create_task(self._watchdog.all_ready(self._programs, since))
        try:
            done, _ = await asyncio.wait(
                {waiting, self._running}, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if waiting not in done:
            if self._running in done:
                self._running.result()
            raise Unavailable(f"the stack was not ready within {START_TIMEOUT:.0f} s: see the log for the reason")
        load = waiting.result().get(GATEWAY, {})
        scheme = "https" if self._settings.ssl_certfile else "http"
        http = f"{scheme}://{bracketed(self._settings.host)}:{int(load['port'])}" if load else ""
        return Address(self._settings.nats_url, http)

    async def wait(self) -> None:
        """Waits until cancelled.

        Raises:
            ConfigurationError: a restarted service cannot run with the settings.
        """
        assert self._running is not None
        await self._running

    async def drain(self) -> None:
        """Takes no new requests; returns when all accepted ones have ended, at the latest after `drain_timeout`.

        A client that sends an accepted request again gets its frames all the same.
        """
        assert self._supervisor is not None
        for name, service in self._programs.items():
            if service in FRONT:
                self._supervisor.stop(name)
        try:
            async with asyncio.timeout(self._settings.drain_timeout):
                for services in DRAIN_ORDER:
                    await self._until_idle(services)
        except TimeoutError:
            _log.warning("not_drained_in_time", seconds=self._settings.drain_timeout)

    async def _until_idle(self, services: Mapping[str, str]) -> None:
        """Waits until services hold nothing. `services` has each one's figure of load that counts what it holds."""
        assert self._supervisor is not None
        for name, service in self._programs.items():
            if service not in services:
                continue
            while True:
                if not await self._load(name, service, services[service]):
                    break
                await asyncio.sleep(DRAIN_INTERVAL)

    async def _load(self, name: str, service: str, gauge: str) -> float:
        """Returns a figure of a service's load; 1 while a restarted service does not answer."""
        assert self._supervisor is not None
        assert self._bus is not None
        subject = f"$SRV.STATS.pagewire-{service}.{self._supervisor.instances.get(name, '')}"
        try:
            stats = await self._bus.request(subject, b"", timeout=STATS_TIMEOUT)
        except NoResponders:
            return 0.0 if service in FRONT else 1.0
        except BusError:
            return 1.0
        return discovery.load_of(stats.data, gauge, draining=service in FRONT)

    async def _run(self, supervisor: Supervisor, watchdog: Watchdog) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(supervisor.run())
                group.create_task(watchdog.run())
                for broker in self.brokers:
                    group.create_task(_keep_running(broker))
                    group.create_task(_end_broken(broker))
                if self._cluster is not None and self._api_keys is not None:
                    group.create_task(self._api_keys.watch(self._cluster.reload))
        except* ConfigurationError as errors:
            raise errors.exceptions[0] from None

    async def _close(self) -> None:
        """Ends the services before the broker, which they need to finish their work."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self._listener is not None:
            self._listener.close()
        if self._bus is not None:
            await self._bus.close()
        if self._cluster is not None:
            await self._cluster.stop()

    def _program(self, name: str) -> Program:
        service = self._programs[name]
        environment = partial(self._environment, name)
        if service == GATEWAY and self._listener is not None:
            return Program(name, _command(service), environment, descriptors=(self._listener.fileno(),))
        return Program(name, _command(service), environment)

    def _announce_end(self, program: str, instance: str) -> None:
        """Tells the services at once that a process has ended. Otherwise they notice by its silence."""
        assert self._bus is not None
        try:
            self._bus.publish(f"{subjects.HEARTBEAT}.{self._programs[program]}.{instance}", b"")
        except BusError as error:
            _log.warning("end_not_announced", process=program, reason=str(error))

    def _environment(self, program: str) -> dict[str, str]:
        """Returns the environment for a program's next start, with a new instance id and exactly these settings."""
        user, password = self._credentials(self._programs[program])
        url = self._nats_urls.get(program, self._settings.nats_url)
        settings = msgspec.structs.replace(
            self._settings, nats_url=url, nats_user=user, nats_password=password, nats_secrets=""
        )
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        if self._programs[program] == "executor" and self._settings.device == "cuda":
            inherited |= _own_gpu(program, inherited)
        if self._programs[program] == GATEWAY and self._listener is not None:
            inherited[LISTENER] = str(self._listener.fileno())
        if self._cluster is not None:
            inherited[BROKER_FOLDER] = str(self._cluster.brokers[0].folder)
        return {**inherited, **config.to_environment(settings), INSTANCE: subjects.new_instance()}

    def _credentials(self, service: str) -> tuple[str, str]:
        """Returns the NATS user and the password of a service, or of the supervisor."""
        if self._cluster is not None:
            return service, self._cluster.passwords[service]
        return credentials.of_service(self._settings, service)


def replicas_of(service: str, settings: Settings) -> int:
    """Returns the number of processes of a service."""
    return settings.data_parallel_size if service in REPLICATED else 1


def check_replicas(settings: Settings) -> str:
    """Returns a sentence on how the replicas share this machine.

    Raises:
        ConfigurationError: there are fewer cores than replicas.
    """
    replicas, cores = settings.data_parallel_size, len(os.sched_getaffinity(0))
    if settings.device != "cpu":
        return f"{replicas}, each on its own device"
    if replicas > cores:
        raise ConfigurationError(f"--data-parallel-size {replicas} exceeds the {cores} cores: set at most {cores}")
    return f"{replicas} on {cores} cores"


def _command(service: str) -> tuple[str, ...]:
    return sys.executable, "-P", "-m", f"pagewire.services.{service}"


def program_names(service: str, count: int) -> list[str]:
    """Returns the names of a service's processes: `scheduler`, or `scheduler-0`, `scheduler-1` if there are several."""
    return [service] if count == 1 else [f"{service}-{replica}" for replica in range(count)]


def _own_gpu(program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that shows an executor replica only its own GPU among those visible to this process."""
    _, several, replica = program.partition("-")
    if not several:
        return {}
    visible = [gpu for gpu in environment.get(VISIBLE_GPUS, "").split(",") if gpu]
    if visible and int(replica) >= len(visible):
        raise ConfigurationError(
            f"{VISIBLE_GPUS} has {len(visible)} GPUs, too few for {program}: lower --data-parallel-size"
        )
    return {VISIBLE_GPUS: visible[int(replica)] if visible else replica}


def _refuse_unsupported(settings: Settings) -> None:
    if not settings.nats_url:
        for name in ("nats_secrets", "nats_tls_ca", "nats_tls_cert", "nats_tls_key"):
            if getattr(settings, name):
                flag = name.replace("_", "-")
                raise ConfigurationError(f"--{flag} is for a broker of your own: give --nats-url too, or leave it out")
    if settings.tensor_parallel_size > 1 and not settings.device.startswith("sim:"):
        raise ConfigurationError(
            f"--tensor-parallel-size {settings.tensor_parallel_size} is not supported: leave it at 1"
        )


async def _require_jetstream(bus: Bus) -> None:
    """Raises ConfigurationError if the broker has no JetStream. Services would wait for it."""
    try:
        await bus.request("$JS.API.INFO", b"", timeout=STATS_TIMEOUT)
    except NoResponders:
        raise ConfigurationError(NO_JETSTREAM) from None
    except BusError as error:
        _log.warning("jetstream_unknown", reason=str(error))


async def _keep_running(broker: Broker) -> None:
    """Restarts the broker whenever it dies, on the same port and with the same store."""
    while True:
        code = await broker.wait()
        _log.warning("broker_ended", code=code)
        try:
            await broker.start()
        except BusUnavailable as error:
            _log.warning("broker_not_started", reason=str(error), retry_in=BROKER_RETRY_DELAY)
            await asyncio.sleep(BROKER_RETRY_DELAY)


async def _end_broken(broker: Broker) -> None:
    """Ends the broker when its disk was full and has room again. JetStream would store nothing without a restart."""
    while True:
        await broker.wait_broken()
        _log.error("broker_disk_full")
        while True:
            await asyncio.sleep(ROOM_CHECK_INTERVAL)
            if await asyncio.to_thread(broker.has_room):
                break
        _log.warning("broker_disk_has_room")
        broker.terminate()
        await broker.wait()
        await asyncio.sleep(BROKER_RETRY_DELAY)  # the restart clears the failure
