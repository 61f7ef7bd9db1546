"""The file of API keys: what it may hold, who a key belongs to, and how a change takes effect."""

import asyncio
import os
from pathlib import Path

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.security import api_keys
from pagewire.shared.security.api_keys import ApiKeys
from tests.support.waiting import PATIENCE

ALICE, BOB = "alice-key-0123456789", "bob:key:0123456789"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\n\nalice:{ALICE}\n  bob:{BOB}  \n")
    return path


def test_a_key_belongs_to_the_name_on_its_line(file: Path) -> None:
    keys = ApiKeys.load(file)
    assert keys.find(ALICE) == "alice"
    assert keys.find(BOB.encode()) == "bob"
    assert keys.passwords == {"alice": ALICE, "bob": BOB}


@pytest.mark.parametrize("token", ["", "alice", ALICE[:-1], ALICE + "x", "bob", "é" * 20])
def test_an_unknown_token_has_no_tenant(file: Path, token: str) -> None:
    assert ApiKeys.load(file).find(token) is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("alice", "no colon"),
        ("al ice:0123456789abcdef", "the name"),
        (":0123456789abcdef", "the name"),
        ("gateway:0123456789abcdef", "reserved"),
        ("alice:0123456789abcdef\nalice:fedcba9876543210", "line 2: the name alice is taken"),
        ("alice:0123456789abcdef\nbob:0123456789abcdef", "line 2: an earlier line has the same key"),
        ("alice:short-key", "at least 16"),
        ("alice:0123456789 abcdef", "at least 16"),
        ("alice:$2a$10$0123456789abcdef", "begin with"),
        ("alice:0123456789abcdé-", "at least 16"),
    ],
)
def test_an_invalid_line_is_refused_without_naming_the_key(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        ApiKeys.load(path)
    assert "0123456789" not in str(refusal.value)
    assert "short-" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read api-key-file"):
        ApiKeys.load(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        ApiKeys.load(tmp_path / "binary")


def test_a_change_of_the_file_takes_effect(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "WATCH_INTERVAL", 0.01)

    async def scenario() -> None:
        keys = ApiKeys.load(file)
        changed = asyncio.Event()
        watching = asyncio.create_task(keys.watch(changed.set))
        try:
            _replace(file, f"carol:{ALICE}\n")
            async with asyncio.timeout(PATIENCE):
                await changed.wait()
            assert (keys.find(ALICE), keys.find(BOB)) == ("carol", None)
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    asyncio.run(scenario())


def test_an_invalid_change_leaves_the_keys_as_they_were(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api_keys, "WATCH_INTERVAL", 0.01)

    async def scenario() -> None:
        keys = ApiKeys.load(file)
        changed = asyncio.Event()
        watching = asyncio.create_task(keys.watch(changed.set))
        try:
            output = ""
            _replace(file, "carol")
            async with asyncio.timeout(PATIENCE):
                while "api_keys_refused" not in output:
                    await asyncio.sleep(0.01)
                    output += capsys.readouterr().out
            assert keys.find(ALICE) == "alice"
            _replace(file, f"carol:{ALICE}")
            async with asyncio.timeout(PATIENCE):
                await changed.wait()
            assert keys.find(ALICE) == "carol"
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    asyncio.run(scenario())


def _replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)
