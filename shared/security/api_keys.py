"""The API keys of `--api-key-file`: one tenant per line, `name:key`."""

import asyncio
import hmac
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import structlog

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.security.permissions import CLIENT, OPERATOR, ROLES

RESERVED = frozenset({CLIENT, OPERATOR, *ROLES})
"""Names of NATS users that are no tenants."""
MIN_KEY = 16
"""Minimum characters of a key: shorter ones can be guessed."""
WATCH_INTERVAL = 1.0
"""Seconds between two checks of the file. A change counts once the file has stayed the same for one interval, so that a
file that is still being written is not read."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_KEY = re.compile(r"[!-~]+")

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Version:
    """The properties of a file that change with its contents."""

    modified: int
    inode: int
    size: int


class ApiKeys:
    """The keys of a file. `watch` replaces them when the file changes.

    The file has one `name:key` per line; blank lines and lines that begin with `#` are ignored. A name has 1 to 32
    characters of A-Z, a-z, 0-9, `_` and `-`. A key has at least 16 printable ASCII characters, no space, and does not
    begin with `$`, which the NATS server would take for a hash. Keys stand there as they are, because the server
    must know them: only the owner of the process should be able to read the file.
    """

    def __init__(self, path: Path, keys: dict[str, str], version: _Version | None) -> None:
        """Use `load`."""
        self.path = path
        self._version = version
        self._set(keys)

    @classmethod
    def load(cls, path: str | Path) -> "ApiKeys":
        """Reads a file.

        Raises:
            ConfigurationError: the file cannot be read, or a line is invalid. The message never holds a key.
        """
        path = Path(path)
        version = _version(path)
        return cls(path, _read(path), version)

    @property
    def passwords(self) -> dict[str, str]:
        """The key of each tenant by name."""
        return dict(self._keys)

    def find(self, token: str | bytes) -> str | None:
        """Returns the name of the tenant whose key is `token`, None if there is none.

        The time depends only on the number of keys.
        """
        hashed = sha256(token.encode() if isinstance(token, str) else token).digest()
        tenant = None
        for name, digest in self._digests:
            if hmac.compare_digest(digest, hashed):
                tenant = name
        return tenant

    async def watch(self, on_change: Callable[[], None] = lambda: None) -> NoReturn:
        """Reads the file again whenever it changes, until cancelled; calls `on_change` when the keys differ.

        A file that cannot be read or is invalid is logged as an error, and the keys stay as they were.
        """
        read = current = self._version
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            previous, current = current, _version(self.path)
            if current == read or current != previous:
                continue
            read = current
            try:
                keys = _read(self.path)
            except ConfigurationError as error:
                _log.error("api_keys_refused", reason=str(error))
                continue
            if keys != self._keys:
                added, removed = sorted(keys.keys() - self._keys.keys()), sorted(self._keys.keys() - keys.keys())
                self._set(keys)
                _log.info("api_keys_changed", tenants=len(keys), added=added, removed=removed)
                on_change()

    def _set(self, keys: dict[str, str]) -> None:
        self._keys = keys
        self._digests = [(name, sha256(key.encode()).digest()) for name, key in keys.items()]


def _version(path: Path) -> _Version | None:
    """Returns the version of a file, None if there is no file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return _Version(stat.st_mtime_ns, stat.st_ino, stat.st_size)


def _read(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read api-key-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"api-key-file {path} is not UTF-8 text: write one name:key per line") from error
    keys: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        reason = _refusal(name, key, keys) if colon else "it has no colon: write name:key"
        if reason:
            raise ConfigurationError(f"api-key-file {path}, line {number}: {reason}")
        keys[name] = key
    return keys


def _refusal(name: str, key: str, keys: dict[str, str]) -> str:
    """Returns why a line is invalid; empty if it is not. The reason never holds the key."""
    if _NAME.fullmatch(name) is None:
        return "the name must have 1 to 32 characters of A-Z, a-z, 0-9, _ and -"
    if name in RESERVED:
        return f"the name {name} is reserved: choose another"
    if name in keys:
        return f"the name {name} is taken by an earlier line"
    if len(key) < MIN_KEY or _KEY.fullmatch(key) is None or key.startswith("$"):
        return f"a key must have at least {MIN_KEY} printable ASCII characters without spaces, and not begin with $"
    if key in keys.values():
        return "an earlier line has the same key"
    return ""
