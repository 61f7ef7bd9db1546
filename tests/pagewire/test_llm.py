"""Offline generation under limits that refuse other clients."""

import asyncio

import pytest

from pagewire import LLM, AsyncLLM, LoRARequest, SamplingParams
from pagewire.llm import OnePrompt
from pagewire.sampling_params import BeamSearchParams
from pagewire.shared.bus import nats
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.process.discovery import ask


def test_offline_requests_wait_where_others_are_refused() -> None:
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


def test_the_class_takes_the_arguments_of_vllm() -> None:
    with LLM("bundled", enforce_eager=True, enable_prefix_caching=False, max_model_len=256) as llm:
        tokenizer = llm.get_tokenizer()
        greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        text, ids = "Once upon a time", tokenizer.encode("Once upon a time")
        prompts: list[OnePrompt] = [{"prompt": text}, {"prompt_token_ids": ids, "cache_salt": "s"}, text]
        outputs = llm.generate(prompts, greedy)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert [output.prompt for output in outputs] == [text, None, text]
        assert all(output.prompt_token_ids == ids and output.metrics and output.finished for output in outputs)
        (cut,) = llm.generate(ids, greedy, tokenization_kwargs={"truncate_prompt_tokens": 2}, use_tqdm=True)
        assert cut.prompt_token_ids == ids[-2:]
        (search,) = llm.beam_search([{"prompt": text}], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))
        assert [beam.tokens[: len(ids)] for beam in search.sequences] == [ids, ids]
        assert all(beam.text.endswith(tokenizer.decode(beam.tokens[len(ids) :])) for beam in search.sequences)
        assert search.sequences[0].cum_logprob >= search.sequences[1].cum_logprob
        assert all(len(beam.logprobs) == 4 for beam in search.sequences)
        params = llm.get_default_sampling_params()
        params.max_tokens = 3
        (answer,) = llm.chat([{"role": "user", "content": "Hi"}], params, add_generation_prompt=True)
        assert answer.prompt is not None
        assert "Hi" in answer.prompt
        with pytest.raises(InvalidRequest, match="is not supported"):
            llm.generate(text, greedy, tokenization_kwargs={"padding": True})
        with pytest.raises(InvalidRequest, match="enable_lora=True"):
            llm.generate(text, greedy, lora_request=LoRARequest("a", 1, "a"))


@pytest.mark.anyio
async def test_the_results_of_a_stream_grow() -> None:
    async with AsyncLLM("bundled", device="sim:zero") as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, n=2, logprobs=0)
        grown = [output async for output in llm.generate("Once", params, "mine")]
    *others, last = grown
    assert (last.request_id, last.prompt, last.finished) == ("mine", "Once", True)
    assert all(not output.finished and output.outputs[0].finish_reason is None for output in others)
    for choice, sooner in zip(last.outputs, others[-1].outputs, strict=True):
        assert (choice.finish_reason, len(choice.token_ids), len(choice.logprobs or ())) == ("length", 20, 20)
        assert choice.text.startswith(sooner.text)
