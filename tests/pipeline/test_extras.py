"""Fields beside sampling that clients of vLLM use, through the pipeline and over HTTP."""

from pathlib import Path
from typing import Any

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.services.gateway import app
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.service import APIS
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.tokenize import TokenizeRequest
from pagewire.shared.settings.config import Settings
from tests.services.gateway.http_client import Gateway
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

FOLDER = checkpoint("llama")
MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "hello world"


class Http(Gateway):
    """The gateway's application over the clients of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        client = pipeline.client
        endpoints = {path: Endpoint(api, client, 1 << 20) for path, api in APIS.items()}
        metrics = MetricsPage(pipeline.bus, vllm=False)
        self.app = app.build(client, endpoints, Health(pipeline.bus, lambda: None), metrics)

    async def ok(self, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        answer = await self.post(body, path)
        assert answer.status == 200, answer.body
        return answer.events if body.get("stream") else answer.json


async def test_fields_of_vllm_beside_sampling_have_their_effects(tmp_path: Path) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    settings = Settings(
        model=str(FOLDER),
        dtype="float32",
        num_kv_blocks=128,
        max_model_len=96,
        max_logprobs=-1,
        chat_template=str(template),
        log_level="error",
    )
    async with running(settings) as pipeline:
        http = Http(pipeline)
        await check_best_of(pipeline.client)
        await check_prompts(pipeline.client)
        await check_times(pipeline.client)
        await check_whole_vocabulary(pipeline.client)
        await check_echo(http)
        await check_token_ids(http)
        await check_tokenization(http, pipeline.client)
        await check_chat(http)


async def check_best_of(client: AsyncClient) -> None:
    fields: dict[str, Any] = {"max_tokens": 6, "seed": 5, "ignore_eos": True}
    all_ = (await client.generate([TEXT, "a"], n=4, logprobs=0, **fields)).choices
    best = await client.generate([TEXT, "a"], n=2, best_of=4, **fields)
    for prompt in (0, 1):
        ranked = sorted(all_[4 * prompt : 4 * prompt + 4], key=lambda choice: -(choice.cumulative_logprob or 0))
        returned = best.choices[2 * prompt : 2 * prompt + 2]
        assert [choice.token_ids for choice in returned] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == 24
    for refused in ({"n": 2, "best_of": 1}, {"best_of": 2, "temperature": 0.0}, {"best_of": 2, "beam_width": 2}):
        with pytest.raises(InvalidRequest, match="best_of"):
            await client.generate(TEXT, **refused)
    with pytest.raises(InvalidRequest, match="best_of"):
        await anext(client.stream(TEXT, best_of=2).batches())


async def check_prompts(client: AsyncClient) -> None:
    ids = await client.tokenize(TEXT)
    greedy: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "return_token_ids": True}
    whole = await client.generate(TEXT, **greedy)
    assert whole.prompt_token_ids == [ids]
    assert whole.prompt_logprobs is None
    bare = await client.tokenize_request(TokenizeRequest(TEXT, add_special_tokens=False, return_token_strs=True))
    assert bare.token_strs is not None
    assert len(bare.token_strs) == len(bare.token_ids)
    plain = await client.generate(TEXT, add_special_tokens=False, **greedy)
    assert plain.prompt_token_ids == [bare.token_ids]
    cut = await client.generate(TEXT, truncate_prompt_tokens=2, **greedy)
    tail = await client.generate(ids[-2:], **greedy)
    assert cut.prompt_token_ids == tail.prompt_token_ids == [ids[-2:]]
    assert cut.choices[0].token_ids == tail.choices[0].token_ids
    long = await client.generate([7] * 300, truncate_prompt_tokens=-1, **greedy)
    assert long.prompt_token_ids == [[7] * 92]
    for wrong in (0, -2, 97):
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
            await client.generate(TEXT, truncate_prompt_tokens=wrong)


async def check_times(client: AsyncClient) -> None:
    stream = client.stream(TEXT, max_tokens=5, ignore_eos=True)
    assert [delta.start async for delta in stream] == [0, 1, 2, 3, 4]
    assert stream.final is not None
    for metrics in (stream.final.metrics, (await client.generate(TEXT, max_tokens=5, ignore_eos=True)).metrics):
        assert metrics is not None
        parts = (metrics.queued_time, metrics.prefill_time, metrics.decode_time)
        assert all(part is not None and part >= 0 for part in parts)
        assert sum(part or 0 for part in parts) == pytest.approx(metrics.e2e_latency, abs=1e-3)
        assert metrics.e2e_latency > 0


async def check_whole_vocabulary(client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    result = await client.generate([5, 6], params)
    assert result.choices[0].logprobs is not None
    (candidates,) = result.choices[0].logprobs
    assert sum(2.718281828**each.logprob for each in candidates.values()) == pytest.approx(1, abs=1e-3)
    assert result.prompt_logprobs is not None
    (of_prompt,) = result.prompt_logprobs
    assert of_prompt[1] is not None
    assert len(of_prompt[1]) == len(candidates)


async def check_echo(http: Http) -> None:
    """The parts of a stream, joined, are the whole answer, also with log-probabilities and several choices."""
    base = {"max_tokens": 4, "seed": 1, "n": 2, "echo": True, "ignore_eos": True}
    for prompt in (TEXT, [5, 6, 7], [[5, 6], [9, 8, 7]]):
        for extra in ({}, {"logprobs": 2}, {"logprobs": 2, "max_tokens": 0}, {"max_tokens": 0}):
            body = base | {"prompt": prompt} | extra
            whole = await http.ok(body)
            events = await http.ok(body | {"stream": True, "stream_options": {"include_usage": True}})
            assert events[-1]["usage"] == whole["usage"] | {
                "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
            }
            assert events[-1]["timings"].keys() == whole["timings"].keys()
            for choice in whole["choices"]:
                parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
                assert "".join(part["text"] for part in parts) == choice["text"]
                assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
                if "logprobs" in extra:
                    for name, column in choice["logprobs"].items():
                        joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
                        assert joined == column, name


async def check_token_ids(http: Http) -> None:
    body = {"prompt": [[5, 6], [7]], "max_tokens": 3, "seed": 2, "ignore_eos": True, "return_token_ids": True}
    whole = await http.ok(body)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[5, 6], [7]]
    events = await http.ok(body | {"stream": True, "prompt_logprobs": 1})
    for choice in whole["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert len(parts[0]["prompt_logprobs"]) == len(choice["prompt_token_ids"])
        assert all("prompt_logprobs" not in part for part in parts[1:])
    plain = await http.ok({"prompt": "a", "max_tokens": 2})
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & plain["choices"][0].keys()


async def check_tokenization(http: Http, client: AsyncClient) -> None:
    ids = await client.tokenize(TEXT)
    answer = await http.ok({"prompt": TEXT, "return_token_strs": True}, "/tokenize")
    assert (answer["count"], answer["max_model_len"], answer["tokens"]) == (len(ids), 96, ids)
    assert len(answer["token_strs"]) == len(ids)
    assert (await http.ok({"prompt": TEXT, "add_special_tokens": False}, "/tokenize"))["token_strs"] is None
    text = (await http.ok({"tokens": ids}, "/detokenize"))["prompt"]
    assert text.endswith(TEXT)
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": "x"}), ("/v1/embeddings", {"input": "x"})):
        refused = await http.post(body, path)
        assert refused.status == 400, refused.body
    assert "embeddings" in refused.json["error"]["message"]


async def check_chat(http: Http) -> None:
    path = "/v1/chat/completions"
    reply = await http.ok({"messages": MESSAGES}, "/tokenize")
    begun = await http.ok({"messages": MESSAGES, "add_generation_prompt": False}, "/tokenize")
    assert begun["count"] < reply["count"]
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = await http.ok(body | {"logprobs": True, "top_logprobs": -1}, path)
    assert whole["prompt_token_ids"] == reply["tokens"]
    assert len(whole["choices"][0]["token_ids"]) == 3
    assert all(len(each["top_logprobs"]) > 100 for each in whole["choices"][0]["logprobs"]["content"])
    events = await http.ok(
        body | {"stream": True, "prompt_logprobs": 0, "stream_options": {"include_usage": True}}, path
    )
    assert events[0]["prompt_token_ids"] == reply["tokens"]
    assert [e for e in events if len(e.get("prompt_logprobs", ())) == reply["count"]] == events[1:2]
    joined = [token for e in events for choice in e["choices"] for token in choice.get("token_ids", ())]
    assert joined == whole["choices"][0]["token_ids"]
    assert events[-1]["timings"]["predicted_n"] == 3
    cut = await http.ok(body | {"truncate_prompt_tokens": 2}, path)
    assert cut["prompt_token_ids"] == reply["tokens"][-2:]
