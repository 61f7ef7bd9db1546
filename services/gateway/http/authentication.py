"""The check of the API key of HTTP requests."""

import hmac
from collections.abc import Callable, Collection, Iterable
from hashlib import sha256

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.http_counter import STATUS
from pagewire.shared.security.api_keys import ApiKeys

PUBLIC_PATHS = frozenset({"/health", "/livez", "/ping", "/readyz"})
"""Paths that need no key: probes of a service's health have none."""
OPERATOR_PATHS = frozenset({"/load", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths that need the key of `--api-key`: they show the load of all tenants, or change what all are served."""

FindTenant = Callable[[bytes], str | None]
"""Returns the tenant of a key, "" for the key of `--api-key`, and None for an unknown key."""


def find_tenant(api_key: str, keys: ApiKeys | None) -> FindTenant | None:
    """Returns the function that finds the tenant of a key; None if no keys are set, so that none is needed.

    Args:
        api_key: the key of `--api-key`; empty: there is none.
        keys: the keys of tenants; None: there are none.
    """
    if not api_key and keys is None:
        return None
    # The comparison of digests takes the same time whatever the length of the key.
    expected = sha256(api_key.encode()).digest() if api_key else b""

    def find(key: bytes) -> str | None:
        if hmac.compare_digest(sha256(key).digest(), expected):
            return ""
        return keys.find(key) if keys is not None else None

    return find


class Authentication:
    """Answers 401 to a request without a valid key, except at public paths, and 403 to tenants at `OPERATOR_PATHS`.

    It notes the tenant of the other requests as `scope["tenant"]`, which is missing if no keys are set.
    """

    def __init__(self, app: ASGIApp, find: FindTenant, public_paths: Collection[str] = ()) -> None:
        """`public_paths`: paths that need no key, beside `PUBLIC_PATHS`."""
        self._app = app
        self._find = find
        self._public_paths = PUBLIC_PATHS.union(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401 or 403."""
        if scope["path"] not in self._public_paths:
            tenant = self._find(key) if (key := _key(scope["headers"])) is not None else None
            if tenant is None:
                scope[STATUS] = 401
                hint = "send the API key as `Authorization: Bearer KEY`"
                content = errors.body(401, "invalid_api_key", hint, scope["path"])
                headers = {"WWW-Authenticate": "Bearer"}
                await Response(content, 401, headers, "application/json")(scope, receive, send)
                return
            if tenant and scope["path"] in OPERATOR_PATHS:
                content = errors.body(403, "operators_only", f"{scope['path']} needs the key of --api-key")
                await Response(content, 403, None, "application/json")(scope, receive, send)
                return
            scope["tenant"] = tenant
        await self._app(scope, receive, send)


def _key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the key in OpenAI's header or in Anthropic's; None: there is no key, or there are different ones."""
    keys: set[bytes | None] = set()
    for name, value in headers:
        if name == b"x-api-key":
            keys.add(value)
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.add(key.strip() if scheme.lower() == b"bearer" else None)
    return keys.pop() if len(keys) == 1 else None
