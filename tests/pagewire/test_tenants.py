"""`pagewire serve --api-key-file` and the commands of tenants."""

from pathlib import Path

import pytest

from pagewire import Client
from tests.pagewire.serving import run, serving
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio]

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"


async def test_tenants_are_added_and_removed_at_run_time(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    with serving("--model", "bundled", "--api-key-file", str(keys)) as stack:
        bob = ["--nats-url", stack.nats, "--tenant", "bob", "--api-key", BOB]
        with Client(stack.nats, tenant="alice", api_key=ALICE) as client:
            text = client.generate("Once upon a time", max_tokens=4, temperature=0.0).choices[0].text
            command = ["generate", "Once upon a time", "--max-tokens", "4", "--temperature", "0", *bob]
            assert run(*command).stdout.endswith(f"{text}\n")
            assert run("status", *bob).returncode == 0
            nobody = run("status", "--nats-url", stack.nats)
            assert nobody.returncode == 2
            assert "refuses these credentials" in nobody.stderr
            keys.write_text(f"alice:{ALICE}\n")
            await until(lambda: run("status", *bob).returncode == 2)
            assert client.generate("Once upon a time", max_tokens=4, temperature=0.0).choices[0].text == text
