"""Finds the stack whose gateway listens on the setting `port`, when several run on this machine."""

import asyncio
import ssl
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection

import msgspec

from pagewire.shared.errors import BusUnavailable, ConfigurationError
from pagewire.shared.process.listener import bracketed
from pagewire.shared.settings.config import FIELDS, Settings

TIMEOUT = 1.0
"""Seconds within which the gateway must answer."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that a server listens on and no client connects to, and the one of this machine instead."""


class _Version(msgspec.Struct):
    nats: str = ""


async def at_port(settings: Settings) -> Settings:
    """Returns the settings with the broker's URL of the stack at `port`, if they name no broker.

    Where no gateway answers at the default port, they stay as they are: a stack may have none.

    Raises:
        BusUnavailable: no gateway answers at another port.
        ConfigurationError: it needs another key.
    """
    if settings.nats_url or settings.nats_port is not None or settings.port == 0:
        return settings
    try:
        return msgspec.structs.replace(settings, nats_url=await asyncio.to_thread(_broker_behind, settings))
    except (BusUnavailable, ConfigurationError):
        if settings.port != FIELDS["port"].default:
            raise
        return settings


def _broker_behind(settings: Settings) -> str:
    host = ANY_ADDRESS.get(settings.host, settings.host)
    connection = _connection(settings, host)
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    place = f"{bracketed(host)}:{settings.port}"
    try:
        connection.request("GET", "/version", headers=headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, HTTPException) as error:
        raise BusUnavailable(f"no stack answers on --port at {place}: {error}") from error
    finally:
        connection.close()
    try:
        broker = msgspec.json.decode(content, type=_Version).nats if response.status == 200 else ""
    except msgspec.DecodeError:
        broker = ""
    if not broker:
        if response.status == HTTPStatus.UNAUTHORIZED:
            wrong = "takes another key" if settings.api_key else "needs a key"
            raise ConfigurationError(f"the stack at {place} (--port) {wrong}: set --api-key")
        raise BusUnavailable(f"{place} (--port) does not name its broker: it answers {response.status}")
    return broker


def _connection(settings: Settings, host: str) -> HTTPConnection:
    if not settings.ssl_certfile:
        return HTTPConnection(host, settings.port, timeout=TIMEOUT)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is this machine's own address
    return HTTPSConnection(host, settings.port, timeout=TIMEOUT, context=context)
