"""Agents and SDKs, each in an environment of its own, against a model that plays a script.

`make test-clients RECORD=1` also writes their requests to tests/data/clients.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.clients.recording import Relay, save
from tests.pagewire.serving import serving
from tests.support.scripted_model import write_scripted_model

SCRIPTS = Path(__file__).with_name("scripted")
REQUIREMENTS = (
    "openai==3.57.0",
    "anthropic==2.14.0",
    "litellm==1.110.2",
    "langchain-openai==1.7.4",
    "langchain-anthropic==1.7.10",
    "pydantic-ai-slim[anthropic,openai]==2.68.0",
    "instructor==1.17.0",
    "openai-agents==0.24.0",
    "ollama==0.6.3",
    "langchain-ollama==1.1.0",
)
CODEX, CLAUDE_CODE = "@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197"
VERCEL = (
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@ai-sdk/anthropic@3.0.140",
    "zod@4.6.7",
)
SECONDS = 600.0
"""Limit of one client."""


@dataclass(frozen=True)
class Client:
    """A program that asks the server."""

    name: str
    version: str
    command: tuple[str | Path, ...]
    """Without the URL of the server, which goes behind the first two parts."""


def find_clients(environments: Path, install: Callable[[str], Path]) -> list[Client]:
    """Installs all clients and returns them; those of the system, curl and Java, only where they are."""
    clients = []
    for requirement in REQUIREMENTS:
        package, _, version = requirement.partition("==")
        name = package.partition("[")[0]
        clients.append(Client(name, version, (install(requirement), _script(name.removesuffix("-slim")))))
    if npm := shutil.which("npm"):
        modules = _install_npm(npm, environments / "npm")
        for package, script in ((CODEX, "codex"), (CLAUDE_CODE, "claude-code")):
            program = modules / ".bin" / script.partition("-")[0]
            clients.append(Client(script, package.rpartition("@")[2], (sys.executable, _script(script), program)))
        vercel = shutil.copy(SCRIPTS / "vercel.mjs", modules.parent)
        clients.append(Client("vercel-ai", VERCEL[0].rpartition("@")[2], ("node", vercel)))
    if shutil.which("curl"):
        version = subprocess.run(["curl", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[1]
        clients.append(Client("curl", version, (sys.executable, _script("curl"))))
    if shutil.which("java"):
        version = subprocess.run(["java", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[1]
        clients.append(Client("jdk", version, ("java", SCRIPTS / "JdkClient.java")))
    return clients


def run_scripted_clients(clients: list[Client], *, record: bool) -> list[tuple[bool, str]]:
    """Runs the clients; returns whether each passed, and a row of the table."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        model = write_scripted_model(Path(folder) / "scripted")
        flags = ("--dtype", "float32", "--served-model-name", "scripted", "--num-kv-blocks", "8192")
        with serving(str(model), *flags) as served:
            for client in clients:
                with Relay(served.http) as relay:
                    results.append(_run(client, relay.url))
                    if record:
                        save(client.name, relay.requests(), served.http)
    return results


def _run(client: Client, url: str) -> tuple[bool, str]:
    command = (*client.command[:2], url, *client.command[2:])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    passed = done.returncode == 0
    result = "passed" if passed else "failed"
    return passed, f"| {client.name} | {client.version} | {done.stdout.strip()} | {result} |"


def _script(name: str) -> Path:
    return SCRIPTS / f"{name.replace('-', '_')}_client.py"


def _install_npm(npm: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    packages = (CODEX, CLAUDE_CODE, *VERCEL)
    subprocess.run([npm, "install", "--silent", "--no-audit", "--no-fund", *packages], cwd=folder, check=True)
    modules = folder / "node_modules"
    subprocess.run(["node", "install.cjs"], cwd=modules / "@anthropic-ai" / "claude-code", check=True)
    return modules
