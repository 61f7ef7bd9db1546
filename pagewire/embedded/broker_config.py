"""The configuration of a NATS server for Pagewire: the embedded broker's, and `deploy/nats.conf`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.shared.security import permissions
from pagewire.shared.security.permissions import CLIENT, OPERATOR, ROLES, Permissions
from pagewire.shared.settings.config import MAX_STORE

MAX_PAYLOAD = 8 << 20
"""Maximum size in bytes of a message's headers and payload together."""
MAX_PENDING = 256 << 20
"""Bytes that the server buffers for a slow connection before it closes the connection."""
PING_INTERVAL = "20s"
ANSWER_WITHIN = "5s"
"""Time for which a service may publish to the reply subject of a message that it has received."""

SERVER_NAME = "pagewire"
"""Name of a server without a cluster."""
CLUSTER = "pagewire"
"""Name of the cluster."""
ROUTE_PING_INTERVAL = "1s"
"""Time between two pings from server to server; two pings without an answer end the route to a frozen server."""
ROUTE_ERROR_REPORTS = 60
"""Number of failed attempts to reach another server, one a second, between two lines in the log."""
ROUTE_USER = "route"

_FILE = """\
# NATS for services in containers. Made by `pagewire nats-config` from shared/security/permissions.py: do not edit.
#
# Each service is a user of its own, which may do what that service needs and nothing else. Passwords come from the
# environment. The server reads a variable's value as it reads this file, so put quotes around it, within the value;
# deploy/nats-server.sh does so.

listen: 0.0.0.0:4222
http: 127.0.0.1:8222   # monitoring: for this machine only, because it needs no password

jetstream {{
  store_dir: /data
  max_file_store: {max_store}   # bytes; at least --nats-max-store of the services
}}

max_payload: {max_payload}    # bytes of header and payload together
max_pending: {max_pending}   # bytes for a reader that lags, before its connection is cut
ping_interval: "{ping_interval}"

authorization {{
  users: [
{users}
  ]
}}
"""


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of a server in a cluster."""

    name: str
    """Name of the server, unique in the cluster."""
    port: int
    """Port that it listens on for the other servers."""
    peers: tuple[int, ...]
    """Ports of the other servers."""
    password: str
    """Password that the servers share."""


def users(passwords: Mapping[str, str], tenants: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the users of the server: services and others by their passwords, and tenants by their keys."""
    rights = {**ROLES, CLIENT: permissions.of_tenant(""), OPERATOR: None}
    roles = [_user(name, password, rights[name]) for name, password in passwords.items()]
    return roles + [_user(name, key, permissions.of_tenant(name)) for name, key in tenants.items()]


def configuration(
    users: list[dict[str, Any]],
    *,
    host: str,
    port: int,
    store: str,
    max_store: int,
    membership: Membership | None = None,
) -> dict[str, Any]:
    """Returns the configuration of an embedded server; as JSON, it is in the server's own format."""
    fields = {
        "host": host,
        "port": port or -1,
        "server_name": SERVER_NAME if membership is None else membership.name,
        "jetstream": {"store_dir": store, "max_file_store": max_store},
        "max_payload": MAX_PAYLOAD,
        "max_pending": MAX_PENDING,
        "ping_interval": PING_INTERVAL,
        "authorization": {"users": users},
    }
    if membership is not None:
        fields["cluster"] = _cluster(membership, host)
        fields["reconnect_error_reports"] = ROUTE_ERROR_REPORTS
    return fields


def password_variable(user: str) -> str:
    """Returns the name of the environment variable from which `deploy/nats.conf` takes a user's password."""
    return "PAGEWIRE_API_KEY" if user == CLIENT else f"PAGEWIRE_NATS_{user.upper()}_PASSWORD"


def file(tenants: Mapping[str, str]) -> str:
    """Returns the text of `deploy/nats.conf`, with users for the tenants."""
    blocks = [
        _block(user, f"${password_variable(user['user'])}") for user in users(dict.fromkeys([*ROLES, CLIENT], ""), {})
    ]
    blocks += [_block(user, json.dumps(user["password"])) for user in users({}, tenants)]
    return _FILE.format(
        max_store=MAX_STORE,
        max_payload=MAX_PAYLOAD,
        max_pending=MAX_PENDING,
        ping_interval=PING_INTERVAL,
        users="\n".join(blocks),
    )


def _cluster(membership: Membership, host: str) -> dict[str, Any]:
    """Returns the part of the configuration that joins a cluster.

    One connection per pair of servers keeps the order of messages and subscriptions, and is enough on one machine.
    """
    password = membership.password
    return {
        "name": CLUSTER,
        "host": host,
        "port": membership.port,
        "authorization": {"user": ROUTE_USER, "password": password},
        "routes": [f"nats://{ROUTE_USER}:{password}@{host}:{port}" for port in membership.peers],
        "ping_interval": ROUTE_PING_INTERVAL,
        "ping_max": 2,
        "pool_size": -1,
    }


def _user(name: str, password: str, rights: Permissions | None) -> dict[str, Any]:
    user: dict[str, Any] = {"user": name, "password": password}
    if rights is not None:
        user["permissions"] = {"publish": list(rights.publish), "subscribe": list(rights.subscribe)}
        if rights.answers:
            user["permissions"]["allow_responses"] = {"max": 1, "expires": ANSWER_WITHIN}
    return user


def _block(user: dict[str, Any], password: str) -> str:
    """Returns a user in the server's own format."""
    lines = ["    {", f"      user: {user['user']}", f"      password: {password}", "      permissions: {"]
    for verb, allowed in user["permissions"].items():
        if isinstance(allowed, list):
            subjects = "".join(f"\n          {json.dumps(subject)}" for subject in allowed)
            lines.append(f"        {verb}: [{subjects}\n        ]")
        else:
            lines.append(f"        {verb}: {json.dumps(allowed)}")
    return "\n".join([*lines, "      }", "    }"])
