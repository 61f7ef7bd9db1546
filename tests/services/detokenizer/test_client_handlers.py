import asyncio
from pathlib import Path

import msgspec
import pytest

from pagewire.shared import subjects
from pagewire.shared.errors import RequestTimeout
from pagewire.shared.messages.client import ErrorFrame
from pagewire.shared.messages.open import Encoding
from pagewire.shared.messages.tokenize import DetokenizeReply
from tests.services.detokenizer.rig import END, KEY, finish_hello, ids, rig
from tests.support.tokenizers import tokenizer
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

encodings = pytest.mark.parametrize("encoding", Encoding)


@encodings
async def test_detokenize_answers_the_tokenizers_text_and_refuses_bad_ids(folder: Path, encoding: Encoding) -> None:
    codec = msgspec.msgpack if encoding == Encoding.MSGPACK else msgspec.json
    headers = {"content-type": "application/msgpack"} if encoding == Encoding.MSGPACK else {}
    subject = f"{subjects.DETOKENIZE}.{subjects.model_token(folder.name)}"

    async with rig(folder) as world:
        for tokens in (ids("Hello 🦙"), [*ids("Hi"), END], [], [10**7]):
            request = codec.encode({"token_ids": tokens})
            reply = await world.client.request(subject, request, timeout=2, headers=headers)
            reference = tokenizer("gpt2").decode(tokens, skip_special_tokens=False)
            assert codec.decode(reply.data, type=DetokenizeReply).text == reference
        for bad in (b"no", codec.encode({"token_ids": [-1]}), codec.encode({"token_ids": [2**33]})):
            reply = await world.client.request(subject, bad, timeout=2, headers=headers)
            assert reply.headers["Nats-Service-Error-Code"] == "400"
            assert codec.decode(reply.data, type=ErrorFrame).error == "invalid_request"


class TestInboxes:
    """A reply subject that is no inbox is never answered."""

    async def test_no_answer_is_published_to_a_subject_of_the_services(self, folder: Path) -> None:
        async with rig(folder) as world:
            heard: list[object] = []
            await world.bus.subscribe("pagewire.svc.plan.>", heard.append)
            await world.bus.subscribe("_SVC.victim", heard.append)
            await world.open()
            model = subjects.model_token(folder.name)
            for reply in ("pagewire.svc.plan.e1", "_SVC.victim"):
                for subject in (
                    f"{subjects.CANCEL}.d1.unknown.{KEY}",
                    f"{subjects.RESUME}.d1.r1.{KEY}",
                    f"{subjects.DETOKENIZE}.{model}",
                ):
                    world.client.publish(subject, b'{"token_ids": []}', reply=reply)
            await until(lambda: world.load["dropped_replies"] == 6)
            assert heard == []

    async def test_a_stream_to_a_subject_of_the_services_is_not_opened(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.reader()
            reader.inbox = "pagewire.svc.plan.e1"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await world.open_for(reader)
            assert world.load["dropped_replies"] == 1
            assert world.load["streams"] == 0


class TestNonsense:
    """Whatever arrives, the service goes on."""

    async def test_unreadable_messages_harm_no_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            for verb in ("open", "attach", "abort", "nonsense"):
                world.bus.publish(f"{subjects.DETOKENIZER}.d1.{verb}", b"\x01nonsense")
                world.bus.publish(f"{subjects.DETOKENIZER}.d1.{verb}", b"\x63")
            world.bus.publish(f"{subjects.STEPS}.e1", b"\x01nonsense")
            world.bus.publish(f"{subjects.HEARTBEAT}.executor.e1", b"")
            await finish_hello(world)
            await reader.end()

    @pytest.mark.parametrize("body", [b"", b"[]", b'{"start": -1}', b'{"start": "x"}', b'{"other": 1}'])
    async def test_an_unreadable_resumption_is_refused(self, folder: Path, body: bytes) -> None:
        async with rig(folder) as world:
            first = await world.open()
            reader = await world.reader()
            world.client.publish(first.accepted.resume, body, reply=reader.inbox)
            assert (await reader.error()).code == 400
            await until(lambda: reader.over)

    async def test_the_resumption_of_an_unknown_request_is_refused(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.resume(f"{subjects.RESUME}.d1.unknown.{KEY}", 0)
            error = await reader.error()
            assert (error.code, error.request_id) == (400, "unknown")
            await until(lambda: reader.over)

    async def test_a_request_whose_record_cannot_be_read_is_not_called_unknown(self, folder: Path) -> None:
        """Its client asks again, and the record is there then."""
        async with rig(folder) as world:
            get_done, failures = world.broker.store.get_done, 2

            async def fail(request_id: str) -> bytes | None:
                nonlocal failures
                failures -= 1
                if failures >= 0:
                    raise RequestTimeout("the store does not answer")
                return await get_done(request_id)

            world.broker.store.get_done = fail  # type: ignore[method-assign]
            with pytest.raises(RequestTimeout):
                await world.client.request(f"{subjects.CANCEL}.unknown", b"", timeout=0.1)
            silent = await world.resume(f"{subjects.RESUME}.d1.unknown.{KEY}", 0)
            await until(lambda: failures == 0)
            reader = await world.resume(f"{subjects.RESUME}.d1.unknown.{KEY}", 0)
            assert (await reader.error()).code == 400
            assert silent.frames == []
