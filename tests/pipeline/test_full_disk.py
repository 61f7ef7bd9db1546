"""The store is full in the middle of streams: they end, and new requests are refused until there is room again."""

import asyncio
import time
import urllib.error
import urllib.request

import msgspec
import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.broker import Broker
from pagewire.embedded.stack import Stack
from pagewire.shared.bus import Bus
from pagewire.shared.bus.nats_store import PUT_TIMEOUT
from pagewire.shared.settings.config import Settings
from tests.support.broker import connect_service
from tests.support.checkpoints import checkpoint
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.alone, pytest.mark.anyio]

MAX_STORE = 16 << 20
SAMPLING = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
API = "$JS.API.STREAM"


async def fill(bus: Bus) -> None:
    """Fills the server's storage with a stream of somebody else."""
    other = {"name": "OTHER", "subjects": ["other"], "storage": "file"}
    await bus.request(f"{API}.CREATE.OTHER", msgspec.json.encode(other), timeout=PATIENCE)
    for _ in range(20):
        await bus.request("other", bytes(1 << 20), timeout=PATIENCE)


async def free(bus: Bus) -> None:
    await bus.request(f"{API}.DELETE.OTHER", b"", timeout=PATIENCE)


def fetch(url: str, body: bytes | None = None) -> tuple[int, str]:
    """Sends an HTTP request; returns the status and the body of the answer."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def ask(http: str) -> tuple[int, str]:
    """Sends a short request for text."""
    body = msgspec.json.encode({"prompt": "Once", "max_tokens": 2})
    return await asyncio.to_thread(fetch, f"{http}/v1/completions", body)


async def until_health(http: str, status: int) -> str:
    """Waits until `/health` has the status; returns its text."""
    while (health := await asyncio.to_thread(fetch, f"{http}/health"))[0] != status:
        pass
    return health[1]


async def test_running_streams_end_and_new_requests_are_refused_until_there_is_room() -> None:
    async with Broker(port=0, max_store=MAX_STORE) as broker:
        settings = Settings(
            model=str(checkpoint("llama")),
            dtype="float32",
            num_kv_blocks=160,
            port=0,
            log_level="error",
            nats_url=broker.url,
            nats_user=broker.user,
            nats_password=broker.password,
            nats_max_store=MAX_STORE,
        )
        bus = await connect_service(broker, max_store=MAX_STORE)
        async with Stack(settings) as stack:
            address = await stack.ready()
            async with AsyncClient(address.nats) as client:
                assert (await ask(address.http))[0] == 200
                expected = await client.generate("An old woman", SAMPLING)
                begun = asyncio.Event()

                async def stream() -> str:
                    text = ""
                    async for delta in client.stream("An old woman", SAMPLING):
                        text += delta.text
                        begun.set()
                    return text

                streams = [asyncio.create_task(stream()) for _ in range(3)]
                await begun.wait()
                await fill(bus)
                async with asyncio.timeout(PATIENCE):
                    assert await asyncio.gather(*streams) == [expected.choices[0].text] * 3

                assert "store" in await until_health(address.http, 503)
                started = time.monotonic()
                status, answer = await ask(address.http)
                assert time.monotonic() - started < PUT_TIMEOUT
                assert status == 503
                assert "insufficient resources" in answer

                await free(bus)
                await until_health(address.http, 200)
                assert (await ask(address.http))[0] == 200
        await bus.close()
