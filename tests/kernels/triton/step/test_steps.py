"""Inputs and bookkeeping of steps: the device runs on its own, and stays equal to a simple account in Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.step import bookkeeping, step_inputs
from pagewire.kernels.triton.step.sequence_state import SequenceState
from pagewire.shared.sampling_parameters import NOT_FINITE
from tests.kernels.triton.batches import DEVICE, int32
from tests.kernels.triton.references import bookkeeping as bookkeeping_reference
from tests.kernels.triton.references import step_inputs as step_inputs_reference

BLOCK_SIZE, CONTEXT, DUMMY = 4, 24, 77
STOPS = [[7, -1], [-1, -1], [8, 9], [7, 8], [-1, -1]]


def sequence_state(known: list[int], computed: list[int], limit: int = CONTEXT, last: int = CONTEXT) -> SequenceState:
    slots = len(known)
    tokens = torch.full((slots, CONTEXT), -5, dtype=torch.int32)
    for slot, count in enumerate(known):
        tokens[slot, :count] = torch.arange(count) + 100 * slot
    tables = torch.arange(slots * (CONTEXT // BLOCK_SIZE), dtype=torch.int32).reshape(slots, -1).flip(0)
    columns = (int32([limit] * slots), int32([last] * slots), int32([1] * slots))
    return SequenceState(tokens.to(DEVICE), int32(known), int32(computed), *columns, tables.contiguous().to(DEVICE))


def new_inputs(rows: int, tokens: int, places: int) -> step_inputs.StepInputs:
    def garbage(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((count,), -12345, dtype=dtype, device=DEVICE)

    sampled = step_inputs.SampledPlaces(*(garbage(places) for _ in range(4)))
    return step_inputs.StepInputs(
        garbage(tokens), garbage(tokens), garbage(tokens, torch.int64), garbage(rows), garbage(rows), sampled
    )


def cumulative(query_lens: list[int]) -> torch.Tensor:
    return int32([0, *query_lens]).cumsum(0).int()


def step(
    state: SequenceState,
    slots: list[int],
    query_lens: list[int],
    sampled: list[int],
    padding: int = 0,
    drafts: list[int] | None = None,
) -> tuple[step_inputs.StepInputs, list[int]]:
    """One step, checked against the references. `sampled` are the tokens of all places, row after row."""
    rows, cu = int32(slots), cumulative(query_lens)
    cu_places = cumulative([count + 1 for count in drafts or [0] * len(slots)])
    tokens, places = sum(query_lens) + padding, len(sampled) + padding
    inputs = new_inputs(len(slots), tokens, places)
    columns = step_inputs_reference.reference(state, rows, cu, cu_places, DUMMY, BLOCK_SIZE, tokens, places)
    step_inputs.step_inputs(state, rows, cu, cu_places, DUMMY, BLOCK_SIZE, inputs)
    written = torch.stack((inputs.ids, inputs.positions, inputs.places // BLOCK_SIZE), 1)
    live = inputs.places // BLOCK_SIZE != DUMMY
    assert torch.equal((inputs.places % BLOCK_SIZE)[live], (inputs.positions % BLOCK_SIZE)[live].long())
    of_rows = torch.stack((inputs.num_computed_tokens, inputs.lengths), 1)
    samples = inputs.sampled
    of_places = torch.stack((samples.slots, samples.ends, samples.tokens, samples.drafts), 1)
    assert [written.tolist(), of_rows.tolist(), of_places.tolist()] == list(columns)

    copy = SequenceState(*(getattr(state, name).clone() for name in SequenceState.__slots__))
    finishes = torch.full((len(slots),), 99, dtype=torch.uint8, device=DEVICE)
    stops = int32(STOPS[: len(state.known)])
    arguments = (rows, cu, cu_places, inputs.num_computed_tokens, samples.ends, stops, int32(sampled))
    expected = bookkeeping_reference.reference(copy, *arguments)
    seen = torch.zeros(len(state.known), max(0, *sampled) + 1, dtype=torch.int32, device=DEVICE)
    bookkeeping.bookkeeping(state, *arguments, finishes, seen)
    assert finishes.tolist() == expected
    for name in SequenceState.__slots__:
        assert torch.equal(getattr(state, name), getattr(copy, name)), name
    return inputs, expected


def test_decode_steps_follow_each_other_without_the_host() -> None:
    state = sequence_state([3, 5], [2, 4], last=9)
    for token in (1, 2, 3):
        step(state, [1, 0], [1, 1], [token, token + 10])
    assert state.tokens[0, :6].tolist() == [0, 1, 2, 11, 12, 13]
    assert state.known.tolist() == [6, 8]
    assert state.computed.tolist() == [5, 7]


def test_a_stop_id_makes_a_dead_row_that_writes_to_the_dummy_block() -> None:
    state = sequence_state([3, 3, 3], [2, 2, 2])
    _, finishes = step(state, [0, 1, 2], [1, 1, 1], [7, 7, 9])
    assert finishes == [1, 0, 1]
    inputs, finishes = step(state, [0, 1, 2], [1, 1, 1], [5, 5, 5])
    assert (inputs.places // BLOCK_SIZE == DUMMY).tolist() == [True, False, True]
    assert inputs.num_computed_tokens.tolist() == [-1, 3, -1]
    assert finishes == [0, 0, 0]


def test_length_ends_a_sequence_and_a_stop_id_goes_before_it() -> None:
    state = sequence_state([3, 3], [2, 2], last=4)
    _, finishes = step(state, [0, 1], [1, 1], [7, 7])
    assert finishes == [1, 2]
    assert state.alive.tolist() == [0, 0]


def test_a_row_without_a_token_is_dead_afterwards() -> None:
    state = sequence_state([3, 4], [2, 3], last=5)
    assert step(state, [0, 1], [1, 1], [NOT_FINITE, NOT_FINITE])[1] == [3, 3]
    inputs, _ = step(state, [0, 1], [1, 1], [-1, -1])
    assert (inputs.places // BLOCK_SIZE).tolist() == [DUMMY, DUMMY]


def test_a_prompt_in_chunks_samples_at_its_end_only() -> None:
    state = sequence_state([9], [0])
    inputs, _ = step(state, [0], [5], [6])
    assert inputs.sampled.ends.tolist() == [-1]
    assert state.known.tolist() == [9]
    inputs, _ = step(state, [0], [4], [6])
    assert inputs.sampled.ends.tolist() == [9]
    assert state.tokens[0, 9] == 6


def test_a_slot_at_its_limit_waits() -> None:
    state = sequence_state([5], [4], limit=4)
    inputs, _ = step(state, [0], [1], [6])
    assert inputs.num_computed_tokens.tolist() == [-1]
    state.limit.fill_(8)
    inputs, _ = step(state, [0], [1], [6])
    assert inputs.num_computed_tokens.tolist() == [4]


def test_padding_of_a_graph_goes_to_the_dummy_block() -> None:
    state = sequence_state([5, 6], [4, 0])
    inputs, _ = step(state, [0, 1, 0, 0], [1, 6, 0, 0], [1, 2, 3, 4], padding=9)
    assert (inputs.places[7:] // BLOCK_SIZE == DUMMY).all()


def test_penalties_count_the_token() -> None:
    state = sequence_state([3, 3], [2, 2])
    seen = torch.zeros(2, 10, dtype=torch.int32, device=DEVICE)
    finishes = torch.zeros(2, dtype=torch.uint8, device=DEVICE)
    rows, cu = int32([1, 0]), cumulative([1, 1])
    stops = int32(STOPS[:2])
    bookkeeping.bookkeeping(state, rows, cu, cu, int32([2, -1]), int32([3, -1]), stops, int32([4, 5]), finishes, seen)
    assert seen.tolist() == [[0] * 10, [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]]


def test_a_row_keeps_its_drafts_up_to_the_first_that_is_wrong() -> None:
    """Its drafts stand in the table behind its text. The second row has all of them right, the third one none."""
    state = sequence_state([6, 6, 6], [2, 2, 2])
    texts = state.tokens.tolist()
    sampled = [texts[0][3], 40, 41, 42, *texts[1][3:6], 43, 44, 45, 46, 47]
    inputs, finishes = step(state, [0, 1, 2], [4, 4, 4], sampled, padding=3, drafts=[3, 3, 3])
    assert inputs.sampled.ends.tolist()[:12] == [3, 4, 5, 6] * 3
    assert finishes == [0, 0, 0]
    assert state.known.tolist() == [5, 7, 4]
    assert state.computed.tolist() == [4, 6, 3]
    assert state.tokens[0, :5].tolist() == [*texts[0][:4], 40]
    assert state.tokens[1, :7].tolist() == [*texts[1][:6], 43]


def test_all_tokens_that_a_row_keeps_are_counted() -> None:
    state = sequence_state([5], [2])
    state.tokens[0, 3:5] = int32([8, 8])
    seen, finishes = torch.zeros(1, 10, dtype=torch.int32, device=DEVICE), int32([0]).to(torch.uint8)
    rows, cu, stops = int32([0]), cumulative([3]), int32(STOPS[1:2])
    ends, sampled = int32([3, 4, 5]), int32([8, 8, 9])
    bookkeeping.bookkeeping(state, rows, cu, cu, int32([2]), ends, stops, sampled, finishes, seen)
    assert seen.tolist() == [[0] * 8 + [4, 2]]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5),
    st.integers(4, CONTEXT),
    st.integers(4, CONTEXT),
    st.integers(0, 10),
    st.randoms(use_true_random=False),
)
def test_any_rows_equal_the_reference(
    columns: list[tuple[int, int, int]], limit: int, last: int, token: int, random: "object"
) -> None:
    computed = [row[0] for row in columns]
    state = sequence_state([row[0] + row[1] for row in columns], computed, limit, last)
    slots = list(range(len(columns)))
    random.shuffle(slots)  # type: ignore[attr-defined]
    query_lens = [row[2] for row in columns]
    drafts = [random.randint(0, max(width - 1, 0)) for width in query_lens]  # type: ignore[attr-defined]
    for padding in (0, 5):
        before = state.tokens.tolist()
        sampled = []
        for slot, width, count in zip(slots, query_lens, drafts, strict=True):
            end = int(state.computed[slot]) + width - count
            sampled += [*before[slot][end : end + random.randint(0, count)], *range(30, 60)][: count + 1]  # type: ignore[attr-defined]
        step(
            state, slots, query_lens, [(each + token) % 11 if each == 30 else each for each in sampled], padding, drafts
        )
