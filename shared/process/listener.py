"""The socket on which the gateway listens.

All gateways that a supervisor starts one after the other have the same socket. While one ends and the next one starts,
connections wait in its backlog, so that none is refused or reset.
"""

import os
import socket

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.linux_process import LISTENER

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 chooses a free port.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(
            f"cannot listen on {bracketed(host)}:{port}: {reason}; choose another --port"
        ) from error


def bracketed(host: str) -> str:
    """Returns a host as URLs have it: an address of IPv6 stands in brackets.

    >>> bracketed("::1"), bracketed("127.0.0.1")
    ('[::1]', '127.0.0.1')
    """
    return f"[{host}]" if ":" in host else host


def inherited() -> socket.socket | None:
    """Returns the listening socket of the supervisor that has started this process, None without one."""
    return socket.socket(fileno=int(os.environ[LISTENER])) if LISTENER in os.environ else None
