"""Edits change exactly the logits they name, in vLLM's order."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.sampling.edit_logits import TILE, edit_logits
from pagewire.kernels.triton.sampling.sampling_columns import (
    ALLOWED,
    BAD_WORDS,
    BIASED,
    GRAMMAR,
    PENALIZED,
    SamplingColumns,
)
from tests.kernels.triton.batches import DEVICE, int32
from tests.kernels.triton.references.edit_logits import reference
from tests.kernels.triton.sampling_cases import sampling_columns

VOCABULARY = 70
CONTEXT = 12
TABLE = sampling_columns(
    3,
    edits=[BIASED, BIASED, BIASED],
    bias_ids=[[4, 9, -1], [-1, -1, -1], [0, 2, 7]],
    bias=[[1.5, -2.0, 9.0], [9.0, 9.0, 9.0], [0.25, -100.0, 3.0]],
    stop_ids=[[9, 3], [5, -1], [-1, -1]],
    min_length=[10, 20, 30],
)
TOKENS = int32([[(7 * place + slot) % VOCABULARY for place in range(CONTEXT)] for slot in range(4)])


def check(
    slots: list[int],
    ends: list[int],
    dtype: torch.dtype = torch.float32,
    table: SamplingColumns = TABLE,
    drafts: Sequence[int] = (),
    masks: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """`drafts` and `masks` are zeros where they are not given."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(slots), VOCABULARY, generator=generator).to(DEVICE, dtype)
    more = int32(drafts or [0] * len(slots)), int32(masks or [[0] * 3] * len(slots))
    expected = reference(table, logits, int32(slots), int32(ends), *more, TOKENS)
    edit_logits(table, logits, int32(slots), int32(ends), *more, TOKENS)
    torch.testing.assert_close(logits, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    return logits


def test_biases_are_added_where_named() -> None:
    check([0, 1, 2], [50, 50, 50])


def test_stop_ids_are_barred_below_the_floor_only() -> None:
    logits = check([0, 1], [9, 20])
    assert logits[0, 3].isinf()
    assert logits[0, 9].isinf(), "a bias does not free a barred token"
    assert logits[1].isfinite().all(), "the minimum length itself is free"


def test_rows_that_sample_nothing_are_untouched() -> None:
    check([0, 0], [-1, 3])


def test_edits_of_bfloat16_equal_the_reference() -> None:
    check([2, 0], [5, 5], torch.bfloat16)


def test_only_allowed_tokens_stay() -> None:
    allowed = [[0] * 3, [1 << 4 | -(1 << 31), 1, 0], [-1, -1, -1]]
    table = sampling_columns(
        3, edits=[ALLOWED | BIASED, ALLOWED, ALLOWED], allowed=[allowed[1], allowed[1], allowed[2]]
    )
    kept = check([1, 2, 0], [3, 3, 3], table=table).isfinite()
    assert kept[0].nonzero().flatten().tolist() == [4, 31, 32]
    assert kept[1].all()


def test_a_grammar_allows_other_tokens_at_each_place_of_a_slot() -> None:
    table = sampling_columns(2, edits=[GRAMMAR, 0], allowed=[[0] * 3] * 2)
    kept = check([0, 0, 1], [3, 4, 3], table=table, masks=[[1 << 4, 0, 0], [0, 2, 0], [0, 0, 0]]).isfinite()
    assert [row.nonzero().flatten().tolist() for row in kept[:2]] == [[4], [33]]
    assert kept[2].all(), "a slot without a grammar"


def test_drafted_tokens_before_a_place_are_penalized() -> None:
    """A token that is drafted twice counts twice."""
    seen = [[0] * VOCABULARY] * 2
    table = sampling_columns(2, edits=[PENALIZED, 0], seen=seen, frequency_penalty=[1.0, 0.0])
    rows = TOKENS.tolist()
    plain, drafted = check([0, 0], [6, 6], table=table, drafts=[0, 2]), rows[0][4:6]
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(2, VOCABULARY, generator=generator).to(DEVICE)
    assert torch.equal(plain[0], before[0])
    assert (before[1] - plain[1]).nonzero().flatten().tolist() == sorted(drafted)
    assert (before[1] - plain[1])[drafted].tolist() == pytest.approx([1.0, 1.0])


def test_prompt_and_output_are_penalized_apart() -> None:
    seen = torch.zeros(2, VOCABULARY, dtype=torch.int32)
    seen[1, :6] = torch.tensor([0, 1, 2, 3, 7, 6])
    prices = {"repetition_penalty": [2.0, 2.0], "frequency_penalty": [0.5, 0.5], "presence_penalty": [0.25, 0.25]}
    table = sampling_columns(2, edits=[0, PENALIZED], seen=seen.tolist(), **prices)
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(2, VOCABULARY, generator=generator)
    after = check([1, 0], [3, 3], table=table).cpu()
    assert torch.equal(after[1], before[1]), "a slot without the bit"
    assert torch.equal(after[0, 6:], before[0, 6:])
    for token, (in_output, known) in enumerate([(0, False), (0, True), (1, True), (1, True), (3, True), (3, True)]):
        x = float(before[0, token])
        x = (x / 2 if x > 0 else x * 2) if known else x
        assert float(after[0, token]) == pytest.approx(x - 0.5 * in_output - 0.25 * (in_output > 0), abs=1e-6)


def test_bad_words_ban_their_last_id_behind_the_others() -> None:
    rows = TOKENS.tolist()
    before = rows[0][4:6]
    words = [[*before, 11], [rows[0][5], 12], [13], [*rows[0][2:6], 14], [before[0], 15]]
    ends = [sum(map(len, words[: count + 1])) for count in range(len(words))]
    flat = [token for word in words for token in word]
    table = sampling_columns(
        1, edits=[BAD_WORDS], bad_words=[flat], bad_word_ends=[[*ends, 0, 0]], num_prompt_tokens=[3]
    )
    banned = check([0], [6], table=table).isinf()
    assert banned.nonzero()[:, 1].tolist() == [11, 12, 13], "the fourth one begins in the prompt"


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_edits_equal_the_reference(data: st.DataObject) -> None:
    """All kinds together, in any order of slots."""
    ids, slots = st.integers(0, VOCABULARY - 1), 3
    words = [data.draw(st.lists(ids, min_size=1, max_size=3)) for _ in range(3)]
    ends = [sum(map(len, words[: count + 1])) for count in range(3)]
    bits = st.integers(-(2**31), 2**31 - 1)
    price = st.floats(0.5, 2.0)
    biased = data.draw(st.lists(ids, min_size=4, max_size=4, unique=True))
    table = sampling_columns(
        slots,
        edits=[data.draw(st.integers(0, 31)) for _ in range(slots)],
        allowed=[[data.draw(bits) for _ in range(3)] for _ in range(slots)],
        bias_ids=[biased] * slots,
        bias=[[data.draw(st.floats(-5, 5, width=32)) for _ in biased] for _ in range(slots)],
        stop_ids=[[data.draw(ids), -1]] * slots,
        min_length=[5] * slots,
        seen=[[data.draw(st.integers(0, 4)) for _ in range(10)] + [0] * (VOCABULARY - 10) for _ in range(slots)],
        repetition_penalty=[data.draw(price) for _ in range(slots)],
        frequency_penalty=[data.draw(price) for _ in range(slots)],
        presence_penalty=[data.draw(price) for _ in range(slots)],
        bad_words=[[*(token for word in words for token in word), *[0] * (9 - ends[-1])]] * slots,
        bad_word_ends=[[*ends, 0]] * slots,
        num_prompt_tokens=[2] * slots,
    )
    order = data.draw(st.permutations(range(slots)))
    positions = [data.draw(st.integers(2, CONTEXT - 1)) for _ in range(slots)]
    drafts = [data.draw(st.integers(0, position)) for position in positions]
    masks = [[data.draw(bits) for _ in range(3)] for _ in range(slots)]
    check(list(order), positions, table=table, drafts=drafts, masks=masks)


def test_more_tokens_than_a_tile_has_are_edited() -> None:
    vocabulary = TILE + 40
    table = sampling_columns(
        1,
        edits=[ALLOWED | PENALIZED],
        allowed=[[*[0] * (TILE // 32), 3, 0]],
        seen=[[*[0] * TILE, 2, *[0] * 39]],
        repetition_penalty=[2.0],
    )
    logits = torch.ones(1, vocabulary, device=DEVICE)
    edit_logits(table, logits, int32([0]), int32([4]), int32([0]), int32([[0] * 66]), TOKENS)
    assert logits[0, TILE : TILE + 2].tolist() == [0.5, 1.0]
    assert logits.isfinite().sum() == 2
