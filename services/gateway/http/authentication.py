"""Who may send HTTP requests: the check of the API key."""

import hmac
from collections.abc import Callable, Iterable
from hashlib import sha256

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.http_counter import STATUS
from pagewire.shared.security.api_keys import ApiKeys

PUBLIC = frozenset({"/health", "/livez", "/ping", "/readyz"})
"""Paths that need no key: whoever asks for the health of a service has none."""
OPERATORS = frozenset({"/metrics"})
"""Paths that need the key of `--api-key`: what they tell of is the load of all tenants."""

FindTenant = Callable[[bytes], str | None]
"""Returns the tenant whose key is given, "" for the key of `--api-key`, and None for any other key."""


def find_tenant(api_key: str, keys: ApiKeys | None) -> FindTenant | None:
    """Returns how to find the tenant of a key; None if no keys are set, so that none is needed."""
    if not api_key and keys is None:
        return None
    # The comparison of digests takes the same time whatever the length of the key.
    expected = sha256(api_key.encode()).digest() if api_key else b""

    def find(given: bytes) -> str | None:
        if hmac.compare_digest(sha256(given).digest(), expected):
            return ""
        return keys.find(given) if keys is not None else None

    return find


class Authentication:
    """Answers 401 to requests without a valid key, except for those of `PUBLIC`; notes who sends the others.

    Those of `OPERATORS` are answered with 403 if the key is that of a tenant.

    The name of the tenant is `scope["tenant"]`, which is not there if no keys are set.
    """

    def __init__(self, app: ASGIApp, find: FindTenant) -> None:
        self._app = app
        self._find = find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        if scope["path"] not in PUBLIC:
            tenant = self._find(key) if (key := _key(scope["headers"])) is not None else None
            if tenant is None:
                scope[STATUS] = 401
                hint = "send the API key as `Authorization: Bearer KEY`"
                content = errors.body(401, "invalid_api_key", hint, scope["path"])
                headers = {"WWW-Authenticate": "Bearer"}
                await Response(content, 401, headers, "application/json")(scope, receive, send)
                return
            if tenant and scope["path"] in OPERATORS:
                content = errors.body(403, "operators_only", f"{scope['path']} needs the key of --api-key")
                await Response(content, 403, None, "application/json")(scope, receive, send)
                return
            scope["tenant"] = tenant
        await self._app(scope, receive, send)


def _key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Returns the key that a request has, where OpenAI's clients put it or where Anthropic's do; None: none or two."""
    given = [(name, value) for name, value in headers if name in {b"authorization", b"x-api-key"}]
    if len(given) != 1:
        return None
    ((name, value),) = given
    if name == b"x-api-key":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None
