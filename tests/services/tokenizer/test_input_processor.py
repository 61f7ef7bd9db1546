import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.input_processor import PROMPT_TAIL, Caller, digest_of, open_stream, work_item
from pagewire.shared.client_protocol.client_requests import decode_request
from pagewire.shared.messages import Decoder, encode, pack, unpack
from pagewire.shared.messages.client import ChatMessage, GenerateRequest, SamplingParams
from pagewire.shared.messages.open import Encoding, OpenStream
from pagewire.shared.messages.work import Sampling, WorkItem

CALLER = Caller("r1", "_INBOX.a", Encoding.MSGPACK, deadline=123.5, fresh=True, batch_inbox="_INBOX.b")
CHOSEN = Sampling(16, stop_ids=pack([0]), seed=7)


def test_the_stream_is_told_what_the_client_asked_for() -> None:
    params = SamplingParams(
        n=2,
        stop=["x", "y", "x"],
        stop_token_ids=[4, 4],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        min_tokens=3,
    )
    request = GenerateRequest(prompt=[[1, 2], [3]], stream=True, sampling=params)
    opening = open_stream(request, CALLER, [[1, 2], [3]], b"digest", timeout_ms=500)
    assert opening == OpenStream(
        request_id="r1",
        digest=b"digest",
        reply="_INBOX.a",
        encoding=Encoding.MSGPACK,
        stream=True,
        prompts=(pack([1, 2]), pack([3])),
        prompt_lengths=pack([2, 1]),
        n=2,
        stop=("x", "y"),
        stop_token_ids=(4,),
        include_stop=True,
        skip_special=False,
        min_tokens=3,
        timeout_ms=500,
        fresh=True,
        batch_inbox="_INBOX.b",
        deadline=123.5,
    )
    assert Decoder(OpenStream).decode(encode(opening)) == opening


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100), min_size=1, max_size=4))
def test_the_stream_gets_tails_and_the_queue_everything(prompts: list[list[int]]) -> None:
    request = GenerateRequest(prompt=prompts, priority=-3, user="ann", cache_salt="s")
    opening = open_stream(request, CALLER, prompts, b"", timeout_ms=1)
    work = work_item(request, CALLER, prompts, CHOSEN)
    assert [unpack(tail) for tail in opening.prompts] == [ids[-PROMPT_TAIL:] for ids in prompts]
    assert unpack(opening.prompt_lengths) == list(map(len, prompts))
    assert [unpack(ids) for ids in work.prompts] == prompts
    assert (work.request_id, work.n, work.priority, work.deadline) == ("r1", 1, -3, 123.5)
    assert (work.user, work.cache_salt) == ("ann", "s")
    assert work.sampling == CHOSEN
    assert Decoder(WorkItem).decode(encode(work)) == work


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
