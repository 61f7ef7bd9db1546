"""Containers of one Compose project, with Docker or with podman."""

import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = os.environ.get("ENGINE", "docker")
"""`docker` or `podman`."""
COMPOSE = shlex.split(os.environ.get("COMPOSE", f"{ENGINE} compose"))
PROJECT = "pagewire-test"
HEALTH_INTERVAL = 8.0
"""Seconds between two health checks, as in compose.yaml, where this program has to run them."""


def run(*command: str, check: bool = True) -> str:
    """Runs a program to its end in the checkout; returns what it prints."""
    environment = {**os.environ, "COMPOSE_PROJECT_NAME": PROJECT}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=check)
    return done.stdout.strip()


def compose(*arguments: str) -> str:
    """Runs a command of Compose."""
    return run(*COMPOSE, *arguments)


def containers(service: str = "", *, ended: bool = False) -> list[str]:
    """The ids of the containers that run, or of all; of one service or of the project."""
    labels = {"project": PROJECT} | ({"service": service} if service else {})
    filters = (f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items())
    return run(ENGINE, "ps", "--quiet", *["--all"] * ended, *filters).split()


def restarts(container: str) -> int:
    """The number of restarts of a container."""
    return int(run(ENGINE, "inspect", container, "--format", "{{.RestartCount}}"))


def healthy(container: str) -> bool:
    """Whether the last health checks of a container have passed."""
    return run(ENGINE, "inspect", container, "--format", "{{.State.Health.Status}}", check=False) == "healthy"


def signal(container: str, name: str) -> None:
    """Sends a signal to what runs in a container below its init. Docker would not restart what it has killed itself."""
    run(ENGINE, "exec", container, "sh", "-c", f"kill -{name} $(cat /proc/1/task/1/children)", check=False)


@contextmanager
def health_checks() -> Iterator[None]:
    """Has podman run its health checks for as long as the block lasts: on its own it leaves that to systemd."""
    stop = threading.Event()

    def check(container: str) -> None:
        while not stop.is_set() and container in containers():
            run(ENGINE, "healthcheck", "run", container, check=False)
            stop.wait(HEALTH_INTERVAL)

    def check_all() -> None:
        checked: dict[str, threading.Thread] = {}
        while not stop.wait(1.0):
            for container in containers():
                if container not in checked or not checked[container].is_alive():
                    checked[container] = threading.Thread(target=check, args=(container,), daemon=True)
                    checked[container].start()

    needed = ENGINE == "podman" and not Path("/run/systemd/system").exists()
    thread = threading.Thread(target=check_all, daemon=True)
    if needed:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if needed:
            thread.join(60)
