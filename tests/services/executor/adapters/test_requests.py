"""Changes of adapters are answered one after the other, whatever an earlier one has met."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from typing_extensions import override

from pagewire.services.executor.adapters.registrar import Registrar
from pagewire.services.executor.adapters.requests import AdapterRequests
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages.adapters import AdapterReply, LoadAdapterRequest
from pagewire.shared.messages.client import ErrorFrame

pytestmark = pytest.mark.anyio


class Broken(Registrar):
    """Fails at one adapter in a way that nobody has thought of."""

    def __init__(self) -> None:
        pass

    @override
    async def load(self, request: LoadAdapterRequest) -> AdapterReply:
        if request.lora_name == "odd":
            raise ZeroDivisionError
        return AdapterReply(request.lora_name, "digest")


async def test_an_adapter_at_which_reading_fails_does_not_end_the_executor() -> None:
    broker = MemoryBroker()
    client = MemoryBus(broker, inbox_prefix="_INBOX")
    requests = AdapterRequests(MemoryBus(broker), "m", Broken())
    await requests.subscribe()
    running = asyncio.create_task(requests.run())
    replies = []
    for name in ("odd", "good"):
        body = msgspec.json.encode(LoadAdapterRequest(name, "/adapters/a"))
        reply = await client.request(f"{subjects.ADAPTERS}.load.m", body, timeout=5)
        replies.append(reply.data)
    refusal = msgspec.json.decode(replies[0], type=ErrorFrame)
    assert refusal.code == 500
    assert "its log says why" in refusal.message
    assert msgspec.json.decode(replies[1], type=AdapterReply).digest == "digest"
    assert not running.done()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
