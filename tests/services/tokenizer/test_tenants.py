"""The tenant of a request: named by its subject, and kept in everything that the tokenizer passes on."""

import msgspec
import pytest

from pagewire.shared import subjects
from pagewire.shared.messages import Decoder
from pagewire.shared.messages.client import ErrorFrame, ModelList
from pagewire.shared.messages.client_headers import BATCH_INBOX
from pagewire.shared.messages.open import OpenState
from pagewire.shared.messages.work import WorkItem
from tests.services.tokenizer.harness import GENERATE, MODEL, QUEUE, Setup, serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ALICE = subjects.for_tenant(GENERATE, "alice")
_work = Decoder(WorkItem)


async def send(setup: Setup, subject: str, reply: str, **fields: object) -> WorkItem:
    body = {"prompt": "x", "user": "ann", "cache_salt": "salt", "request_id": "r1", **fields}
    setup.client.publish(subject, msgspec.json.encode(body), reply=reply)
    (item,) = await setup.client.store.pull_work(QUEUE, 1, expires=5)
    return _work.decode(item.data)


async def test_two_tenants_share_neither_ids_nor_prefixes_nor_users() -> None:
    async with serving() as setup:
        works = [
            await send(setup, GENERATE, "_INBOX.a.1"),
            await send(setup, ALICE, "_TENANT.alice.a.1"),
            await send(setup, subjects.for_tenant(GENERATE, "bob"), "_TENANT.bob.a.1"),
        ]
        openings = setup.detokenizer.opened
        assert [work.request_id for work in works] == [opening.request_id for opening in openings]
        for field in ("request_id", "cache_salt", "user"):
            assert len({getattr(work, field) for work in works}) == 3
        assert works[0].request_id == "r1"


async def test_no_salt_of_another_client_is_that_of_a_tenant() -> None:
    async with serving() as setup:
        alice = await send(setup, ALICE, "_TENANT.alice.a.1", cache_salt="s")
        forged = await send(setup, GENERATE, "_INBOX.a.1", cache_salt=alice.cache_salt)
        assert forged.cache_salt != alice.cache_salt


async def test_each_stream_has_a_secret_of_128_bits() -> None:
    async with serving() as setup:
        for number in range(3):
            await send(setup, GENERATE, "_INBOX.a.1", request_id=f"r{number}")
        secrets = {opening.secret for opening in setup.detokenizer.opened}
        assert [len(secret) for secret in secrets] == [16, 16, 16]


@pytest.mark.parametrize(
    ("subject", "reply"),
    [
        (ALICE, "_TENANT.bob.a.1"),
        (ALICE, "_INBOX.a.1"),
        (ALICE, "_TENANT.alice"),
        (GENERATE, "_TENANT.alice.a.1"),
        (subjects.for_tenant(f"{subjects.TOKENIZE}.{MODEL}", "alice"), "_TENANT.bob.a.1"),
        (subjects.for_tenant(subjects.MODELS, "alice"), "_INBOX.a.1"),
    ],
)
async def test_a_request_is_answered_in_inboxes_of_its_own_tenant_only(subject: str, reply: str) -> None:
    async with serving() as setup:
        heard: list[object] = []
        await setup.client.subscribe(reply, heard.append)
        setup.client.publish(subject, b'{"prompt": "x", "text": "x"}', reply=reply)
        await until(lambda: setup.tokenizer.heartbeat().load["dropped"] == 1)
        await setup.until_idle()
        await setup.client.flush()
        assert not heard
        assert setup.detokenizer.opened == []


async def test_a_batch_inbox_of_another_tenant_is_not_used() -> None:
    async with serving() as setup:
        for batch_inbox in ("_TENANT.alice.b.1", "_TENANT.bob.b.1", "_INBOX.b.1"):
            headers = {BATCH_INBOX: batch_inbox}
            setup.client.publish(ALICE, b'{"prompt": "x"}', reply="_TENANT.alice.a.1", headers=headers)
            await setup.client.store.pull_work(QUEUE, 1, expires=5)
        assert [opening.batch_inbox for opening in setup.detokenizer.opened] == ["_TENANT.alice.b.1", "", ""]


async def test_a_tenant_sees_its_own_subject_and_ids() -> None:
    async with serving() as setup:
        heard: list[bytes] = []
        await setup.client.subscribe("_TENANT.alice.>", lambda message: heard.append(message.data))
        setup.client.publish(subjects.for_tenant(subjects.MODELS, "alice"), b"", reply="_TENANT.alice.a.1")
        setup.detokenizer.state = OpenState.CONFLICT
        setup.client.publish(ALICE, b'{"prompt": "x", "request_id": "r1"}', reply="_TENANT.alice.a.1")
        await until(lambda: len(heard) == 2)
        models, conflict = heard
        assert [info.subject for info in msgspec.json.decode(models, type=ModelList).models] == [ALICE]
        frame = msgspec.json.decode(conflict, type=ErrorFrame)
        assert (frame.code, frame.request_id) == (409, "r1")
        assert "alice" not in frame.message
