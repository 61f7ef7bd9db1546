import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.chat.layout import Conversation
from pagewire.services.tokenizer.prompts import MAX_PROMPTS, Chat, Ids, Texts, check_ids, prompts_of
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatMessage, GenerateRequest

TURN = ChatMessage("user", "hello")


def refused(request: GenerateRequest) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prompts_of(request)
    return caught.value.message


def test_one_text() -> None:
    assert prompts_of(GenerateRequest(prompt="hello")) == Texts(["hello"])


def test_one_list_of_ids() -> None:
    assert prompts_of(GenerateRequest(prompt=[1, 2, 3])) == Ids([[1, 2, 3]])


def test_several_texts() -> None:
    assert prompts_of(GenerateRequest(prompt=["a", "b"])) == Texts(["a", "b"])
    assert prompts_of(GenerateRequest(prompt=["a"])) == Texts(["a"])


def test_several_lists_of_ids() -> None:
    assert prompts_of(GenerateRequest(prompt=[[1], [2, 3]])) == Ids([[1], [2, 3]])


def test_a_conversation() -> None:
    assert prompts_of(GenerateRequest(messages=[TURN])) == Chat(Conversation([{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize(
    "request_",
    [GenerateRequest(), GenerateRequest(prompt="x", messages=[TURN]), GenerateRequest(prompt="", messages=[])],
)
def test_neither_or_both_are_refused(request_: GenerateRequest) -> None:
    assert refused(request_) == "give exactly one of prompt and messages"


def test_nothing_at_all_is_refused() -> None:
    assert "messages is empty" in refused(GenerateRequest(messages=[]))
    assert "prompt is empty" in refused(GenerateRequest(prompt=[]))


@pytest.mark.parametrize("prompt", [["a", 1], [1, "a"], ["a", [1]], [[1], 2], [[1], "a", 3]])
def test_mixed_kinds_are_refused(prompt: list[int | str | list[int]]) -> None:
    assert "several kinds" in refused(GenerateRequest(prompt=prompt))


def test_the_number_of_prompts_is_bounded() -> None:
    assert prompts_of(GenerateRequest(prompt=["x"] * MAX_PROMPTS)) == Texts(["x"] * MAX_PROMPTS)
    assert str(MAX_PROMPTS + 1) in refused(GenerateRequest(prompt=["x"] * (MAX_PROMPTS + 1)))
    assert str(MAX_PROMPTS + 1) in refused(GenerateRequest(prompt=[[1]] * (MAX_PROMPTS + 1)))


def test_a_long_list_of_ids_is_one_prompt() -> None:
    assert prompts_of(GenerateRequest(prompt=[1] * 10_000)) == Ids([[1] * 10_000])


@pytest.mark.parametrize("ids", [[-1], [10], [0, 9, 10], [2**70], [5, -(2**70)]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt 1 has token .* outside the vocabulary of 10 tokens"):
        check_ids([[0], ids], 10)


def test_an_empty_prompt_in_a_batch_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt 2 is empty"):
        check_ids([[1], [2], []], 10)


@given(st.lists(st.lists(st.integers(-5, 15)), max_size=5))
def test_what_passes_is_inside_the_vocabulary(prompts: list[list[int]]) -> None:
    good = all(ids and all(0 <= token < 10 for token in ids) for ids in prompts)
    if good:
        check_ids(prompts, 10)
    else:
        with pytest.raises(InvalidRequest):
            check_ids(prompts, 10)
