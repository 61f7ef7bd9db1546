"""OpenAI's own description of its answers, and a transport of its client that holds every answer against it."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

FILE = Path(__file__).parents[1] / "data" / "openai" / "answers.json"
EVENT = "ResponseStreamEvent"
KINDS = {
    ("/v1/completions", False): "CreateCompletionResponse",
    ("/v1/completions", True): "CreateCompletionResponse",
    ("/v1/chat/completions", False): "CreateChatCompletionResponse",
    ("/v1/chat/completions", True): "CreateChatCompletionStreamResponse",
    ("/v1/responses", False): "Response",
    ("/v1/responses", True): EVENT,
    ("/v1/models", False): "ListModelsResponse",
}
"""The schema of an answer, by the path and whether it is an event of a stream."""
ERROR = "ErrorResponse"


def check(kind: str, answer: Any) -> None:
    """Raises AssertionError unless an answer is what OpenAI describes."""
    if kind == EVENT:  # the schema of its type says more of what is wrong than the choice of all types
        kind = _event_types().get(answer["type"], kind)
    error = best_match(_validator(kind).iter_errors(answer))
    assert error is None, f"{kind}: {error.json_path}: {error.message[:300]}"


@cache
def _event_types() -> dict[str, str]:
    schemas = json.loads(FILE.read_text())["components"]["schemas"]
    names = [choice["$ref"].rpartition("/")[2] for choice in schemas[EVENT]["anyOf"]]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


@cache
def _validator(kind: str) -> Draft202012Validator:
    components = json.loads(FILE.read_text())
    return Draft202012Validator({"$ref": f"#/components/schemas/{kind}", **components})


class CheckedTransport(httpx2.HTTPTransport):
    """Checks all answers, those in streams once they have ended.

    Attributes:
        checked: how many answers and events were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        path, streamed = request.url.path, response.headers["content-type"].startswith("text/event-stream")
        if streamed:
            assert isinstance(response.stream, httpx2.SyncByteStream)
            response.stream = _Tee(response.stream, self, KINDS[path, True])
        else:
            kind = ERROR if response.status_code >= 400 else KINDS.get((path, False), "Model")
            self.check(kind, json.loads(response.read()))
        return response

    def check(self, kind: str, answer: Any) -> None:
        """Checks and counts an answer. An error ends a stream of any kind but that of responses, which has its own."""
        check(ERROR if kind != EVENT and "error" in answer and "id" not in answer else kind, answer)
        self.checked += 1


class _Tee(httpx2.SyncByteStream):
    """Passes the bytes of a stream on, and checks its events at the end."""

    def __init__(self, stream: httpx2.SyncByteStream, transport: CheckedTransport, kind: str) -> None:
        self._stream, self._transport, self._kind = stream, transport, kind

    def __iter__(self) -> Iterator[bytes]:
        seen = []
        for part in self._stream:
            seen.append(part)
            yield part
        for event in re.findall(r"^data: (\{.*)$", b"".join(seen).decode(), re.MULTILINE):
            self._transport.check(self._kind, json.loads(event))

    def close(self) -> None:
        self._stream.close()
