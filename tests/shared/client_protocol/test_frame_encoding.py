import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.client_protocol.frame_encoding import encode_frame, error_frame, error_headers
from pagewire.shared.errors import REQUEST_ERRORS, InvalidRequest, Overloaded, invalid_field
from pagewire.shared.messages.client import Delta, ErrorFrame, Frame
from pagewire.shared.messages.open import Encoding

DELTA = Delta(index=0, start=3, text="né", token_ids=[7])


def test_frames_are_objects_with_their_type() -> None:
    expected = {"type": "delta", "index": 0, "start": 3, "text": "né", "token_ids": [7], "logprobs": None}
    assert msgspec.json.decode(encode_frame(DELTA, Encoding.JSON)) == expected
    assert msgspec.msgpack.decode(encode_frame(DELTA, Encoding.MSGPACK)) == expected


def test_a_client_can_tell_frames_apart() -> None:
    assert msgspec.json.decode(encode_frame(DELTA, Encoding.JSON), type=Frame) == DELTA


@pytest.mark.parametrize("kind", REQUEST_ERRORS)
def test_every_error_has_its_frame(kind: str) -> None:
    error = REQUEST_ERRORS[kind]("what went wrong")
    assert error_frame(error, "r1", 4) == ErrorFrame(
        code=error.code,
        error=kind,
        message="what went wrong",
        retryable=error.retryable,
        request_id="r1",
        tokens_emitted=4,
    )
    assert error_headers(error) == {
        "Nats-Service-Error": "what went wrong",
        "Nats-Service-Error-Code": str(error.code),
    }


def test_a_frame_has_retry_after_only_if_it_is_known() -> None:
    with_wait = msgspec.json.decode(encode_frame(error_frame(Overloaded("busy", 500), "r1"), Encoding.JSON))
    assert with_wait["retry_after_ms"] == 500
    without = msgspec.json.decode(encode_frame(error_frame(Overloaded("busy"), "r1"), Encoding.JSON))
    assert "retry_after_ms" not in without


def test_an_error_frame_has_a_field_only_if_one_is_to_blame() -> None:
    assert error_frame(invalid_field("n", "must be at least 1"), "r1").field == "n"
    assert b"field" not in encode_frame(error_frame(InvalidRequest("wrong"), "r1"), Encoding.JSON)


@given(st.text())
def test_headers_of_any_message_are_short_lines_of_ascii(message: str) -> None:
    for value in error_headers(InvalidRequest(message)).values():
        assert value.isascii()
        assert value.isprintable()
        assert len(value) <= 200


def test_a_message_that_quotes_a_long_request_is_cut() -> None:
    assert len(error_frame(InvalidRequest("x" * 10**6), "r1").message) == 1000
