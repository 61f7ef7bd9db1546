from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.dispatch.request_messages import (
    PROMPT_TAIL,
    open_stream,
    request_messages,
    secret_of,
    work_item,
)
from pagewire.services.tokenizer.request_checker import CheckedRequest
from pagewire.services.tokenizer.request_encoder import EncodedRequest
from pagewire.services.tokenizer.validation.request_checks import TokenPrompts
from pagewire.shared.messages import Decoder, encode, pack, unpack
from pagewire.shared.messages.client import GenerateRequest, SamplingParams
from pagewire.shared.messages.open import Encoding, OpenStream
from pagewire.shared.messages.work import Sampling, WorkItem

SAMPLING = Sampling(16, stop_ids=pack([0]), seed=7)
DEADLINE = 123.5


def encoded(request: GenerateRequest, prompts: list[list[int]]) -> EncodedRequest:
    """A request whose prompts have these token ids."""
    checked = CheckedRequest(
        request,
        TokenPrompts(prompts),
        "r1",
        "",
        "_INBOX.a",
        Encoding.MSGPACK,
        fresh=True,
        batch_inbox="_INBOX.b",
        expires=0.0,
    )
    return EncodedRequest(checked, prompts, SAMPLING, b"digest", skip_special=request.sampling.skip_special_tokens)


def test_the_opening_has_every_field_that_the_detokenizer_needs() -> None:
    params = SamplingParams(
        n=2,
        stop=["x", "y", "x"],
        stop_token_ids=[4, 4],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        min_tokens=3,
    )
    request = GenerateRequest(prompt=[[1, 2], [3]], stream=True, sampling=params)
    opening = open_stream(encoded(request, [[1, 2], [3]]), DEADLINE, timeout_ms=500)
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
        deadline=DEADLINE,
        secret=secret_of("r1", b"digest"),
    )
    assert Decoder(OpenStream).decode(encode(opening)) == opening


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100), min_size=1, max_size=4))
def test_an_opening_has_the_tails_of_prompts_and_a_work_item_all_of_them(prompts: list[list[int]]) -> None:
    request = GenerateRequest(prompt=prompts, priority=-3, user="ann", cache_salt="s")
    opening = open_stream(encoded(request, prompts), DEADLINE, timeout_ms=1)
    work = work_item(encoded(request, prompts), DEADLINE)
    assert [unpack(tail) for tail in opening.prompts] == [ids[-PROMPT_TAIL:] for ids in prompts]
    assert unpack(opening.prompt_lengths) == list(map(len, prompts))
    assert [unpack(ids) for ids in work.prompts] == prompts
    assert (work.request_id, work.n, work.priority, work.deadline) == ("r1", 1, -3, DEADLINE)
    assert (work.user, work.cache_salt) == ("ann", "s")
    assert work.sampling == SAMPLING
    assert Decoder(WorkItem).decode(encode(work)) == work


def test_a_secret_belongs_to_a_request_and_its_id() -> None:
    secrets = [secret_of(request_id, digest) for request_id in ("r1", "r2") for digest in (b"one", b"other")]
    assert len({*secrets}) == 4
    assert secrets[0] == secret_of("r1", b"one")


def test_a_request_that_is_sent_again_has_the_same_secret() -> None:
    """Another detokenizer may have its stream, and answers its client too."""
    request = encoded(GenerateRequest(prompt=[[1, 2]]), [[1, 2]])
    first, again = (request_messages(request, now, 60.0, {}).opening for now in (1.0, 31.0))
    assert first.secret == again.secret
