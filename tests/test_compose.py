"""`compose.yaml` without Docker: its commands and its environment, in processes on this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from pagewire.embedded.broker import find_server
from pagewire.embedded.programs import REPLICATED
from pagewire.shared.process.runtime import CLOSE_WITHIN
from pagewire.shared.security.permissions import ROLES
from pagewire.shared.settings.config import FIELDS, Settings
from pagewire.shared.settings.environment import variable
from tests.support.processes import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
SECRETS = {"PAGEWIRE_API_KEY": '2 "Secret"'}
USERS = (*ROLES, "api-keys")
"""The files in the folder of secrets."""
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}")
SERVICES = ("executor", "scheduler", "detokenizer", "tokenizer", "gateway")


def compose() -> dict[str, Any]:
    """The services, with variables substituted as Docker does it."""
    services: dict[str, Any] = substitute(yaml.safe_load(ROOT.joinpath("compose.yaml").read_text())["services"])
    return services


def substitute(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: substitute(part) for name, part in value.items()}
    if isinstance(value, list):
        return [substitute(part) for part in value]
    return VARIABLE.sub(_value, value) if isinstance(value, str) else value


def _value(match: re.Match[str]) -> str:
    name, default = match[1], match[2]
    assert name in SECRETS or default is not None, f"{name} has no default"
    return SECRETS.get(name, default or "")


def command_of(service: dict[str, Any]) -> list[str]:
    """The command, with the programs of this environment."""
    program, *arguments = service["command"]
    return [{"python": sys.executable}.get(program, program), *arguments]


@contextmanager
def process(command: list[str], environment: dict[str, Any]) -> Iterator["subprocess.Popen[bytes]"]:
    inherited = {"PATH": f"{Path(find_server()).parent}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/")}
    running = subprocess.Popen(
        command, env=inherited | {name: str(value) for name, value in environment.items()}, cwd=ROOT
    )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            assert running.wait(15) in {0, 1}
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            raise


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ready(name: str, environment: dict[str, Any]) -> bool:
    """Runs the health check of a service's container."""
    command = [sys.executable, "-P", "-m", "pagewire", "status", "--service", name, "--here"]
    variables = os.environ | {variable: str(value) for variable, value in environment.items()}
    return subprocess.run(command, env=variables, capture_output=True, check=False).returncode == 0


def mount(folder: Path, service: dict[str, Any]) -> str:
    """A folder with the secrets of one container."""
    folder.mkdir()
    for user in service["secrets"]:
        (folder / user).write_text("alice:alice-key-0123456789\n" if user == "api-keys" else f"1secret of {user}\n")
    return str(folder)


async def test_the_containers_serve_a_request(tmp_path: Path) -> None:
    services = compose()
    nats, http, monitor = free_port(), free_port(), free_port()
    with ExitStack() as running:
        # An address, a port and a folder of its own stand for Docker's network and volumes.
        script, folder, flag, config = command_of(services["nats"])
        assert folder == "/run/secrets"
        secrets = mount(tmp_path / "nats", services["nats"])
        moved = tmp_path / "nats.conf"
        moved.write_text(ROOT.joinpath(config).read_text().replace("/data", str(tmp_path / "data")))
        place = [flag, str(moved), "--addr", "127.0.0.1", "--port", str(nats), "--http_port", str(monitor)]
        running.enter_context(process([script, secrets, *place], services["nats"]["environment"]))
        await until(lambda: listens(nats))
        environments = {}
        for name in SERVICES:
            secrets = mount(tmp_path / name, services[name])
            environment = services[name]["environment"] | {"PAGEWIRE_NATS_URL": f"nats://127.0.0.1:{nats}"}
            if name == "gateway":
                environment |= {"PAGEWIRE_HOST": "127.0.0.1", "PAGEWIRE_PORT": http}
            environments[name] = {key: str(value).replace(folder, secrets) for key, value in environment.items()}
            running.enter_context(process(command_of(services[name]), environments[name]))
        await until(lambda: ready("gateway", environments["gateway"]))
        assert all(ready(name, environments[name]) for name in SERVICES)
        key = SECRETS["PAGEWIRE_API_KEY"]
        with openai.OpenAI(base_url=f"http://127.0.0.1:{http}/v1", api_key=key, max_retries=0) as client:
            answer = client.completions.create(model="bundled", prompt="Once upon a time", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


def test_every_service_is_there_and_is_watched() -> None:
    services = compose()
    assert set(services) == {"nats", *SERVICES}
    for name in SERVICES:
        assert services[name]["secrets"] == [name, "api-keys"][: 2 if name == "gateway" else 1]
        assert services[name]["command"] == ["python", "-m", f"pagewire.services.{name}"]
        assert services[name]["healthcheck"]["test"] == ["CMD", "deploy/healthy.sh", name]
        assert all(rule["condition"] == "service_healthy" for rule in services[name]["depends_on"].values())


def test_one_variable_sets_the_replicas() -> None:
    services = compose()
    for name in SERVICES:
        assert services[name]["environment"]["PAGEWIRE_DATA_PARALLEL_SIZE"] == "1"
        assert services[name].get("deploy") == ({"mode": "replicated", "replicas": "1"} if name in REPLICATED else None)


def test_every_variable_is_a_setting() -> None:
    settings = {variable(name) for name in FIELDS} | {"HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
    for service in compose().values():
        assert set(service["environment"]) <= settings


def test_services_have_time_to_drain() -> None:
    for name, service in compose().items():
        if name != "nats":
            assert float(service["stop_grace_period"].removesuffix("s")) > Settings().drain_timeout + CLOSE_WITHIN


def test_only_loopback_is_published() -> None:
    ports = [port for service in compose().values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_each_secret_is_a_file_that_make_writes() -> None:
    files = yaml.safe_load(ROOT.joinpath("compose.yaml").read_text())["secrets"]
    assert files == {user: {"file": f"./secrets/{user}"} for user in USERS}
    written = re.search(r"^SERVICES := (.*)$", ROOT.joinpath("Makefile").read_text(), re.MULTILINE)
    assert written is not None
    assert set(written[1].split()) == set(ROLES)


def test_no_password_is_in_the_file() -> None:
    text = ROOT.joinpath("compose.yaml").read_text()
    for name in SECRETS:
        assert all(f"${{{name}:?" in line for line in text.splitlines() if line.strip().startswith(f"{name}:"))
