"""Requests that load and remove adapters, which an executor serves for all services."""

import asyncio
import time
from contextlib import suppress

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
    """Loads or removes an adapter, whatever executor dies meanwhile.

    Args:
        bus: a connection with the rights of the operator.
        directory: the models that are served.
        model: the model that the adapter changes; empty: of a loaded adapter its own, else the default one.
        change: the request.

    Raises:
        RequestError: the change is refused, or no executor answers.
    """
    adapter = change.lora_name
    if isinstance(change, LoadAdapterRequest):
        verb, name = "load", await directory.base_of(await directory.resolve(model))
        await _check_name(directory, name, adapter)
    else:
        verb, name = "unload", await _model_of(directory, model, adapter)
    subject = directory.subject(f"{subjects.ADAPTERS}.{verb}.{subjects.model_token(name)}")
    body, began, attempt = msgspec.json.encode(change), time.monotonic(), 0
    while attempt < len(TIMEOUTS):
        try:
            reply = await bus.request(subject, body, timeout=TIMEOUTS[attempt])
        except RequestTimeout:
            attempt += 1
        except NoResponders as error:
            if not await directory.serves_adapters(name):
                if isinstance(absence := await directory.absence(name), ModelNotFound):
                    raise absence from error
                raise InvalidRequest(f"{name} serves no adapters: start it with --enable-lora") from error
            if time.monotonic() - began > RETRY_FOR:
                raise Unavailable(f"no executor of {name} answers now: try again later") from error
            await asyncio.sleep(RESEND_INTERVAL)
        else:
            directory.adapted.add(subjects.model_token(name))
            if "Nats-Service-Error" not in reply.headers:
                return msgspec.json.decode(reply.data, type=AdapterReply)
            refusal = frames.error_of(msgspec.json.decode(reply.data, type=ErrorFrame))
            if attempt and verb == "unload" and isinstance(refusal, ModelNotFound):
                return AdapterReply(adapter, "")  # the attempt whose answer was lost has removed it
            raise refusal
    raise Unavailable(f"the executor of {name} does not answer: list the models to see the adapters")


async def _model_of(directory: Directory, model: str, adapter: str) -> str:
    """Returns the model of an adapter that is loaded, which is `model` if one is named.

    Raises:
        RequestError: several models are served and none has the adapter, or no tokenizer answers.
    """
    base = await directory.base_of(model or adapter)
    try:
        return await directory.resolve("" if base == adapter else base)
    except InvalidRequest as error:
        raise ModelNotFound(f"there is no adapter {adapter}: GET /v1/models lists them") from error


async def _check_name(directory: Directory, model: str, adapter: str) -> None:
    """Checks that the name of an adapter is none of another model on the broker, nor of an adapter of one.

    Raises:
        InvalidRequest: it is.
    """
    with suppress(Unavailable):
        for info in await directory.models():
            if info.own_name != model and subjects.model_token(info.name) == subjects.model_token(adapter):
                raise InvalidRequest(f"{info.name} is served already: choose another name for the adapter")
