"""The whole pipeline on this machine: every service as a process, and a broker unless the settings name one."""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

import msgspec
import structlog

from pagewire.embedded import broker_care, demo_faults
from pagewire.embedded.address import Address
from pagewire.embedded.broker import Broker
from pagewire.embedded.cluster import Cluster, check_servers, require_jetstream
from pagewire.embedded.control import control_socket
from pagewire.embedded.drainer import FRONT, wait_until_idle
from pagewire.embedded.idle_models import IdleModel
from pagewire.embedded.memory_shares import share_memory
from pagewire.embedded.model_choice import added_to, choose_model, choose_models
from pagewire.embedded.programs import GATEWAY, PIPELINE, ServiceProgram, check_supported, programs_of
from pagewire.embedded.supervisor import Program, RestartPolicy, Supervisor
from pagewire.embedded.watchdog import Watchdog
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.errors import BusError, ConfigurationError, PagewireError, Unavailable
from pagewire.shared.messages.heartbeat import MEMORY, RESERVED
from pagewire.shared.models.model_folder import served_name, served_token
from pagewire.shared.process import device_choice
from pagewire.shared.process.linux_process import AWAITED_MODELS, BROKER_FOLDER, END_NOW, INSTANCE, LISTENER
from pagewire.shared.process.listener import bracketed, listen
from pagewire.shared.security import credentials
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings import config
from pagewire.shared.settings.config import FIELDS, STACK_WIDE, Settings, seconds, store_replicas
from pagewire.shared.settings.environment import PREFIX

BROKER = "broker"
END_TIMEOUT = 15.0
"""Seconds after the drain within which a process that has a successor must end."""
SUPERVISOR = "supervisor"
MAX_ENDS = 3
"""Ends of a process before its model is ready for the first time after which the model is given up."""
_log = structlog.get_logger()


class Stack:
    """`async with Stack(settings) as stack: address = await stack.ready()`. The stack ends with the block."""

    def __init__(
        self,
        settings: Settings,
        services: Sequence[str] = (*PIPELINE, GATEWAY),
        nats_urls: Mapping[str, str] | None = None,
        *,
        others: Sequence[Settings] = (),
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: the settings of the stack and of its model.
            services: the services that run.
            nats_urls: URL by which a process reaches the broker, by process, where it is not the broker's own.
            others: the settings of further models.

        Raises:
            ConfigurationError: a setting is not supported, by Pagewire or by this machine.
        """
        models = []
        for each in (settings, *others):
            check_supported(each)
            models.append(device_choice.resolve(each))
        check_servers(settings)
        self._models = models
        self._services = services
        self._pipeline = [service for service in services if service != GATEWAY]
        """The services that each model has."""
        self._programs: dict[str, ServiceProgram] = {}
        self._nats_urls = nats_urls or {}
        self._cluster: Cluster | None = None
        self._api_keys: ApiKeys | None = None
        self._bus: Bus | None = None
        self._supervisor: Supervisor | None = None
        self._watchdog: Watchdog | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._listener: socket.socket | None = None
        """The socket on which the gateways listen, one after the other."""
        self._running: asyncio.Task[None] | None = None
        self._served = False
        """Whether all models have been ready."""
        self._additions = asyncio.Lock()
        self._idle: dict[str, tuple[IdleModel, asyncio.Task[None]]] = {}
        """The models that are unloaded when they are idle, by name, and the tasks that do it."""
        self._ends: Counter[str] = Counter()
        """Ends of each process before its model was ready for the first time."""
        self._adding: dict[str, asyncio.Future[None]] = {}
        """The model that is being added, by its name: the future fails when one of its services refuses a setting."""

    async def __aenter__(self) -> Self:
        # Before anything is started: a wrong name or too little memory shows at once, and a model is fetched once.
        self._models = await share_memory(await choose_models(self._models))
        try:
            if not self.settings.nats_url:
                await self._start_brokers()
            user, password = self._credentials(SUPERVISOR)
            self._bus = await nats.connect(
                self.settings.nats_url,
                name=SUPERVISOR,
                user=user,
                password=password,
                inbox_prefix=subjects.service_inbox(SUPERVISOR),
                tls=credentials.tls(self.settings),
            )
            await require_jetstream(self._bus)
            if GATEWAY in self._services:
                self._listener = listen(self.settings.host, self.settings.port)
            self._programs = self._all_programs()
            policy = RestartPolicy(drain=self.settings.drain_timeout + END_TIMEOUT)
            programs = list(map(self._program, self._programs.values()))
            self._supervisor = supervisor = Supervisor(programs, policy, self._announce_end, self._on_refused)
            self._watchdog = Watchdog(self._bus, supervisor)
            await self._watchdog.listen()
            await demo_faults.listen(self._bus, supervisor, allowed=self.settings.demo_faults)
            self._running = asyncio.create_task(self._run(supervisor, self._watchdog))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _start_brokers(self) -> None:
        """Starts the servers, whose URL is that of all models from then on."""
        settings = self.settings
        self._api_keys = ApiKeys.load(settings.api_key_file) if settings.api_key_file else None
        adapters = any(each.enable_lora for each in self._models)
        self._cluster = Cluster(msgspec.structs.replace(settings, enable_lora=adapters), self._api_keys)
        await self._cluster.start()
        broker = {"nats_url": self._cluster.url, "nats_cluster": 1, "nats_replicas": store_replicas(settings)}
        self._models = [msgspec.structs.replace(each, **broker) for each in self._models]

    def _all_programs(self) -> dict[str, ServiceProgram]:
        """Returns the programs by the names of their processes."""
        several = len(self._models) > 1
        programs = [each for model in self._models for each in programs_of(model, self._pipeline, several=several)]
        programs += programs_of(self.settings, [GATEWAY] if GATEWAY in self._services else [])
        return {program.name: program for program in programs}

    @property
    def settings(self) -> Settings:
        """Settings of the stack and of its first model; once the stack has started, with the path of the model."""
        return self._models[0]

    @property
    def models(self) -> list[str]:
        """Names of the models in requests, one of each."""
        return list(map(served_name, self._models))

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
        return {name: program.service for name, program in self._programs.items()}

    def pid(self, program: str) -> int | None:
        """Returns the process id of a service, or of the first `broker`; None while it does not run."""
        if program == BROKER:
            return self.brokers[0].pid if self.brokers else None
        return self._supervisor.pid(program) if self._supervisor is not None else None

    async def ready(self, since: float = 0.0) -> Address:
        """Returns the addresses once every service has said, after `since` on the monotonic clock, that it is ready.

        Raises:
            ConfigurationError: a service cannot run with the settings.
            Unavailable: a service ends again and again, or was not ready within `START_TIMEOUT` seconds.
        """
        assert self._running is not None
        assert self._watchdog is not None
        loads = await self._watchdog.until_ready(self._programs, self._running, since)
        self._served = True
        load = loads.get(GATEWAY, {})
        scheme = "https" if self.settings.ssl_certfile else "http"
        http = f"{scheme}://{bracketed(self.settings.host)}:{int(load['port'])}" if load else ""
        return Address(self.settings.nats_url, http)

    async def add(self, settings: Settings) -> str:
        """Serves one more model, with the settings of this stack where all models share them.

        Returns its name in requests once it is ready. If it is refused, or the call is cancelled, it is not served.

        Raises:
            ConfigurationError: the model or a setting cannot be used, or the model needs more memory than is free.
            Unavailable: a service ends again and again, or was not ready within `START_TIMEOUT` seconds.
        """
        assert self._supervisor is not None
        assert self._watchdog is not None
        async with self._additions:
            model = await self._choose(settings)
            name = served_name(model)
            failure = self._adding[name] = asyncio.get_running_loop().create_future()
            programs = {program.name: program for program in programs_of(model, self._pipeline, several=True)}
            self._models.append(model)
            self._programs |= programs
            try:
                for program in programs.values():
                    self._supervisor.start(self._program(program))
                await self._watchdog.until_ready(programs, failure)
            except BaseException:
                await asyncio.shield(self._forget(self._end(name)))
                raise
            finally:
                del self._adding[name]
            self._unload_when_idle(model)
        _log.info("model_added", model=name)
        return name

    def _unload_when_idle(self, settings: Settings) -> None:
        """Has the executors of a model end after `idle_unload` without a request, and start for the next one."""
        supervisor, bus, tasks, limit = self._supervisor, self._bus, self._tasks, settings.idle_unload
        if limit is None:
            return
        assert supervisor is not None
        assert bus is not None
        assert tasks is not None
        name = served_name(settings)
        executors = [each for each in self._programs.values() if each.service == "executor" and each.model == name]

        def stop() -> None:
            for each in executors:
                supervisor.stop(each.name)

        def start() -> None:
            for each in executors:
                supervisor.start(self._program(each))

        idle = IdleModel(bus, served_token(settings), seconds(limit), stop, start)
        self._idle[name] = idle, tasks.create_task(idle.run())

    async def _choose(self, settings: Settings) -> Settings:
        """Returns the settings of a model that is added, with its path and the memory that it may take."""
        assert self._watchdog is not None
        common = {FIELDS[name].name: getattr(self.settings, FIELDS[name].name) for name in STACK_WIDE}
        model = await asyncio.to_thread(device_choice.resolve, msgspec.structs.replace(settings, **common))
        check_supported(model)
        model = await choose_model(model)
        model = added_to(self._models, model, own_broker=self._cluster is not None)
        if model.device == "cuda" and any(idle.reserved for idle, _ in self._idle.values()):
            raise ConfigurationError("an unloaded model needs its memory of the GPU again: send it a request first")
        loads = [self._watchdog.load(name) for name in self._programs]
        promised = sum(idle.reserved for idle, _ in self._idle.values())
        promised += sum(max(0.0, load.get(RESERVED, 0.0) - load.get(MEMORY, 0.0)) for load in loads)
        (model,) = await share_memory([model], int(promised), always=True)
        return model

    def _on_refused(self, name: str, reason: str) -> None:
        """Ends the model, a service of which refuses its settings, as `_give_up` does."""
        self._give_up(self._programs[name].model, ConfigurationError(reason))

    def _give_up(self, model: str, error: PagewireError) -> None:
        """Ends a model that cannot be served.

        Raises:
            PagewireError: `error`, if the stack has no other model or has never been ready.
        """
        if (failure := self._adding.get(model)) is not None:
            if not failure.done():
                failure.set_exception(error)
        elif model and self._served and len(self._models) > 1:
            _log.error("model_refused", model=model, reason=str(error))
            assert self._tasks is not None
            self._tasks.create_task(self._forget(self._end(model)))
        else:
            raise error

    def _end(self, model: str) -> list[str]:
        """Has the services of a model end at once; returns the names of their processes."""
        assert self._supervisor is not None
        self._models = [each for each in self._models if served_name(each) != model]
        if model in self._idle:
            self._idle.pop(model)[1].cancel()
        names = [program.name for program in self._programs.values() if program.model == model]
        for name in names:
            self._supervisor.stop(name, END_NOW)
        return names

    async def _forget(self, names: Sequence[str]) -> None:
        """Waits until processes have ended, or `END_TIMEOUT` seconds, after which they are killed; forgets them."""
        assert self._supervisor is not None
        await self._supervisor.ended(names, END_TIMEOUT)
        for name in names:
            self._programs.pop(name, None)
            self._ends.pop(name, None)

    async def wait(self) -> None:
        """Waits until cancelled.

        Raises:
            ConfigurationError: a restarted service cannot run with the settings.
            Unavailable: a service ends again and again, and was never ready.
        """
        assert self._running is not None
        await self._running

    async def drain(self) -> None:
        """Takes no new requests; returns when all accepted ones have ended, at the latest after `drain_timeout`.

        A client that sends an accepted request again gets its frames all the same.
        """
        assert self._supervisor is not None
        assert self._bus is not None
        programs = self._programs.values()
        for program in programs:
            if program.service in FRONT:
                self._supervisor.stop(program.name)
        await wait_until_idle(self._bus, programs, self._supervisor.instances, self.settings.drain_timeout)

    async def _run(self, supervisor: Supervisor, watchdog: Watchdog) -> None:
        port = self._listener.getsockname()[1] if self._listener is not None else None
        try:
            async with control_socket(port, self.add), asyncio.TaskGroup() as self._tasks:
                group = self._tasks
                group.create_task(supervisor.run())
                group.create_task(watchdog.run())
                for model in self._models:
                    self._unload_when_idle(model)
                for broker in self.brokers:
                    group.create_task(broker_care.keep_running(broker))
                    group.create_task(broker_care.end_broken(broker))
                if self._cluster is not None and self._api_keys is not None:
                    group.create_task(self._api_keys.watch(self._cluster.reload))
        except* PagewireError as errors:
            raise errors.exceptions[0] from None

    async def _close(self) -> None:
        """Ends the services before the broker, which they need to finish their work."""
        if self._running is not None:
            self._running.cancel()
        try:
            if self._running is not None:
                await asyncio.wait({self._running})
            if self._bus is not None:
                await self._bus.close()
            if self._cluster is not None:
                await self._cluster.stop()
        except asyncio.CancelledError:  # an impatient user: the services die with this process
            if self._cluster is not None:
                self._cluster.kill()
            raise
        finally:
            if self._listener is not None:
                self._listener.close()

    def _program(self, program: ServiceProgram) -> Program:
        listener = self._listener if program.service == GATEWAY else None
        descriptors = (listener.fileno(),) if listener is not None else ()
        return Program(program.name, program.command, partial(self._environment, program), descriptors, program.spare)

    def _announce_end(self, program: str, instance: str) -> None:
        """Tells the services at once that a process has ended. Otherwise they notice by its silence.

        Raises:
            Unavailable: the process has ended again and again while the stack starts.
        """
        assert self._bus is not None
        if (ended := self._programs.get(program)) is None:
            return
        try:
            self._bus.publish(f"{subjects.HEARTBEAT}.{ended.service}.{instance}", b"")
        except BusError as error:
            _log.warning("end_not_announced", process=program, reason=str(error))
        if not self._served or ended.model in self._adding:
            self._ends[program] += 1
            if self._ends[program] >= MAX_ENDS:
                self._give_up(ended.model, Unavailable(f"{program} has ended {MAX_ENDS} times: see the log"))

    def _environment(self, program: ServiceProgram) -> dict[str, str]:
        """Returns the environment for a program's next start, with a new instance id and exactly its settings."""
        user, password = self._credentials(program.service)
        url = self._nats_urls.get(program.name, self.settings.nats_url)
        settings = msgspec.structs.replace(
            program.settings, nats_url=url, nats_user=user, nats_password=password, nats_secrets=""
        )
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        inherited |= program.gpu(inherited)
        if program.service == GATEWAY and self._listener is not None:
            inherited[LISTENER] = str(self._listener.fileno())
            own = self._models if "tokenizer" in self._pipeline and not self._served else []
            inherited[AWAITED_MODELS] = ",".join(map(served_token, own))
        if self._cluster is not None:
            inherited[BROKER_FOLDER] = str(self._cluster.brokers[0].folder)
        return {**inherited, **config.to_environment(settings), INSTANCE: subjects.new_instance()}

    def _credentials(self, service: str) -> tuple[str, str]:
        """Returns the NATS user and the password of a service, or of the supervisor."""
        own = None if self._cluster is None else self._cluster.passwords[service]
        return credentials.of_service(self.settings, service) if own is None else (service, own)
