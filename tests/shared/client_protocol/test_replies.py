import msgspec
import pytest

from pagewire.shared.bus import Headers, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.errors import BusUnavailable, InvalidRequest
from pagewire.shared.messages.client import ErrorFrame
from pagewire.shared.messages.tokenize import TokenizeReply


class RecordingBus(MemoryBus):
    """Keeps what is published, or refuses it while the connection is broken."""

    def __init__(self, max_payload: int = 1 << 20) -> None:
        super().__init__(MemoryBroker(max_payload=max_payload))
        self.sent: list[bytes] = []
        self.broken = False

    def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        if self.broken:
            raise BusUnavailable("cut")
        super().publish(subject, data, reply=reply, headers=headers)
        self.sent.append(data)


def request(body: bytes = b"{}", headers: Headers | None = None) -> Message:
    return Message("pagewire.v1.tokenize.m", body, reply="_INBOX.a.1", headers=headers or {})


@pytest.mark.parametrize("reply", ["", "pagewire.svc.plan.e1", "_SVC.a", "_INBOX", "_INBOX.*"])
def test_only_client_inboxes_are_accepted_and_other_subjects_are_counted(reply: str) -> None:
    replier = Replier(RecordingBus())
    assert replier.accepts("_INBOX.a.1")
    assert not replier.accepts(reply)
    assert replier.dropped == 1


def test_a_reply_has_the_encoding_of_its_request() -> None:
    bus = RecordingBus()
    replier = Replier(bus)
    replier.send(request(), TokenizeReply([1]))
    replier.send(request(headers={"Content-Type": "application/msgpack"}), TokenizeReply([2]))
    as_json, as_msgpack = bus.sent
    assert msgspec.json.decode(as_json, type=TokenizeReply).token_ids == [1]
    assert msgspec.msgpack.decode(as_msgpack, type=TokenizeReply).token_ids == [2]


def test_a_reply_that_does_not_fit_becomes_an_error() -> None:
    bus = RecordingBus(max_payload=4096)
    Replier(bus).send(request(), TokenizeReply([1] * 4096))
    (frame,) = bus.sent
    assert msgspec.json.decode(frame, type=ErrorFrame).code == 413


@pytest.mark.parametrize(
    ("body", "request_id", "frames"),
    [(b"{", "drawn", 1), (b'{"request_id": "mine"}', "mine", 1), (b'{"stream": true}', "drawn", 2)],
)
def test_an_error_names_the_request_and_ends_its_stream(body: bytes, request_id: str, frames: int) -> None:
    bus = RecordingBus()
    assert Replier(bus).refuse(request(body), InvalidRequest("no"), "drawn") == request_id
    assert len(bus.sent) == frames
    assert msgspec.json.decode(bus.sent[0], type=ErrorFrame).request_id == request_id
    assert bus.sent[1:] == [b""][: frames - 1]


def test_a_reply_without_a_connection_raises_nothing() -> None:
    bus = RecordingBus()
    bus.broken = True
    replier = Replier(bus)
    replier.send(request(), TokenizeReply([1]))
    replier.refuse(request(), InvalidRequest("no"))
    assert bus.sent == []
