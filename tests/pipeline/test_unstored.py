"""A tokenizer dies between the opening of a stream and the storing of its work: the client's next try is served."""

import asyncio

import pytest

from pagewire import SamplingParams
from pagewire.shared.bus import Headers
from pagewire.shared.bus.nats_store import NatsStore
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import running
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio

SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


async def test_a_request_that_was_never_stored_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model=str(checkpoint("llama")), dtype="float32", num_kv_blocks=64, log_level="error")
    async with running(settings) as pipeline:
        expected = await pipeline.client.generate([5, 6, 7], SAMPLING)
        put_work, tries = NatsStore.put_work, 0

        async def put_work_later(store: NatsStore, queue: str, data: bytes, *, headers: Headers | None = None) -> int:
            nonlocal tries
            tries += 1
            if tries == 1:
                await asyncio.Event().wait()  # as far as everybody else can see, this tokenizer has died
            return await put_work(store, queue, data, headers=headers)

        monkeypatch.setattr(NatsStore, "put_work", put_work_later)
        tokens: list[int] = []
        async with asyncio.timeout(PATIENCE):
            async for delta in pipeline.client.stream([5, 6, 7], SAMPLING):
                tokens += delta.token_ids
        assert tokens == expected.choices[0].token_ids
        assert tries == 2
