"""Runs one service as a process: settings, logs, traces, the bus, heartbeats, signals and the exit code."""

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import structlog
import uvloop

from pagewire.shared import flags, logs, subjects, telemetry
from pagewire.shared.bus import Bus, nats
from pagewire.shared.config import Settings, nats_urls, store_replicas
from pagewire.shared.context import Context, Service
from pagewire.shared.discovery import Responder
from pagewire.shared.errors import BusUnavailable, ConfigurationError
from pagewire.shared.heartbeater import Heartbeater
from pagewire.shared.process import INSTANCE, die_with_parent, refuse_settings, use_batch_scheduling

CLOSE_WITHIN = 8.0
"""Seconds that a service has to finish its work after SIGINT or SIGTERM."""

GC_THRESHOLD = 50_000
"""New objects between two garbage collections. A busy service holds tens of thousands, few of them in cycles."""

_log = structlog.get_logger()


def main(name: str, cls: Callable[[Context], Service]) -> NoReturn:
    """Entry point of `python -m pagewire.services.<name>`.

    Exit codes: 0 after a signal, 1 when the service fails, 2 when a setting is refused.
    """
    die_with_parent()
    use_batch_scheduling()
    parser = argparse.ArgumentParser(prog=f"python -m pagewire.services.{name}")
    flags.add_settings(parser)
    try:
        settings = flags.read_settings(parser.parse_args())
        gc.freeze()  # objects of the imported libraries live until the end
        gc.set_threshold(GC_THRESHOLD)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_process(name, cls, settings))
    except ConfigurationError as error:
        refuse_settings(f"{name}: {error}")
        code = 2
    sys.exit(code)


async def _process(name: str, cls: Callable[[Context], Service], settings: Settings) -> int:
    instance = os.environ.get(INSTANCE) or subjects.new_instance()
    logs.configure(settings, service=name, instance=instance)
    telemetry.configure(name, instance, settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(_connect_and_run(name, cls, settings, instance))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if serving.done():
        return _exit_code(serving)
    _log.info("stopping")
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
        _log.error("service_failed", exc_info=error)
        return 1
    return 0


async def _connect_and_run(name: str, cls: Callable[[Context], Service], settings: Settings, instance: str) -> None:
    bus = await connect_with_retry(name, settings, instance)
    try:
        await run_service(name, cls, settings, bus, instance)
    finally:
        await bus.close()


async def run_service(
    name: str, cls: Callable[[Context], Service], settings: Settings, bus: Bus, instance: str
) -> None:
    """Runs a service on a bus until cancelled, with heartbeats and discovery.

    Raises:
        ConfigurationError: the service cannot use a setting.
        BusUnavailable: there was no broker for too long.
        ExceptionGroup: the service failed in several places at once.
    """
    heartbeater = Heartbeater(bus, name, instance)
    service = cls(Context(settings, bus, instance, heartbeater.announce))
    await Responder(bus, name, instance, settings, service).listen()
    serving = asyncio.create_task(service.run())
    heartbeats = asyncio.create_task(heartbeater.run(service))
    try:
        done, _ = await asyncio.wait({serving, heartbeats}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        heartbeats.cancel()
        serving.cancel()
        await asyncio.wait({serving, heartbeats})


async def connect_with_retry(name: str, settings: Settings, instance: str) -> Bus:
    """Connects to the broker. Retries without end, because services and broker may start in any order."""
    url = nats_urls(settings)
    # The gateway is a client of the tokenizers, which answer only to the inboxes of clients.
    prefix = "_INBOX" if name == "gateway" else subjects.SERVICE_INBOX
    delay = 0.1
    while True:
        try:
            bus = await nats.connect(
                url,
                name=f"{name}/{instance}",
                user=settings.nats_user,
                password=settings.nats_password,
                inbox_prefix=prefix,
                connect_timeout=1.0,
                max_store=settings.nats_max_store,
                replicas=store_replicas(settings),
            )
        except BusUnavailable as error:
            _log.warning("broker_unreachable", url=url, reason=str(error), retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)
        else:
            _log.info("connected", url=url)
            return bus
