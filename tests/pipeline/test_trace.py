"""One request with a `traceparent` leaves one trace through all four services."""

import json
from pathlib import Path

import nats
import pytest

from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared import spans
from pagewire.shared.config import Settings
from pagewire.shared.spans import Span
from tests.support.checkpoints import checkpoint

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


async def traced(folder: Path) -> list[Span]:
    settings = Settings(
        model=str(checkpoint("llama")),
        served_model_name="tiny",
        max_model_len=96,
        num_kv_blocks=64,
        nats_port=0,
        max_num_batched_tokens=16,
        trace_dir=str(folder),
        log_level="warning",
    )
    async with Stack(settings, PIPELINE) as stack:
        address = await stack.ready()
        client = await nats.connect(address.nats)
        body = {"prompt": [5] * 40, "sampling": {"max_tokens": 8, "ignore_eos": True}, "request_id": "traced"}
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        reply = await client.request(
            "pagewire.v1.generate.tiny", json.dumps(body).encode(), timeout=20, headers=headers
        )
        assert json.loads(reply.data)["type"] == "result"
        # One that nobody traces is a trace of its own.
        await client.request(
            "pagewire.v1.generate.tiny", json.dumps(body | {"request_id": "other"}).encode(), timeout=20
        )
        await client.close()
    return [span for span in spans.read(folder) if span.trace_id == TRACE]


async def test_the_tree(tmp_path: Path) -> None:
    found = await traced(tmp_path)
    assert sorted((span.service, span.name) for span in found) == [
        ("detokenizer", "stream"),
        ("executor", "decode"),
        ("executor", "prefill"),
        ("scheduler", "queue"),
        ("tokenizer", "receive"),
    ]
    by_name = {span.name: span for span in found}
    receive = by_name["receive"]
    assert receive.parent_id == CALLER
    assert all(span.parent_id == receive.span_id for span in found if span is not receive)
    assert len({span.span_id for span in found}) == 5
    queue, prefill, decode, stream = (by_name[name] for name in ("queue", "prefill", "decode", "stream"))
    assert queue.end <= prefill.end <= decode.end
    assert stream.start <= prefill.start
    assert all(span.start <= span.end for span in found)
