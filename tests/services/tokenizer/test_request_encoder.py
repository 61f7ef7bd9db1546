import msgspec

from pagewire.services.tokenizer.request_encoder import digest_of
from pagewire.shared.client_protocol.client_requests import decode_request
from pagewire.shared.messages.client import ChatMessage, GenerateRequest, SamplingParams
from pagewire.shared.messages.open import Encoding


def test_the_digest_does_not_depend_on_id_stream_or_encoding() -> None:
    body = {"prompt": "x", "sampling": {"seed": 1, "temperature": 0.5}, "priority": 2}
    as_json = decode_request(msgspec.json.encode(body | {"request_id": "a"}), GenerateRequest, Encoding.JSON)
    as_msgpack = decode_request(msgspec.msgpack.encode(body | {"stream": True}), GenerateRequest, Encoding.MSGPACK)
    assert digest_of(as_json) == digest_of(as_msgpack)
    assert len(digest_of(as_json)) == 32


def test_a_default_that_is_spelled_out_changes_nothing() -> None:
    spelled = b'{"sampling":{"n":1,"max_tokens":16},"timeout_ms":60000,"prompt":"x"}'
    assert digest_of(decode_request(spelled, GenerateRequest, Encoding.JSON)) == digest_of(GenerateRequest(prompt="x"))


def test_every_other_difference_changes_the_digest() -> None:
    requests = [
        GenerateRequest(prompt="x"),
        GenerateRequest(prompt="y"),
        GenerateRequest(prompt=["x"]),
        GenerateRequest(prompt=[1]),
        GenerateRequest(prompt=[[1]]),
        GenerateRequest(messages=[ChatMessage("user", "x")]),
        GenerateRequest(prompt="x", priority=1),
        GenerateRequest(prompt="x", timeout_ms=1),
        GenerateRequest(prompt="x", sampling=SamplingParams(seed=1)),
        GenerateRequest(prompt="x", sampling=SamplingParams(max_tokens=None)),
    ]
    assert len({digest_of(request) for request in requests}) == len(requests)
