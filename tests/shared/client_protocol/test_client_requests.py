from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.client_protocol.client_requests import (
    RequestHead,
    decode_head,
    decode_request,
    encode_request,
    encoding_of,
)
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import GenerateRequest, SamplingParams
from pagewire.shared.messages.open import Encoding

BOTH = [Encoding.JSON, Encoding.MSGPACK]
encodings = st.sampled_from(BOTH)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from([field.name for field in msgspec.structs.fields(GenerateRequest)])


def encoded(value: object, encoding: Encoding) -> bytes:
    return msgspec.msgpack.encode(value) if encoding == Encoding.MSGPACK else msgspec.json.encode(value)


@pytest.mark.parametrize("name", ["Content-Type", "content-type", "CONTENT-TYPE", "Content-type"])
def test_the_content_type_is_found_in_any_case(name: str) -> None:
    assert encoding_of({"traceparent": "x", name: "application/msgpack"}) == Encoding.MSGPACK


@pytest.mark.parametrize("value", ["application/msgpack", " Application/MsgPack ", "application/msgpack; v=1"])
def test_messagepack_is_recognised(value: str) -> None:
    assert encoding_of({"Content-Type": value}) == Encoding.MSGPACK


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}])
def test_any_other_content_type_is_json(headers: dict[str, str]) -> None:
    assert encoding_of(headers) == Encoding.JSON


@pytest.mark.parametrize("encoding", BOTH)
@pytest.mark.parametrize("prompt", ["text", [1, 2], ["a", "b"], [[1], [2, 3]]])
def test_every_kind_of_prompt_is_decoded(encoding: Encoding, prompt: object) -> None:
    request = decode_request(encoded({"prompt": prompt, "stream": True}, encoding), GenerateRequest, encoding)
    assert request.prompt == prompt
    assert request.stream


@pytest.mark.parametrize("encoding", BOTH)
@pytest.mark.parametrize(
    ("body", "place", "field"),
    [
        ({"promt": "x"}, "unknown field `promt`", "promt"),
        ({"p" * 100: "x"}, "unknown field `ppp", "p" * 64),
        ({"sampling": {"beams": 2}}, "unknown field `beams`", "sampling"),
        ({"sampling": {"n": "2"}}, "$.sampling.n", "n"),
        ({"sampling": {"temperature": "hot"}}, "$.sampling.temperature", "temperature"),
        ({"messages": [{"role": "user"}]}, "content", "messages"),
        ({"prompt": {"text": "x"}}, "$.prompt", "prompt"),
        ({"prompt": [1.5]}, "$.prompt", "prompt"),
        ({"prompt": [True]}, "$.prompt", "prompt"),
        ({"stream": 1}, "$.stream", "stream"),
        ([], "array", None),
    ],
)
def test_a_wrong_body_is_refused_with_its_place(
    encoding: Encoding, body: object, place: str, field: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_request(encoded(body, encoding), GenerateRequest, encoding)
    assert place in caught.value.message
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"", Encoding.JSON),
        (b"", Encoding.MSGPACK),
        (b"{", Encoding.JSON),
        (b'{"prompt": NaN}', Encoding.JSON),
        (b'{"prompt": "\xff"}', Encoding.JSON),
        (b'{"prompt": "\\ud800"}', Encoding.JSON),
        (b'{"sampling": {"temperature": 1e999}}', Encoding.JSON),
        (b'{"sampling": {"n": ' + b"9" * 5000 + b"}}", Encoding.JSON),
        (b'{"sampling": {"structured_outputs": ' + b'{"a":' * 100_000, Encoding.JSON),
        (b"\x81\xa6prompt\xa1\xff", Encoding.MSGPACK),
        (b"\xc1", Encoding.MSGPACK),
        (b"\x91" * 100_000, Encoding.MSGPACK),
    ],
)
def test_malformed_bytes_are_refused(data: bytes, encoding: Encoding) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_request(data, GenerateRequest, encoding)
    assert "Traceback" not in caught.value.message
    assert "/" not in caught.value.message


@given(st.binary(max_size=200), encodings)
def test_any_bytes_are_a_request_or_invalid(data: bytes, encoding: Encoding) -> None:
    with suppress(InvalidRequest):
        assert isinstance(decode_request(data, GenerateRequest, encoding), GenerateRequest)


@given(st.dictionaries(fields | st.text(max_size=5), values, max_size=5), encodings)
def test_any_structure_is_a_request_or_invalid(body: dict[str, object], encoding: Encoding) -> None:
    if encoding == Encoding.JSON:
        data = msgspec.json.encode(body)
    else:
        try:
            data = msgspec.msgpack.encode(body)
        except OverflowError:  # an integer that MessagePack does not have
            return
    with suppress(InvalidRequest):
        assert isinstance(decode_request(data, GenerateRequest, encoding), GenerateRequest)


@pytest.mark.parametrize("encoding", BOTH)
def test_the_head_of_a_refused_request_is_read(encoding: Encoding) -> None:
    body = encoded({"request_id": "mine-1", "stream": True, "nonsense": {"a": [1]}}, encoding)
    assert decode_head(body, encoding) == RequestHead("mine-1", stream=True)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "x" * 65, "ä", "a\n"])
def test_a_request_id_that_cannot_be_one_is_not_repeated(name: str) -> None:
    assert decode_head(encoded({"request_id": name, "stream": True}, Encoding.JSON), Encoding.JSON) == RequestHead(
        None, stream=True
    )


@given(st.binary(max_size=100), encodings)
def test_every_body_has_a_head(data: bytes, encoding: Encoding) -> None:
    assert isinstance(decode_head(data, encoding), RequestHead)


ENCODER = msgspec.msgpack.Encoder()


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [2**64]}, "prompt has an integer of more than 64 bits"),
        ({"prompt": "x", "sampling": {"top_k": 2**64}}, "top_k has an integer of more than 64 bits"),
        ({"prompt": "x", "sampling": SamplingParams(n=2**64)}, "n has an integer of more than 64 bits"),
        ({"chat_template_kwargs": nested(50_000)}, "chat_template_kwargs is nested too deeply"),
    ],
)
def test_a_value_that_messagepack_cannot_hold_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        encode_request(body, ENCODER)


def test_an_encoded_request_is_decoded() -> None:
    data = encode_request({"prompt": "x", "sampling": {"n": 2}}, ENCODER)
    assert decode_request(data, GenerateRequest, Encoding.MSGPACK).sampling.n == 2
