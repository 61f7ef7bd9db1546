"""The whole pipeline on this machine: every service as a process, and a broker unless the settings name one."""

import asyncio
import os
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
from pagewire.embedded.supervisor import Program, Supervisor
from pagewire.embedded.watchdog import Watchdog
from pagewire.shared import config, subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.config import ENVIRONMENT_PREFIX, Settings, store_replicas
from pagewire.shared.errors import BusError, BusUnavailable, ConfigurationError, Unavailable
from pagewire.shared.process import INSTANCE

PIPELINE = ("executor", "scheduler", "detokenizer", "tokenizer")
"""The services that every request passes; the slowest to start comes first."""
REPLICATED = ("executor", "scheduler")
"""The services with one process per replica."""
GATEWAY = "gateway"
START_TIMEOUT = 300.0
"""Seconds until all services must be ready; loading a large model takes long."""
ROOM_CHECK_INTERVAL = 0.5
"""Seconds between two looks whether a full disk has room again."""
BROKER_RETRY_DELAY = 0.2
"""Seconds between two attempts to restart the broker."""

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Address:
    """The URLs of a running stack."""

    nats: str
    """Of several servers separated by commas."""
    http: str
    """Empty without a gateway."""


class Stack:
    """`async with Stack(settings) as stack: address = await stack.ready()`. The stack ends with the block."""

    def __init__(self, settings: Settings, services: Sequence[str] = (*PIPELINE, GATEWAY)) -> None:
        """Raises ConfigurationError for a setting that is not supported, by Pagewire or by this machine."""
        _refuse_unsupported(settings)
        check_replicas(settings)
        check_servers(settings)
        self._settings = settings
        self._programs = {
            name: service for service in services for name in program_names(service, replicas_of(service, settings))
        }
        self._cluster: Cluster | None = None
        self._bus: Bus | None = None
        self._watchdog: Watchdog | None = None
        self._running: asyncio.Task[None] | None = None
        self._instances: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        # Before anything is started: a wrong name shows at once, and a model is fetched once.
        settings = await choose_model(self._settings)
        try:
            if not settings.nats_url:
                self._cluster = Cluster(settings)
                await self._cluster.start()
                settings = msgspec.structs.replace(
                    settings,
                    nats_url=self._cluster.url,
                    nats_user=self._cluster.user,
                    nats_password=self._cluster.password,
                    nats_cluster=1,
                    nats_replicas=store_replicas(settings),
                )
            self._settings = settings
            self._bus = await nats.connect(
                settings.nats_url,
                name="supervisor",
                user=settings.nats_user,
                password=settings.nats_password,
                inbox_prefix="_INBOX",
            )
            programs = [
                Program(name, _command(service), partial(self._environment, name))
                for name, service in self._programs.items()
            ]
            supervisor = Supervisor(programs, on_ended=self._announce_end)
            self._watchdog = Watchdog(self._bus, self._instances, supervisor.kill)
            await self._watchdog.listen()
            self._running = asyncio.create_task(self._run(supervisor, self._watchdog))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def brokers(self) -> Sequence[Broker]:
        """The NATS servers that this stack runs; none if the settings name others."""
        return self._cluster.brokers if self._cluster is not None else ()

    async def ready(self) -> Address:
        """Returns the addresses once every service is ready.

        Raises:
            ConfigurationError: a service cannot run with the settings.
            Unavailable: a service was not ready within `START_TIMEOUT` seconds.
        """
        assert self._running is not None
        assert self._watchdog is not None
        waiting = asyncio.create_task(self._watchdog.all_ready(self._programs))
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
        http = f"http://{self._settings.host}:{int(load['port'])}" if load else ""
        return Address(self._settings.nats_url, http)

    async def wait(self) -> None:
        """Waits until cancelled.

        Raises:
            ConfigurationError: a restarted service cannot run with the settings.
        """
        assert self._running is not None
        await self._running

    async def _run(self, supervisor: Supervisor, watchdog: Watchdog) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(supervisor.run())
                group.create_task(watchdog.run())
                for broker in self.brokers:
                    group.create_task(_keep_running(broker))
                    group.create_task(_end_broken(broker))
        except* ConfigurationError as errors:
            raise errors.exceptions[0] from None

    async def _close(self) -> None:
        """Ends the services before the broker, which they need to finish their work."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self._bus is not None:
            await self._bus.close()
        if self._cluster is not None:
            await self._cluster.stop()

    def _announce_end(self, program: str) -> None:
        """Tells the services at once that a process has ended. Otherwise they notice by its silence."""
        assert self._bus is not None
        try:
            self._bus.publish(f"{subjects.HEARTBEAT}.{self._programs[program]}.{self._instances[program]}", b"")
        except BusError as error:
            _log.warning("end_not_announced", process=program, reason=str(error))

    def _environment(self, program: str) -> dict[str, str]:
        """Returns the environment for a program's next start, with a new instance id and exactly these settings."""
        self._instances[program] = instance = subjects.new_instance()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        if self._programs[program] == "executor" and self._settings.device == "cuda":
            inherited |= _own_gpu(program, inherited)
        return {**inherited, **config.to_environment(self._settings), INSTANCE: instance}


def replicas_of(service: str, settings: Settings) -> int:
    """Returns the number of processes of a service."""
    return settings.data_parallel_size if service in REPLICATED else 1


def check_replicas(settings: Settings) -> str:
    """Returns a sentence about how the replicas share this machine.

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
    if settings.tensor_parallel_size > 1 and not settings.device.startswith("sim:"):
        raise ConfigurationError(
            f"--tensor-parallel-size {settings.tensor_parallel_size} is not supported: leave it at 1"
        )


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
