"""The AsyncAPI document against the code, and against what the services send."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.messages.codec import Wire
from pagewire.shared.security.permissions import ROLES
from pagewire.shared.settings.config import Settings
from pagewire.shared.wire_version import WIRE_VERSION
from tests.support.pipeline import running
from tools.asyncapi import CHANNELS, Channel, Kind, covers, document, users

READ_THROUGH_THE_STORE = {"work", "done", "term", "checkWork", "checkDone", "adapterContent", "adapterRetired"}
PARTS = {"AddSlot", "Fork", "DoneChoice", "Sampling"}
"""Messages that are parts of others."""


def test_every_message_between_services_has_a_channel() -> None:
    named = {kind.__name__ for channel in CHANNELS.values() for kind in channel.kinds()}
    assert {kind.__name__ for kind in Wire.__subclasses__() if kind.__module__.startswith("pagewire")} - PARTS <= named


def test_every_subject_that_a_service_may_use_has_a_channel() -> None:
    patterns = {pattern for role in ROLES.values() for pattern in (*role.publish, *role.subscribe)}
    own = {pattern for pattern in patterns if pattern.startswith("pagewire.")}
    for pattern in own - {tenants for tenants in own if tenants.startswith(subjects.TENANT)}:
        assert channel_of(pattern.replace("*", "x")) or any(
            covers(pattern, channel.example) for channel in CHANNELS.values()
        ), pattern


@pytest.mark.parametrize("name", CHANNELS)
def test_a_channel_has_a_sender_and_a_receiver(name: str) -> None:
    senders, receivers = users(CHANNELS[name])
    assert senders
    assert bool(receivers) == (name not in READ_THROUGH_THE_STORE)


def test_every_reference_leads_somewhere() -> None:
    described = document()

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                target: Any = described
                for part in reference.removeprefix("#/").split("/"):
                    target = target[part]
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)

    check(described)
    assert described["operations"]["executor_send_steps"]["channel"] == {"$ref": "#/channels/steps"}


@pytest.mark.anyio
async def test_the_document_describes_the_messages_of_the_services() -> None:
    messages: list[Message] = []
    async with running(Settings(model="bundled", device="sim:zero", log_level="error")) as pipeline:
        for pattern in ("pagewire.>", "_SVC.>", "_INBOX.>"):
            await pipeline.bus.subscribe(pattern, messages.append)
        await pipeline.bus.flush()
        stream = pipeline.client.stream("Once upon a time", max_tokens=4, stop=["never"])
        assert [delta.start async for delta in stream] == [0, 1, 2, 3]
        await pipeline.client.generate("Once upon a time", max_tokens=2)
        await pipeline.client.detokenize(await pipeline.client.tokenize("Once"))
        await pipeline.client.cancel("unknown")
        await pipeline.until_idle()
        await pipeline.bus.flush()
    schemas = document()["components"]
    sent = [message for message in messages if message.subject.startswith("pagewire.")]
    replies = {message.reply: channel_of(message.subject) for message in sent if message.reply}
    names = set()
    for message in sent:
        channel = channel_of(message.subject)
        assert channel is not None, message.subject
        names.add(channel.address)
        if message.data and channel.messages:
            check_one_of(channel.messages, message, schemas)
    answered = set()
    for message in messages:
        answers = replies.get(message.subject)
        if answers is not None and message.data and answers.replies:
            answered.add(answers.address)
            check_one_of(answers.replies, message, schemas)
    used = ("generate", "tokenize", "detokenize", "cancelById", "open", "attach", "plan", "steps", "work", "done")
    assert {CHANNELS[name].address for name in (*used, "heartbeat")} <= names
    assert {CHANNELS[name].address for name in ("generate", "tokenize", "detokenize", "open", "attach")} <= answered


def channel_of(subject: str) -> Channel | None:
    """Returns the channel of a subject."""
    return next((channel for channel in CHANNELS.values() if channel.pattern.fullmatch(subject)), None)


def check_one_of(kinds: Sequence[Kind], message: Message, components: dict[str, Any]) -> None:
    """Checks that a message is one of several, and what its schema says."""
    for kind in kinds:
        try:
            decoded = decode(kind, bytes(message.data))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        text = msgspec.json.decode(msgspec.json.encode(decoded))
        schema = {**components["messages"][kind.__name__]["payload"], "components": components}
        Draft202012Validator(schema).validate(text)
        return
    raise AssertionError(f"{message.subject}: {bytes(message.data)[:80]!r} is none of {kinds}")


def decode(kind: Kind, data: bytes) -> Any:
    if issubclass(kind, Wire):
        if data[0] != WIRE_VERSION:
            raise msgspec.DecodeError("another version")
        return msgspec.msgpack.decode(data[1:], type=kind)
    if data[:1] == b"{":
        return msgspec.json.decode(data, type=kind)
    return msgspec.msgpack.decode(data, type=kind)
