"""The check that no web page uses a server without a key on this machine.

A page can send simple requests to any address, and by DNS rebinding have its own name mean this machine. A server on
loopback that needs no key therefore refuses names and web sites that are not allowed. Everywhere a body must be JSON,
which a page can send only with the consent of CORS.
"""

from collections.abc import Awaitable, Collection
from ipaddress import ip_address
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.http_counter import STATUS
from pagewire.shared.settings.config import Settings, names

LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Ends of names that no public name server has."""
JSON = (b"application/json", b"text/json")
"""Media types of JSON, beside those that end with `+json`."""
OWN_SITES = (b"", b"same-origin", b"none")
"""Values of `Sec-Fetch-Site` in requests of the server's own pages, of a browser's user, and of other programs."""


class AllowedPages(NamedTuple):
    """The names in `Host` and the web sites in `Origin` that a server answers; `*`: all."""

    hosts: Collection[str]
    origins: Collection[str]


class _Refusal(NamedTuple):
    status: int
    kind: str
    message: str


def allowed_pages(settings: Settings) -> AllowedPages | None:
    """Returns whom a server answers; None: everybody, since it needs a key or is no server of this machine alone."""
    if settings.api_key or settings.api_key_file or not _is_loopback(settings.host):
        return None
    return AllowedPages({settings.host, *names(settings.allowed_hosts)}, names(settings.allowed_origins))


class PageGuard:
    """Answers 403 to a foreign `Host` or `Origin`, and 415 to a body that is not JSON, or that a page sends untyped."""

    def __init__(self, app: ASGIApp, allowed: AllowedPages | None) -> None:
        self._app = app
        self._allowed = allowed

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Passes the request on, or refuses it."""
        host = origin = content_type = site = b""
        for name, value in scope["headers"]:
            if name == b"content-type":
                content_type = value
            elif name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        refusal = self._refusal(host.decode("latin-1"), origin.decode("latin-1"))
        may_lack_type = not content_type and not origin and site in OWN_SITES  # as curl and scripts send bodies
        if refusal is None and scope["method"] == "POST" and not (may_lack_type or _is_json(content_type)):
            shown = content_type.decode("latin-1") or "is missing"
            refusal = _Refusal(415, "unsupported_media_type", f"Content-Type {shown}: send application/json")
        if refusal is None:
            return self._app(scope, receive, send)
        scope[STATUS] = refusal.status
        content = errors.body(*refusal, scope["path"])
        return Response(content, refusal.status, None, "application/json")(scope, receive, send)

    def _refusal(self, host: str, origin: str) -> _Refusal | None:
        if self._allowed is None:
            return None
        hosts, origins = self._allowed
        if host and not ("*" in hosts or _is_local(name := _name_of(host)) or name in hosts):
            hint = f"this server answers on this machine's own names: allow this one with --allowed-hosts {name}"
            return _Refusal(403, "host_not_allowed", f"Host {host}: {hint}")
        if origin and not ("*" in origins or origin in origins or origin.partition("://")[2] == host):
            hint = "pages of other sites may not use this server: allow this one with --allowed-origins"
            return _Refusal(403, "origin_not_allowed", f"Origin {origin}: {hint} {origin}")
        return None


def _name_of(host: str) -> str:
    """Returns the name or the address in a `Host` header, without the port.

    >>> _name_of("localhost:8000"), _name_of("[::1]:8000"), _name_of("example.com.")
    ('localhost', '::1', 'example.com')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_local(name: str) -> bool:
    """Returns whether no page can have made the name mean this machine: it is an address or a local name.

    >>> _is_local("10.0.0.1"), _is_local("host.docker.internal"), _is_local("evil.example")
    (True, True, False)
    """
    return name == "localhost" or name.endswith(LOCAL_SUFFIXES) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_json(content_type: bytes) -> bool:
    """Returns whether a `Content-Type` means JSON.

    >>> _is_json(b"application/json; charset=utf-8"), _is_json(b"text/plain")
    (True, False)
    """
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type in JSON or media_type.endswith(b"+json")
