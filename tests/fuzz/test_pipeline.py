"""Any message to the subjects of clients, and any request to the routes of HTTP, against the real services."""

import asyncio
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError

from pagewire.bench import attack
from pagewire.client.sync import LoopThread
from pagewire.embedded.address import Address
from pagewire.embedded.stack import Stack
from pagewire.services.gateway.service import APIS
from pagewire.shared import subjects
from pagewire.shared.messages.open import Encoding
from pagewire.shared.settings.config import Settings
from tests.fuzz.fuzzing import fuzz, json_bytes
from tests.fuzz.test_client_requests import encoded
from tests.fuzz.test_http_bodies import BODIES
from tests.fuzz.test_http_bodies import NAMES as HTTP_NAMES
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.timeout(0)

SHORT = {"max_tokens": 3}
ANSWERED = re.compile(r"pagewire\.v1\.((generate|tokenize|detokenize)\.[^.]+|models)").fullmatch
"""The subjects that promise an answer to any message; the broker denies some others, and cancels may go nowhere."""


@pytest.fixture(scope="module")
def stack() -> Iterator[tuple[LoopThread, Address]]:
    settings = Settings(model="bundled", device="sim:zero", port=0, nats_port=0, log_level="error", max_model_len=256)
    thread = LoopThread()
    running = Stack(settings)
    thread.run(running.__aenter__())
    yield thread, thread.run(running.ready())
    thread.run(running.__aexit__(None, None, None))
    thread.close()


def test_any_message_to_the_subjects_of_clients_is_answered(stack: tuple[LoopThread, Address]) -> None:
    thread, address = stack
    client = Client()
    thread.run(client.connect(address.nats))

    async def ask(subject: str, encoding: Encoding, data: bytes, headers: dict[str, str]) -> None:
        if encoding == Encoding.MSGPACK:
            headers = headers | {"Content-Type": "application/msgpack"}
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.publish(subject, data, reply=inbox, headers=headers)
        try:
            answer = await replies.next_msg(PATIENCE if ANSWERED(subject) else 0.05)
        except NatsTimeoutError:
            assert not ANSWERED(subject), (subject, data)
            return
        finally:
            await replies.unsubscribe()
        code = (answer.headers or {}).get("Nats-Service-Error-Code", "200")
        assert code != "500", (subject, data, answer.data)

    async def honest() -> None:
        body = msgspec.json.encode({"prompt": "Once", "sampling": SHORT})
        reply = await client.request(f"{subjects.GENERATE}.bundled", body, timeout=PATIENCE)
        assert msgspec.json.decode(reply.data)["type"] == "result"

    def check(inputs: tuple[str, tuple[Encoding, bytes], dict[str, str]]) -> None:
        subject, (encoding, data), headers = inputs
        thread.run(ask(subject, encoding, data, headers))

    tokens = st.one_of(st.sampled_from(["bundled", "x", "a-1"]), st.from_regex(r"[!-)+\-/-=?-~]{1,12}", fullmatch=True))
    verbs = [
        subjects.GENERATE,
        subjects.TOKENIZE,
        subjects.DETOKENIZE,
        subjects.MODELS,
        subjects.CANCEL,
        subjects.RESUME,
    ]
    places = st.one_of(
        st.just(f"{subjects.GENERATE}.bundled"),
        st.builds(lambda verb, rest: ".".join([verb, *rest]), st.sampled_from(verbs), st.lists(tokens, max_size=4)),
    )
    names = st.sampled_from(["Pagewire-Fresh", "Pagewire-Batch-Inbox", "traceparent", "Nats-Msg-Id"])
    texts = st.from_regex(r"[!-~]{1,20}", fullmatch=True)
    fuzz(st.tuples(places, encoded, st.dictionaries(names, texts, max_size=2)), check, batch=20)
    thread.run(honest())
    thread.run(client.close())


def test_any_request_to_the_routes_of_http_is_answered(stack: tuple[LoopThread, Address]) -> None:
    thread, address = stack
    where = urllib.parse.urlsplit(address.http)

    async def ask(method: str, path: str, body: bytes) -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        status = int(answer.split(b" ", 2)[1])
        assert status < 500, (method, path, body, answer)

    paths = st.one_of(
        st.sampled_from([*APIS, "/v1/models", "/v1/models/bundled", "/health", "/", "/v1", "//", "/v1/models/"]),
        st.text(max_size=12).map(lambda text: "/v1/" + urllib.parse.quote(text, errors="replace")),
    )
    short: list[dict[str, Any]] = [body | {"model": "bundled", "max_tokens": 3} for body in BODIES]
    methods = st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    inputs = st.tuples(methods, paths, json_bytes(short, HTTP_NAMES))
    fuzz(inputs, lambda request: thread.run(ask(*request)), batch=20)
    assert thread.run(attack.honest_request(address.http)) < PATIENCE
