import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.detokenizer.state.completion import StreamedChoice, TokenGap, open_choices
from pagewire.shared.messages import pack
from pagewire.shared.messages.open import Encoding, OpenStream
from pagewire.shared.messages.step import Finish
from tests.support.tokenizers import texts, token_id, tokenizer, vocabulary

NONE, STOP, LENGTH = Finish.NONE, Finish.STOP, Finish.LENGTH
REQUEST = OpenStream(
    request_id="r1",
    digest=b"d",
    reply="_INBOX.c.1",
    encoding=Encoding.JSON,
    stream=True,
    prompts=(b"",),
    prompt_lengths=pack([5]),
    n=1,
    stop=(),
    stop_token_ids=(),
    include_stop=False,
    skip_special=True,
    min_tokens=0,
    timeout_ms=60_000,
)
END = token_id("gpt2", "<|endoftext|>")


def ids(text: str) -> list[int]:
    return tokenizer("gpt2").encode(text).ids


def choice(**values: object) -> StreamedChoice:
    return open_choices(vocabulary("gpt2"), msgspec.structs.replace(REQUEST, **values))[0]


def feed(target: StreamedChoice, tokens: list[int], last: Finish = NONE) -> StreamedChoice:
    """Pushes tokens as the device does, the last one with its finish."""
    start = len(target.tokens)
    for position, token in enumerate(tokens, start):
        target.accept(position, token, last if position == start + len(tokens) - 1 else NONE)
    return target


def test_a_completion_has_one_text_per_token() -> None:
    completion = feed(choice(), ids("Hello world!"))
    assert completion.texts == ["Hello", " world", "!"]
    assert (completion.finish, completion.stop_reason) == (None, None)


def test_a_token_at_a_known_position_changes_nothing() -> None:
    completion = feed(choice(), ids("Hello world"))
    assert not completion.accept(1, ids("!")[0], LENGTH)
    assert completion.tokens == ids("Hello world")
    assert completion.finish is None


def test_a_gap_is_never_applied() -> None:
    completion = feed(choice(), ids("Hello"))
    with pytest.raises(TokenGap):
        completion.accept(2, 1, NONE)
    assert completion.tokens == ids("Hello")


def test_an_end_by_length_releases_the_text_that_was_held_back() -> None:
    completion = feed(choice(stop=("!!!",)), ids("Hi!")[:1] + ids("!") + ids("🦙")[:1], LENGTH)
    assert completion.texts == ["Hi", "", "!\ufffd"]
    assert (completion.finish, completion.stop_reason) == ("length", None)


def test_the_end_token_is_kept_and_silent() -> None:
    completion = feed(choice(), [*ids("Hi"), END], STOP)
    assert (completion.tokens, completion.texts) == ([*ids("Hi"), END], ["Hi", ""])
    assert (completion.finish, completion.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("include", "text"), [(False, "Hi"), (True, "Hi!")])
def test_a_named_stop_token_is_reported(include: bool, text: str) -> None:
    (mark,) = ids("!")
    completion = feed(choice(stop_token_ids=(mark,), include_stop=include), [*ids("Hi"), mark], STOP)
    assert ("".join(completion.texts), completion.finish, completion.stop_reason) == (text, "stop", mark)
    assert completion.tokens[-1] == mark


def test_a_stop_token_releases_the_text_that_was_held_back() -> None:
    assert feed(choice(stop=("Hi!",)), [*ids("Hi"), END], STOP).texts == ["", "Hi"]


def test_a_stop_string_ends_a_completion_at_its_last_token() -> None:
    completion = feed(choice(stop=(" wor",)), ids("Hello world and more"))
    assert completion.tokens == ids("Hello world")
    assert (completion.texts, completion.finish, completion.stop_reason) == (["Hello", ""], "stop", " wor")
    assert not completion.accept(2, 1, NONE)


def test_a_stop_string_wins_over_the_length_at_the_same_token() -> None:
    completion = feed(choice(stop=("world",)), ids("Hello world"), LENGTH)
    assert (completion.finish, completion.stop_reason, "".join(completion.texts)) == ("stop", "world", "Hello ")


def test_no_stop_string_counts_below_the_minimum() -> None:
    completion = feed(choice(stop=("a",), min_tokens=3), ids(" a a a a a"))
    assert len(completion.tokens) == 4
    assert "".join(completion.texts) == " a a a "


def test_a_cancel_leaves_the_text_as_it_was_sent() -> None:
    completion = feed(choice(stop=("world!",)), ids("Hello world"))
    completion.cancel()
    assert (completion.finish, "".join(completion.texts)) == ("cancelled", "Hello ")
    completion.cancel()
    ended = feed(choice(), ids("x"), LENGTH)
    ended.cancel()
    assert ended.finish == "length"


def test_completions_of_a_prompt_count_its_cached_tokens_once() -> None:
    prompts = (pack(ids("One")), pack(ids("Two three")))
    choices = open_choices(
        vocabulary("gpt2"), msgspec.structs.replace(REQUEST, prompts=prompts, prompt_lengths=pack([1, 2]), n=2)
    )
    assert [one.prompt_length for one in choices] == [1, 1, 2, 2]
    assert [one.count_cached(1) for one in choices] == [1, 0, 1, 0]
    assert [one.count_cached(1) for one in choices] == [0] * 4


@given(
    st.sampled_from(texts()[:20]) | st.text(max_size=30),
    st.lists(st.text(min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 5),
    st.sampled_from([LENGTH, STOP]),
)
@settings(max_examples=200, deadline=None)
def test_the_texts_join_to_the_text_of_the_whole(
    text: str, stops: list[str], include: bool, min_tokens: int, finish: Finish
) -> None:
    stops = [*stops, *([text[3:5]] if text[3:5] else [])]
    tokens = [*ids(text), END]
    completion = feed(choice(stop=tuple(stops), include_stop=include, min_tokens=min_tokens), tokens, finish)
    assert len(completion.texts) == len(completion.tokens)
    assert completion.tokens == tokens[: len(completion.tokens)]
    whole = tokenizer("gpt2").decode(tokens)
    if completion.stop_reason is None:
        assert "".join(completion.texts) == whole
        assert completion.tokens == tokens
    else:
        assert isinstance(completion.stop_reason, str)
        assert len(completion.tokens) > min_tokens
        shown = "".join(completion.texts) + ("" if include else completion.stop_reason)
        assert whole.startswith(shown)
        assert shown.endswith(completion.stop_reason)


@given(st.text(max_size=30), st.data())
@settings(max_examples=100, deadline=None)
def test_tokens_that_come_again_change_nothing(text: str, data: st.DataObject) -> None:
    tokens = ids(text)
    once, again = feed(choice(stop=("ab",)), tokens), choice(stop=("ab",))
    for position, token in enumerate(tokens):
        again.accept(position, token, NONE)
        repeated = data.draw(st.integers(0, position))
        again.accept(repeated, 0, LENGTH)
    assert (again.tokens, again.texts) == (once.tokens, once.texts)
