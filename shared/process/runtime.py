"""Runs one service as a process: settings, logs, traces, the bus, heartbeats, signals and the exit code."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import structlog
import uvloop

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.errors import BusUnavailable, ConfigurationError, RequestTimeout, StorageRefused
from pagewire.shared.models import model_folder
from pagewire.shared.process import device_choice
from pagewire.shared.process.clock_monitor import ClockMonitor
from pagewire.shared.process.context import Context, Drain, Service
from pagewire.shared.process.discovery import Responder
from pagewire.shared.process.failure import log_failure
from pagewire.shared.process.heartbeater import Heartbeater
from pagewire.shared.process.linux_process import (
    END_NOW,
    INSTANCE,
    PARENT,
    STOP,
    die_with_parent,
    refuse_settings,
    return_freed_memory,
    use_batch_scheduling,
)
from pagewire.shared.process.metrics_reporter import Reporter
from pagewire.shared.process.store_keeper import StoreKeeper
from pagewire.shared.security import credentials
from pagewire.shared.security.permissions import STORING
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import Settings, nats_urls, store_replicas, without_logins
from pagewire.shared.telemetry import logs, tracing

CLOSE_WITHIN = 8.0
"""Seconds within which a service must end once it is cancelled."""

KEEPING = {"detokenizer"}
"""Services that restore the store when somebody has changed it."""
TIMED = STORING | {"tokenizer"}
"""Services that keep the deadlines of requests."""
GC_THRESHOLD = 50_000
"""Number of new objects between two garbage collections. A busy service holds tens of thousands, few in cycles."""

_log = structlog.get_logger()


def main(name: str, cls: Callable[[Context], Service]) -> NoReturn:
    """Entry point of `python -m pagewire.services.<name>`.

    Exit codes: 0 after a signal, 1 when the service fails, 2 when a setting is refused.
    """
    die_with_parent()
    use_batch_scheduling()
    if name != "executor":
        return_freed_memory()
    parser = flags.Parser(prog=f"python -m pagewire.services.{name}")
    flags.add_settings(parser)
    try:
        settings = flags.read_settings(parser.parse_args())
        if name == "executor":
            settings = device_choice.resolve(settings)
        gc.freeze()  # objects of the imported libraries live until the end
        gc.set_threshold(GC_THRESHOLD)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_process(name, cls, settings))
    except ConfigurationError as error:
        refuse_settings(f"{name}: {error}")
        code = 2
    sys.exit(code)


class Shutdown:
    """The end of a process, as signals order it.

    Attributes:
        draining: set at the first SIGTERM or SIGINT, or at `STOP`.
        drained: whether the drain has ended, well or by its timeout.
        closing: set after the drain, at the second SIGTERM or SIGINT, or at `END_NOW`: the process ends now.
    """

    def __init__(self, *, supervised: bool = False) -> None:
        self.draining = asyncio.Event()
        self.closing = asyncio.Event()
        self.drained = False
        self._supervised = supervised
        self._stopping = False

    def listen(self) -> None:
        """Handles the signals of this process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signal)
        loop.add_signal_handler(STOP, self.stop)
        loop.add_signal_handler(END_NOW, self.closing.set)

    def follows(self) -> Drain:
        """Returns what follows the drain: the `follows` of a `Context`."""
        if self._stopping:
            return Drain.STOP
        return Drain.SUCCESSOR if self._supervised else Drain.ALONE

    def close(self) -> None:
        """Records that the drain has ended."""
        self.drained = True
        self.closing.set()

    def signal(self) -> None:
        """Handles SIGTERM or SIGINT."""
        (self.closing if self.draining.is_set() else self.draining).set()

    def stop(self) -> None:
        """Handles `STOP`."""
        self._stopping = True
        self.draining.set()


async def _process(name: str, cls: Callable[[Context], Service], settings: Settings) -> int:
    instance = os.environ.get(INSTANCE) or subjects.new_instance()
    logs.configure(settings, service=name, instance=instance)
    tracing.configure(name, instance, settings)
    shutdown = Shutdown(supervised=PARENT in os.environ)
    shutdown.listen()
    if PARENT in os.environ or not sys.stderr.isatty():  # else SIGHUP says that the terminal is gone
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, logs.toggle_debug, settings)
    serving = asyncio.create_task(_connect_and_run(name, cls, settings, instance, shutdown))
    stopping = asyncio.create_task(shutdown.closing.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if serving.done():
        return _exit_code(serving)
    _log.info("stopping")
    if not shutdown.drained:
        serving.cancel()
    await asyncio.wait({serving}, timeout=CLOSE_WITHIN)
    if not serving.done():
        _log.error("not_stopped_in_time", seconds=CLOSE_WITHIN)
        os._exit(1)
    return 0 if serving.cancelled() else _exit_code(serving)


def _exit_code(serving: "asyncio.Task[None]") -> int:
    """Returns the exit code for a service that has ended by itself; raises its `ConfigurationError`."""
    error = serving.exception()
    if isinstance(error, ConfigurationError):
        raise error
    if error is not None:
        log_failure(error)
        return 1
    return 0


async def _connect_and_run(
    name: str, cls: Callable[[Context], Service], settings: Settings, instance: str, shutdown: Shutdown
) -> None:
    bus = await _connect_unless(shutdown.draining, name, settings, instance)
    if bus is None:
        return
    try:
        await run_service(name, cls, settings, bus, instance, shutdown)
    finally:
        await bus.close()


async def run_service(
    name: str,
    cls: Callable[[Context], Service],
    settings: Settings,
    bus: Bus,
    instance: str,
    shutdown: Shutdown | None = None,
) -> None:
    """Runs a service on a bus until cancelled, or until it has drained, with heartbeats and discovery.

    Raises:
        ConfigurationError: the service cannot use a setting.
        BusUnavailable: there was no broker for too long.
        ExceptionGroup: the service failed in several places at once.
    """
    shutdown = shutdown or Shutdown()
    model = "" if name == "gateway" else model_folder.served_token(settings)
    keeper = StoreKeeper(bus.store) if name in KEEPING else None
    heartbeater = Heartbeater(bus, name, instance, model, lambda: keeper.problem if keeper is not None else "")
    service = cls(Context(settings, bus, instance, heartbeater.announce, shutdown.follows))
    await Responder(bus, name, instance, settings, lambda: heartbeater.beat_of(service)).listen()
    clock = ClockMonitor(bus.store) if name in TIMED else None
    reporter = Reporter(bus, settings, heartbeater, service, clock)
    await reporter.listen()
    await tracing.listen(bus)
    serving = asyncio.create_task(service.run())
    heartbeats = asyncio.create_task(heartbeater.run(service))
    draining = asyncio.create_task(_drain(service, heartbeater, shutdown, settings.drain_timeout))
    tasks = {serving, heartbeats, draining}
    if clock is not None:
        tasks.add(asyncio.create_task(clock.run()))
    if keeper is not None:
        tasks.add(asyncio.create_task(keeper.run()))
    if tracing.wants_collector("METRICS"):
        from pagewire.shared.process import otlp_metrics  # slow to import

        tasks.add(asyncio.create_task(otlp_metrics.push(reporter.report)))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _drain(service: Service, heartbeater: Heartbeater, shutdown: Shutdown, timeout: float) -> None:
    """Waits until the service is told to drain, and drains it."""
    await shutdown.draining.wait()
    _log.info("draining", seconds=timeout)
    heartbeater.drain()
    try:
        async with asyncio.timeout(timeout):
            await service.drain()
    except TimeoutError:
        _log.warning("not_drained_in_time", seconds=timeout)
    finally:
        shutdown.close()


async def _connect_unless(draining: asyncio.Event, name: str, settings: Settings, instance: str) -> Bus | None:
    """Connects to the broker; returns None if the service is told to end before that."""
    connecting = asyncio.create_task(connect_with_retry(name, settings, instance))
    waiting = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({connecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            return connecting.result()
        return None
    finally:
        waiting.cancel()
        connecting.cancel()
        await asyncio.wait({connecting})


def inboxes_of(name: str) -> str:
    """Returns the prefix of a service's inboxes."""
    # The gateway is a client of the tokenizers, which answer only to the inboxes of clients.
    return subjects.gateway_inbox("") if name == "gateway" else subjects.service_inbox(name)


async def connect_with_retry(name: str, settings: Settings, instance: str) -> Bus:
    """Connects to the broker. Retries without end: services and broker, with its JetStream, may start in any order."""
    url = nats_urls(settings)
    user, password = credentials.of_service(settings, name)
    tls = credentials.tls(settings)
    delay = 0.1
    while True:
        try:
            bus = await nats.connect(
                url,
                name=f"{name}/{instance}",
                user=user,
                password=password,
                inbox_prefix=inboxes_of(name),
                connect_timeout=1.0,
                max_store=settings.nats_max_store,
                replicas=store_replicas(settings),
                create_streams=name in STORING,
                tls=tls,
            )
        except (BusUnavailable, RequestTimeout) as error:
            event = "store_unavailable" if isinstance(error, StorageRefused) else "broker_unreachable"
            _log.warning(event, url=without_logins(url), reason=str(error), retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)
        else:
            _log.info("connected", url=without_logins(url))
            return bus
