"""Checks the machine, the settings, the model and the connection; exit code 1 if a check fails."""

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from pagewire.commands import session
from pagewire.commands.stack_at_port import TIMEOUT, at_port
from pagewire.embedded.broker import find_server
from pagewire.embedded.cluster import check_servers
from pagewire.embedded.programs import describe_replicas
from pagewire.kernels.cpu import build
from pagewire.shared.errors import BusUnavailable, ConfigurationError, PagewireError
from pagewire.shared.models import model_folder
from pagewire.shared.models.named_models import DEFAULT, NAMED_MODELS
from pagewire.shared.process import device_choice
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import Settings, nats_urls, uses_flashinfer, without_logins

MIN_FREE_MEMORY = 2 << 30
"""Bytes of free memory that a stack with the bundled model needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all settings."""
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per check."""
    failed = False
    try:
        settings = flags.read_settings(arguments)
    except ConfigurationError as error:
        print(f"FAILED settings: {error}")
        return 1
    print("ok     settings")
    for name, check in checks(settings):
        try:
            print(f"ok     {name}: {check()}")
        except PagewireError as error:
            failed = True
            print(f"FAILED {name}: {error}")
    return 1 if failed else 0


def checks(settings: Settings) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the name and function of each check, which returns a finding or raises an error with advice."""
    yield "machine", _machine
    if settings.device == device_choice.AUTO:
        choice = device_choice.choose()
        settings = msgspec.structs.replace(settings, device=choice.device)
        yield "device", lambda: f"{choice.device}: {choice.reason}"
    if settings.device == "cpu":
        yield "kernels", _kernels
    if settings.device == "cuda":
        yield "GPU", _gpu
        if uses_flashinfer(settings):
            yield "FlashInfer", _flashinfer
    yield "replicas", lambda: describe_replicas(settings)
    yield "servers", lambda: check_servers(settings)
    yield "model", lambda: _model(settings)
    if not settings.nats_url:
        yield "broker", find_server
    yield "connection", lambda: asyncio.run(_connection(settings))


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if free < MIN_FREE_MEMORY:
        raise ConfigurationError(
            f"{free >> 20} MiB of memory are free, {MIN_FREE_MEMORY >> 20} MiB are needed: end other programs"
        )
    return f"Python {sys.version.partition(' ')[0]}, {cores} cores, {free >> 20} MiB of memory free"


def _kernels() -> str:
    started = time.monotonic()
    build.load()
    return f"compiled, in {time.monotonic() - started:.1f} s"


def _gpu() -> str:
    from pagewire.services.executor.devices.cuda.machine import check_machine  # Triton takes a second to load

    return check_machine()


def _flashinfer() -> str:
    from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import find_flashinfer  # imports torch

    return find_flashinfer()


def _model(settings: Settings) -> str:
    named = NAMED_MODELS.get(settings.model or DEFAULT.name)
    if named is not None and not named.is_fetched:
        return f"{named.name} is fetched at the first start, or now by `pagewire pull {named.name}`"
    path = model_folder.folder_of(settings)
    config = model_folder.read_config(path)
    weights = model_folder.weight_files(path)
    if not weights and settings.load_format != "dummy":
        raise ConfigurationError(f"{path} has no *.safetensors: fetch the weights in that format")
    tokenizer = model_folder.tokenizer_folder(settings)
    if tokenizer.is_dir() and not (tokenizer / "tokenizer.json").exists():
        raise ConfigurationError(f"{tokenizer} has no tokenizer.json: fetch it beside the weights")
    size = sum(file.stat().st_size for file in weights)
    context = model_folder.max_model_len(settings, config)
    return f"{model_folder.served_name(settings)}, {size >> 20} MiB of weights, context {context}"


async def _connection(settings: Settings) -> str:
    url = nats_urls(settings)
    try:
        settings = await at_port(settings)
        url = nats_urls(settings)
        async with session.client_of(settings) as client:
            names = ", ".join(info.name for info in await client.models())
    except BusUnavailable:
        if settings.nats_url:
            raise
        return f"no stack is running at {without_logins(url)}; `pagewire serve` starts one{_port(settings)}"
    return f"{without_logins(url)} serves {names}"


def _port(settings: Settings) -> str:
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.settimeout(TIMEOUT)
        if probe.connect_ex((settings.host, settings.port)) == 0:
            raise ConfigurationError(f"another program listens on port {settings.port}: choose another --port")
    return f" on port {settings.port}"
