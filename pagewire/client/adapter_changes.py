"""Requests that load and remove adapters, which an executor serves for all services."""

import asyncio
import time

import msgspec

from pagewire.client import frames
from pagewire.client.directory import Directory
from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import InvalidRequest, ModelNotFound, NoResponders, RequestTimeout, Unavailable
from pagewire.shared.messages.adapters import AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.messages.client import ErrorFrame

TIMEOUTS = (5.0, 15.0, 60.0)
"""Seconds that an executor has for a change, in each attempt: one that dies loses the request, which another can
serve."""
RETRY_FOR = 60.0
"""Seconds for which a change without responders is sent again where adapters can be loaded: all executors may be
restarting."""
RESEND_INTERVAL = 0.5
"""Seconds between two attempts without responders."""


async def change_adapter(
    bus: Bus, directory: Directory, model: str, change: LoadAdapterRequest | UnloadAdapterRequest
) -> AdapterReply:
    """Loads or removes an adapter of a model, whatever executor dies meanwhile.

    Raises:
        RequestError: the change is refused, or no executor answers.
    """
    name = await directory.resolve(model)
    verb = "load" if isinstance(change, LoadAdapterRequest) else "unload"
    subject = directory.subject(f"{subjects.ADAPTERS}.{verb}.{subjects.model_token(name)}")
    body, began, attempt = msgspec.json.encode(change), time.monotonic(), 0
    while attempt < len(TIMEOUTS):
        try:
            reply = await bus.request(subject, body, timeout=TIMEOUTS[attempt])
        except RequestTimeout:
            attempt += 1
        except NoResponders as error:
            if not await directory.serves_adapters(name):
                raise InvalidRequest(f"{name} serves no adapters: start it with --enable-lora") from error
            if time.monotonic() - began > RETRY_FOR:
                raise Unavailable(f"no executor of {name} answers now: try again later") from error
            await asyncio.sleep(RESEND_INTERVAL)
        else:
            directory.adapted.add(name)
            if "Nats-Service-Error" not in reply.headers:
                return msgspec.json.decode(reply.data, type=AdapterReply)
            refusal = frames.error_of(msgspec.json.decode(reply.data, type=ErrorFrame))
            if attempt and verb == "unload" and isinstance(refusal, ModelNotFound):
                return AdapterReply(change.lora_name, "")  # the attempt whose answer was lost has removed it
            raise refusal
    raise Unavailable(f"the executor of {name} does not answer: list the models to see the adapters")
