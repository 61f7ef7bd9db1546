"""The programs of a stack: the processes of each service, their names, and the settings of each."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import served_name
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import speculation

PIPELINE = ("executor", "scheduler", "detokenizer", "tokenizer")
"""The services that every request passes; the slowest to start comes first. Each model has its own."""
REPLICATED = ("executor", "scheduler")
"""The services with one process per replica."""
GATEWAY = "gateway"
"""The service of which a stack has one for all models."""
LIGHT = ("tokenizer", "scheduler", "detokenizer", GATEWAY)
"""The services that do without PyTorch."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class ServiceProgram:
    """A service that a stack runs as a process."""

    name: str
    """Name of the process, unique within the stack."""
    service: str
    settings: Settings
    """Settings of the service, with those of its model."""
    replica: int | None = None
    """Number of the replica, from 0; None: there is only one."""

    @property
    def model(self) -> str:
        """Served name of the model; empty for a gateway, which serves all."""
        return "" if self.service == GATEWAY else served_name(self.settings)

    @property
    def command(self) -> tuple[str, ...]:
        """Command line of the process."""
        return sys.executable, "-P", "-m", f"pagewire.services.{self.service}"

    @property
    def spare(self) -> tuple[str, ...]:
        """Command line of the process that imports ahead: one for executors, which need PyTorch, one for the others."""
        services = ("executor",) if self.service == "executor" else LIGHT
        return sys.executable, "-P", "-m", "pagewire.embedded.spare", *services

    def gpu(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the variable that shows an executor replica only its own GPUs among the visible ones: one per rank.

        Raises:
            ConfigurationError: fewer GPUs are visible than the replicas need.
        """
        if self.service != "executor" or self.settings.device != "cuda" or self.replica is None:
            return {}
        visible = [gpu for gpu in environment.get(VISIBLE_GPUS, "").split(",") if gpu]
        ranks = self.settings.tensor_parallel_size
        first, last = self.replica * ranks, (self.replica + 1) * ranks
        if visible and last > len(visible):
            raise ConfigurationError(
                f"{VISIBLE_GPUS} has {len(visible)} GPUs, too few for {self.name}: lower --data-parallel-size"
            )
        return {VISIBLE_GPUS: ",".join(visible[first:last] if visible else map(str, range(first, last)))}


def programs_of(settings: Settings, services: Sequence[str], *, several: bool = False) -> list[ServiceProgram]:
    """Returns the programs of a model's services. Where there are `several` models, their names end with the model's.

    >>> [program.name for program in programs_of(Settings(model="m", data_parallel_size=2), PIPELINE, several=True)]
    ['executor-0/m', 'executor-1/m', 'scheduler-0/m', 'scheduler-1/m', 'detokenizer/m', 'tokenizer/m']
    """
    suffix = f"/{served_name(settings)}" if several else ""
    programs = []
    for service in services:
        count = replicas_of(service, settings)
        for replica, name in enumerate(program_names(service, count)):
            programs.append(ServiceProgram(name + suffix, service, settings, replica if count > 1 else None))
    return programs


def program_names(service: str, count: int) -> list[str]:
    """Returns the names of a service's processes: `scheduler`, or `scheduler-0`, `scheduler-1` if there are several."""
    return [service] if count == 1 else [f"{service}-{replica}" for replica in range(count)]


def replicas_of(service: str, settings: Settings) -> int:
    """Returns the number of processes of a service."""
    return settings.data_parallel_size if service in REPLICATED else 1


def describe_replicas(settings: Settings) -> str:
    """Returns a sentence on how the replicas share this machine."""
    replicas, cores = settings.data_parallel_size, len(os.sched_getaffinity(0))
    if settings.device != "cpu":
        return f"{replicas}, each on its own device"
    return f"{replicas} on {cores} cores{', which they share' if replicas > cores else ''}"


def check_supported(settings: Settings) -> None:
    """Raises ConfigurationError for settings that `pagewire serve` does not support."""
    if not settings.nats_url:
        for name in ("nats_secrets", "nats_tls_ca", "nats_tls_cert", "nats_tls_key"):
            if getattr(settings, name):
                flag = name.replace("_", "-")
                raise ConfigurationError(f"--{flag} is for a broker of your own: give --nats-url too, or leave it out")
    speculation(settings)
