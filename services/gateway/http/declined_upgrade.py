"""Takes the offer of another protocol out of a request: a server may ignore it (RFC 9110, 7.8)."""

from collections.abc import Iterable

_KEPT_OPTIONS = frozenset({b"close", b"keep-alive"})
"""Options of a Connection header that do not belong to an offer."""


def without_offer(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns a header to be parsed again: a parser that has seen an offer reads no body.

    >>> without_offer(b"POST", b"/", "1.1", [(b"host", b"x"), (b"connection", b"Upgrade"), (b"upgrade", b"h2c")])
    b'POST / HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n'
    """
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            lines += [b"connection: " + option for option in options if option.lower() in _KEPT_OPTIONS]
        elif name != b"upgrade":
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
