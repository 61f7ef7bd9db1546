"""Any request of a client to a tokenizer or a detokenizer is answered, and never with a fault."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from pagewire.client.sync import LoopThread
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.client_protocol.client_requests import decode_request
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ErrorFrame, GenerateRequest, ResumeRequest, SamplingParams
from pagewire.shared.messages.open import Encoding
from pagewire.shared.messages.tokenize import DetokenizeRequest, TokenizeRequest
from tests.fuzz.fuzzing import edited, fuzz, json_bytes, mutated
from tests.services.tokenizer.harness import GENERATE, MODEL, Setup, serving
from tests.support.waiting import PATIENCE

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once", "sampling": {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1}},
    {"prompt": ["One", "Two"], "sampling": {"n": 2, "stop": ["a", "bc"], "stop_token_ids": [5]}, "stream": True},
    {"prompt": [[5, 6], [7]], "sampling": {"beam_width": 2, "length_penalty": 1.5, "max_tokens": None}},
    {"prompt": [5, 6, 7], "request_id": "a-1", "priority": -1, "user": "u", "cache_salt": "s", "timeout_ms": 60_000},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "x"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        ],
        "chat_template_kwargs": {"enable_thinking": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    },
]
NAMES = [*GenerateRequest.__struct_fields__, *SamplingParams.__struct_fields__]
KINDS = (GenerateRequest, TokenizeRequest, DetokenizeRequest, ResumeRequest)


def _msgpack(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError):
        return b""


in_json = json_bytes(REQUESTS, NAMES)
in_msgpack = st.one_of(
    edited(REQUESTS, NAMES).map(_msgpack),
    mutated(
        [msgspec.msgpack.encode(request) for request in REQUESTS], [b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\xc1"]
    ),
)
encoded = st.one_of(st.tuples(st.just(Encoding.JSON), in_json), st.tuples(st.just(Encoding.MSGPACK), in_msgpack))


def test_any_request_is_decoded_or_refused() -> None:
    def check(request: tuple[Encoding, bytes]) -> None:
        encoding, data = request
        for kind in KINDS:
            try:
                decode_request(data, kind, encoding)
            except InvalidRequest as error:
                assert str(error)  # noqa: PT017

    fuzz(encoded, check)


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[tuple[LoopThread, Setup]]:
    thread, stack = LoopThread(), ExitStack()
    context = serving()
    setup = thread.run(context.__aenter__())
    stack.callback(thread.close)
    stack.callback(lambda: thread.run(context.__aexit__(None, None, None)))
    with stack:
        yield thread, setup


def test_a_tokenizer_answers_any_request(tokenizer: tuple[LoopThread, Setup]) -> None:
    thread, setup = tokenizer

    async def ask(encoding: Encoding, data: bytes) -> None:
        headers = {"Content-Type": "application/msgpack"} if encoding == Encoding.MSGPACK else {}
        replies: asyncio.Queue[Message] = asyncio.Queue()
        opened = len(setup.detokenizer.opened)
        with setup.client.inbox(replies.put_nowait) as inbox:
            setup.client.publish(GENERATE, data, reply=inbox, headers=headers)
            async with asyncio.timeout(PATIENCE):
                while replies.empty() and len(setup.detokenizer.opened) == opened:
                    setup.detokenizer.beat()  # or a slow machine counts it as gone meanwhile
                    await asyncio.sleep(0)
            if not replies.empty():
                decode = msgspec.msgpack.decode if headers else msgspec.json.decode
                frame = decode(replies.get_nowait().data, type=ErrorFrame)
                assert 400 <= frame.code < 500, frame
        for subject in (f"{subjects.TOKENIZE}.{MODEL}", subjects.MODELS):
            await setup.client.request(subject, data, timeout=PATIENCE, headers=headers)

    fuzz(encoded, lambda request: thread.run(ask(*request)), batch=20)
