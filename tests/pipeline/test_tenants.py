"""Two tenants on the real services and a real broker: neither reads, cancels or resumes what is the other's."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.client import frames
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus import nats as bus
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.errors import Internal, NotPermitted
from pagewire.shared.messages.client import Accepted
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings.config import Settings
from tests.support.pipeline import CLIENT_KEY, Pipeline, running
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.anyio]

KEYS = {"alice": "alice-key-0123456789", "bob": "bob-key-0123456789"}
LONG = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0)


@asynccontextmanager
async def pipeline(folder: Path) -> AsyncIterator[Pipeline]:
    path = folder / "keys"
    path.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    async with running(Settings(model="bundled", max_num_seqs=8), ApiKeys.load(path)) as running_pipeline:
        yield running_pipeline


def client_of(stack: Pipeline, tenant: str) -> AsyncClient:
    return AsyncClient(stack.url, tenant=tenant, api_key=KEYS.get(tenant, CLIENT_KEY))


async def connection_of(stack: Pipeline, tenant: str) -> NatsBus:
    """A connection with which a tenant tries what our client never does."""
    user, prefix = tenant or "client", subjects.client_inbox(tenant)
    return await bus.connect(
        stack.url, name="enemy", user=user, password=KEYS.get(tenant, CLIENT_KEY), inbox_prefix=prefix
    )


async def test_no_other_client_reads_cancels_or_resumes_a_stream(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as stack, client_of(stack, "alice") as alice:
        heard: list[Message] = []
        operator = await stack.bus.subscribe("_TENANT.alice.>", heard.append)
        reading = asyncio.create_task(_read(alice.stream("Once upon a time", LONG, request_id="r1").batches()))
        await until(lambda: len(heard) > 1)
        await operator.unsubscribe()
        accepted = next(frame for message in heard if isinstance(frame := _frame(message), Accepted))
        inbox, cancel, resume = heard[-1].subject, accepted.cancel, accepted.resume
        forged: list[Message] = []
        await stack.bus.subscribe("_TENANT.alice.forged.>", forged.append)
        assert subjects.tenant_of(cancel) == subjects.tenant_of(resume) == "alice"
        for enemy in ("bob", ""):
            other = await connection_of(stack, enemy)
            for pattern in (inbox, "_TENANT.alice.>", "_TENANT.>"):
                with pytest.raises(NotPermitted):
                    await other.subscribe(pattern, lambda message: None)
            generate = subjects.for_tenant(f"{subjects.GENERATE}.bundled", "alice")
            for subject in (cancel, resume, generate, subjects.for_tenant(f"{subjects.CANCEL}.r1", "alice")):
                with pytest.raises(NotPermitted):
                    await other.request(subject, b'{"start": 0}', timeout=PATIENCE)
            # The same names under its own subjects mean its own requests, of which there are none.
            _, _, rest = cancel.partition(".alice.cancel.")
            for name in (rest, "r1"):
                answer = await other.request(
                    subjects.for_tenant(f"{subjects.CANCEL}.{name}", enemy), b"", timeout=PATIENCE
                )
                assert json.loads(answer.data)["state"] == "unknown"
            answer = await other.request(
                subjects.for_tenant(f"{subjects.RESUME}.{rest}", enemy), b'{"start": 0}', timeout=10
            )
            assert json.loads(answer.data)["code"] == 400
            # Nor is anything sent to an inbox of the other tenant in its name.
            own = subjects.for_tenant(f"{subjects.GENERATE}.bundled", enemy)
            other.publish(own, b'{"prompt": "x"}', reply="_TENANT.alice.forged.1")
            await until(lambda: stack.load("tokenizer")["dropped"])
            assert not forged
            await other.close()
        assert not reading.done()
        assert await alice.cancel("r1") == "cancelled"
        await reading


async def test_the_same_id_of_two_tenants_is_two_requests(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as stack:
        texts = {}
        for tenant, prompt in (("alice", "Once upon a time"), ("bob", "The king"), ("", "A fox")):
            async with client_of(stack, tenant) as client:
                result = await client.generate(prompt, SHORT, request_id="r1")
                again = await client.generate(prompt, SHORT, request_id="r1")
                assert result == again
                assert result.request_id == "r1"
                texts[tenant] = result.choices[0].text
        assert len(set(texts.values())) == 3


async def test_a_prefix_is_cached_for_its_own_tenant_only(tmp_path: Path) -> None:
    prompt = "Once upon a time there was a king who had three sons, and the youngest of them loved a fox. " * 4
    async with pipeline(tmp_path) as stack:
        cached = []
        for tenant in ("alice", "bob", "", "alice", "bob", ""):
            async with client_of(stack, tenant) as client:
                cached.append((await client.generate(prompt, SHORT)).usage.cached_tokens)
        assert cached[:3] == [0, 0, 0]
        assert all(cached[3:])


async def test_a_bare_client_needs_its_inbox_prefix_and_its_subject(tmp_path: Path) -> None:
    """As docs/clients.md shows it."""
    async with pipeline(tmp_path) as stack:
        client = await nats.connect(stack.url, user="alice", password=KEYS["alice"], inbox_prefix="_TENANT.alice")
        models = json.loads((await client.request("pagewire.v1.tenant.alice.models", b"", timeout=PATIENCE)).data)
        request = {"prompt": "Once upon a time", "sampling": {"max_tokens": 4}}
        reply = await client.request(models["models"][0]["subject"], json.dumps(request).encode(), timeout=PATIENCE)
        assert json.loads(reply.data)["usage"]["completion_tokens"] == 4
        await client.close()


async def _read(batches: AsyncIterator[object]) -> None:
    async for _ in batches:
        pass


def _frame(message: Message) -> object:
    """A frame; the answer with the models is none."""
    try:
        return frames.decode(message.data)
    except Internal:
        return None
