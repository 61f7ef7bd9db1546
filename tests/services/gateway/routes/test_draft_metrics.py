"""The figures of drafted tokens in answers over HTTP: vLLM's field, where the server is told to give it."""

from typing import Any

import pytest

from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.services.gateway.service import APIS
from pagewire.shared.messages.client import Frame, GenerateRequest
from pagewire.shared.messages.request_metrics import Metrics, SpeculativeDecoding
from tests.services.gateway.http_client import Gateway
from tests.support.responder import MODEL

pytestmark = pytest.mark.anyio
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
DRAFTS = SpeculativeDecoding(
    num_spec_steps=4,
    num_draft_tokens=9,
    num_accepted_draft_tokens=6,
    acceptance_histogram=[1, 1, 1, 1],
    mean_acceptance_length=2.5,
    draft_acceptance_rate=6 / 9,
)


def drafted(gateway: Gateway) -> None:
    """All requests have drafts from now on."""

    def script(request: GenerateRequest) -> list[Any]:
        frames: list[Frame | Any] = gateway.responder.answer(request)
        ended: Any = frames[0] if not request.stream else frames[-2]
        ended.metrics = Metrics(0.0, 0.1, 0.2, 0.3, DRAFTS)
        return frames

    gateway.responder.script = script


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_figures_of_its_drafts_where_they_are_shown(
    gateway: Gateway, path: str, *, stream: bool
) -> None:
    drafted(gateway)
    body = {"model": MODEL, **BODIES[path], "stream": stream, "stream_options": {"include_usage": True}}
    if not stream:
        del body["stream_options"]
    for shown in (False, True):
        gateway.app = Endpoint(APIS[path], gateway.client, 10_000, metrics=shown)
        answer = await gateway.post(body, path)
        last = answer.events[-1] if stream else answer.json
        assert last["timings"]["draft_n"] == 9
        if not shown:
            assert "metrics" not in last
            continue
        figures = last["metrics"]["speculative_decoding"]
        assert (figures["num_draft_tokens"], figures["acceptance_histogram"]) == (9, [1, 1, 1, 1])
        assert figures["mean_acceptance_length"] == 2.5


async def test_an_answer_with_several_choices_has_no_metrics(gateway: Gateway) -> None:
    drafted(gateway)
    path = "/v1/completions"
    gateway.app = Endpoint(APIS[path], gateway.client, 10_000, metrics=True)
    answer = await gateway.post({"model": MODEL, "prompt": "x", "n": 2}, path)
    assert "metrics" not in answer.json
