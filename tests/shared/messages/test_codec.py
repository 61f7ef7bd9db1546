import msgspec
import pytest
from structlog.testing import capture_logs

from pagewire.shared.bus import Message
from pagewire.shared.errors import WireVersionError
from pagewire.shared.messages import WIRE_VERSION, Decoder, encode
from pagewire.shared.messages.plan import Replay

REPLAY = Replay(1, 2, 3)
OTHER_VERSION = bytes([WIRE_VERSION + 1]) + encode(REPLAY)[1:]
UNREADABLE = [b"", OTHER_VERSION, bytes([WIRE_VERSION]) + b"nonsense"]
decoder = Decoder(Replay)


def test_a_message_comes_back() -> None:
    data = encode(REPLAY)
    assert decoder.decode(data) == decoder.try_decode(data) == decoder.read(Message("s", data)) == REPLAY


def test_another_version_and_other_bytes_are_told_apart() -> None:
    with pytest.raises(WireVersionError):
        decoder.decode(OTHER_VERSION)
    for data in (UNREADABLE[0], UNREADABLE[2]):
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(data)


@pytest.mark.parametrize("data", UNREADABLE)
def test_an_unreadable_bus_message_is_one_line_in_the_log(data: bytes) -> None:
    with capture_logs() as lines:
        assert Decoder(Replay).read(Message("pagewire.svc.plan.e1", data)) is None
    ((event, subject),) = [(line["event"], line["subject"]) for line in lines]
    assert event == ("other_wire_version" if data == OTHER_VERSION else "message_unreadable")
    assert subject == "pagewire.svc.plan.e1"


def test_a_peer_of_another_version_is_logged_once() -> None:
    with capture_logs() as lines:
        reader = Decoder(Replay)
        assert [reader.read(Message("pagewire.svc.steps.e1", OTHER_VERSION)) for _ in range(3)] == [None] * 3
    assert len(lines) == 1


@pytest.mark.parametrize("data", UNREADABLE)
def test_a_periodic_message_that_is_unreadable_is_not_logged(data: bytes) -> None:
    with capture_logs() as lines:
        assert decoder.try_decode(data) is None
    assert lines == []
