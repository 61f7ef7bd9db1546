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
        assert decoder.read(Message("pagewire.svc.plan.e1", data)) is None
    ((event, subject),) = [(line["event"], line["subject"]) for line in lines]
    assert (event, subject) == ("message_unreadable", "pagewire.svc.plan.e1")


@pytest.mark.parametrize("data", UNREADABLE)
def test_a_periodic_message_that_is_unreadable_is_not_logged(data: bytes) -> None:
    with capture_logs() as lines:
        assert decoder.try_decode(data) is None
    assert lines == []
