"""The whole pipeline on this machine: a broker unless one is given, and every service as a process."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import msgspec
import structlog

from pagewire.client.watchdog import Watchdog
from pagewire.embedded.broker import Broker
from pagewire.embedded.model_choice import choose_model
from pagewire.embedded.supervisor import Program, Supervisor
from pagewire.shared import config, subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.config import ENVIRONMENT_PREFIX, Settings
from pagewire.shared.errors import BusUnavailable, ConfigurationError, Unavailable
from pagewire.shared.process import INSTANCE

PIPELINE = ("executor", "scheduler", "detokenizer", "tokenizer")
"""The services that every request passes, the slowest to start first."""
REPLICATED = ("executor", "scheduler")
"""Those of which there is one per replica."""
GATEWAY = "gateway"
START_WITHIN = 300.0
"""Seconds until everything must be ready: a large model takes long to load."""
BROKER_RETRY = 0.2
"""Seconds between two attempts to start a broker that has died."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a stack is reached."""

    nats: str
    http: str
    """Empty without a gateway."""


class Stack:
    """`async with Stack(settings) as stack: address = await stack.ready()`. It has ended when the block is left."""

    def __init__(self, settings: Settings, services: Sequence[str] = (*PIPELINE, GATEWAY)) -> None:
        """Raises ConfigurationError for a setting that is not built, or that this machine cannot bear."""
        _refuse_unbuilt(settings)
        check_replicas(settings)
        self._settings = settings
        self._programs = {
            name: service for service in services for name in program_names(service, replicas_of(service, settings))
        }
        self._broker: Broker | None = None
        self._bus: Bus | None = None
        self._watchdog: Watchdog | None = None
        self._running: asyncio.Task[None] | None = None
        self._instances: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        # Before anything is started: a wrong name shows at once, and a model is fetched once.
        settings = await choose_model(self._settings)
        try:
            if not settings.nats_url:
                self._broker = Broker(port=settings.nats_port, api_key=settings.api_key)
                await self._broker.start()
                settings = msgspec.structs.replace(
                    settings,
                    nats_url=self._broker.url,
                    nats_user=self._broker.user,
                    nats_password=self._broker.password,
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
                Program(
                    name, (sys.executable, "-P", "-m", f"pagewire.services.{service}"), partial(self._environment, name)
                )
                for name, service in self._programs.items()
            ]
            supervisor = Supervisor(programs)
            self._watchdog = Watchdog(self._bus, self._instances, supervisor.kill)
            await self._watchdog.listen()
            self._running = asyncio.create_task(self._run(supervisor, self._watchdog))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def ready(self) -> Address:
        """Returns as soon as every service is ready.

        Raises:
            ConfigurationError: a service cannot run with the settings.
            Unavailable: the time for it has passed.
        """
        assert self._running is not None
        assert self._watchdog is not None
        waiting = asyncio.create_task(self._watchdog.all_ready(self._programs))
        try:
            done, _ = await asyncio.wait(
                {waiting, self._running}, timeout=START_WITHIN, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if waiting not in done:
            if self._running in done:
                self._running.result()
            raise Unavailable(f"the stack was not ready within {START_WITHIN:.0f} s: the log says what is missing")
        load = waiting.result().get(GATEWAY, {})
        http = f"http://{self._settings.host}:{int(load['port'])}" if load else ""
        return Address(self._settings.nats_url, http)

    async def wait(self) -> None:
        """Waits for ever.

        Raises:
            ConfigurationError: a service cannot run with the settings any more.
        """
        assert self._running is not None
        await self._running

    async def _run(self, supervisor: Supervisor, watchdog: Watchdog) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(supervisor.run())
                group.create_task(watchdog.run())
                if self._broker is not None:
                    group.create_task(_keep(self._broker))
        except* ConfigurationError as errors:
            raise errors.exceptions[0] from None

    async def _close(self) -> None:
        """Ends the services first, while the broker still carries what they owe."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        if self._bus is not None:
            await self._bus.close()
        if self._broker is not None:
            await self._broker.stop()

    def _environment(self, program: str) -> dict[str, str]:
        """For the next start of a program: under a new instance id, with these settings and no others."""
        self._instances[program] = instance = subjects.new_instance()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        if self._programs[program] == "executor" and self._settings.device == "cuda":
            inherited |= _own_gpu(program, inherited)
        return {**inherited, **config.to_environment(self._settings), INSTANCE: instance}


def replicas_of(service: str, settings: Settings) -> int:
    """Processes of a service."""
    return settings.data_parallel_size if service in REPLICATED else 1


def check_replicas(settings: Settings) -> str:
    """How the replicas share this machine, in words.

    Raises:
        ConfigurationError: it has fewer cores than replicas.
    """
    replicas, cores = settings.data_parallel_size, len(os.sched_getaffinity(0))
    if settings.device != "cpu":
        return f"{replicas} on devices of their own"
    if replicas > cores:
        raise ConfigurationError(f"--data-parallel-size {replicas} is more than the {cores} cores: lower it")
    return f"{replicas} on {cores} cores"


def _command(service: str) -> tuple[str, ...]:
    return sys.executable, "-P", "-m", f"pagewire.services.{service}"


def program_names(service: str, count: int) -> list[str]:
    """What the processes of a service are called: `scheduler-0`, `scheduler-1` where there are several."""
    return [service] if count == 1 else [f"{service}-{replica}" for replica in range(count)]


def _own_gpu(program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Each executor of several sees one GPU, the one of its own number among those that this process may use."""
    _, several, replica = program.partition("-")
    if not several:
        return {}
    allowed = [gpu for gpu in environment.get(VISIBLE, "").split(",") if gpu]
    if allowed and int(replica) >= len(allowed):
        raise ConfigurationError(f"{VISIBLE} names {len(allowed)} GPUs, {program} needs one more: lower the replicas")
    return {VISIBLE: allowed[int(replica)] if allowed else replica}


def _refuse_unbuilt(settings: Settings) -> None:
    if settings.tensor_parallel_size > 1 and not settings.device.startswith("sim:"):
        raise ConfigurationError(
            f"--tensor-parallel-size {settings.tensor_parallel_size} is not built yet: leave it at 1"
        )


async def _keep(broker: Broker) -> None:
    """Starts the broker again whenever it dies; it keeps its port and what it stored."""
    while True:
        code = await broker.wait()
        _log.warning("broker_ended", code=code)
        try:
            await broker.start()
        except BusUnavailable as error:
            _log.warning("broker_not_started", reason=str(error), retry_in=BROKER_RETRY)
            await asyncio.sleep(BROKER_RETRY)
