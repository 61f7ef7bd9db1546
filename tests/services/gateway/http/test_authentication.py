import asyncio
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pagewire.services.gateway.http.authentication import Authentication, find_tenant
from pagewire.shared.security import api_keys
from pagewire.shared.security.api_keys import ApiKeys
from tests.support.waiting import until

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789ab"


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    file = tmp_path / "keys"
    file.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    return ApiKeys.load(file)


def test_no_request_needs_a_key_if_no_keys_are_set() -> None:
    assert find_tenant("", None) is None


def test_each_key_of_the_file_finds_its_tenant(keys: ApiKeys) -> None:
    find = find_tenant("", keys)
    assert find is not None
    assert [find(key.encode()) for key in (ALICE, BOB, "", "alice", ALICE + "x", ALICE[:-1])] == [
        "alice",
        "bob",
        *[None] * 4,
    ]


def test_the_key_of_the_flag_finds_no_tenant(keys: ApiKeys) -> None:
    find = find_tenant("secret", keys)
    assert find is not None
    assert [find(key) for key in (b"secret", ALICE.encode(), b"")] == ["", "alice", None]
    alone = find_tenant("secret", None)
    assert alone is not None
    assert [alone(key) for key in (b"secret", b"", b"Secret", b"\xff")] == ["", None, None, None]


async def ask(app: Authentication, *headers: tuple[bytes, bytes], path: str = "/v1/models") -> tuple[int, str]:
    """Returns the status and the tenant that the application sees."""
    answers: list[int] = []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            assert isinstance(message["status"], int)
            answers.append(message["status"])

    scope = {"type": "http", "path": path, "method": "GET", "headers": list(headers)}
    await app(scope, None, send)  # type: ignore[arg-type]
    return answers[0], scope.get("tenant", "nobody")  # type: ignore[return-value]


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


@pytest.mark.anyio
async def test_the_scope_of_a_request_has_the_tenant(keys: ApiKeys) -> None:
    find = find_tenant("", keys)
    assert find is not None
    app = Authentication(hello, find)
    assert await ask(app, (b"authorization", b"Bearer " + BOB.encode())) == (200, "bob")
    assert await ask(app, (b"authorization", b"bearer " + ALICE.encode())) == (200, "alice")
    assert await ask(app) == (401, "nobody")
    assert await ask(app, path="/health") == (200, "nobody")
    # Neither of two keys counts.
    twice = [(b"authorization", b"Bearer " + key.encode()) for key in (ALICE, BOB)]
    assert await ask(app, *twice) == (401, "nobody")
    assert await ask(app, twice[0], (b"x-api-key", BOB.encode())) == (401, "nobody")
    assert await ask(app, twice[0], (b"x-api-key", ALICE.encode())) == (200, "alice")


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/load", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_only_operators_see_the_load_of_all_tenants_and_change_adapters(keys: ApiKeys, path: str) -> None:
    find = find_tenant("operators-key", keys)
    assert find is not None
    app = Authentication(hello, find)
    assert await ask(app, (b"authorization", b"Bearer operators-key"), path=path) == (200, "")
    assert await ask(app, (b"authorization", b"Bearer " + ALICE.encode()), path=path) == (403, "nobody")
    assert await ask(app, path=path) == (401, "nobody")


@pytest.mark.anyio
async def test_a_change_of_the_file_counts_at_once(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "WATCH_INTERVAL", 0.01)
    find = find_tenant("", keys)
    assert find is not None
    app = Authentication(hello, find)
    watching = asyncio.create_task(keys.watch())
    carol = "carol-key-0123456789"
    keys.path.write_text(f"bob:{BOB}\ncarol:{carol}\n")
    await until(lambda: find(carol.encode()))
    assert await ask(app, (b"authorization", b"Bearer " + carol.encode())) == (200, "carol")
    assert await ask(app, (b"authorization", b"Bearer " + ALICE.encode())) == (401, "nobody")
    assert await ask(app, (b"authorization", b"Bearer " + BOB.encode())) == (200, "bob")
    watching.cancel()
    await asyncio.wait({watching})
