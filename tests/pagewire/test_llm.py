"""Offline generation under limits that refuse other clients."""

import asyncio

from pagewire import LLM, SamplingParams
from pagewire.shared.bus import nats
from pagewire.shared.discovery import ask


def test_it_waits_where_others_are_refused() -> None:
    async def refused(url: str) -> list[str]:
        bus = await nats.connect(url, name="test", inbox_prefix="_INBOX")
        try:
            return [stats.metadata["load.refused"] for stats in await ask(bus, "tokenizer")]
        finally:
            await bus.close()

    with LLM("bundled", device="sim:zero", max_num_seqs=2, max_queue_wait="1ms") as llm:
        results = llm.generate([[5, 6, 7]] * 60, SamplingParams(max_tokens=300, ignore_eos=True))
        assert [len(result.outputs[0].token_ids) for result in results] == [300] * 60
        assert asyncio.run(refused(llm._address.nats)) == ["0"]
