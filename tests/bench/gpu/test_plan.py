"""Bytes, operations and memory of steps, against counts made by hand and sums made one by one."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pagewire.bench._gpu.plan import (
    Cell,
    attention_flops,
    decode_bytes,
    fitting,
    grid,
    load_bytes,
    position_bytes,
    prefill_flops,
    weight_bytes,
    working_seconds,
)
from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.sim.roofline import ModelShape, shape_of

LLAMA = shape_of(SHAPES["llama-3-8b"])
SMALL = ModelShape(
    hidden=4, heads=2, kv_heads=1, head_dim=8, vocab=10, windows=(0, 3), layer_weights=100, weights=180
)  # fmt: skip
spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))))


def test_the_grid_has_every_cell_once() -> None:
    cells = grid([1, 8], [512, 4096, 16384])
    assert len(cells) == len(set(cells)) == 6
    assert Cell(8, 4096) in cells


def test_a_cell_takes_whole_blocks() -> None:
    assert Cell(3, 16).blocks == 3
    assert Cell(3, 17).blocks == 6


@given(st.integers(0, 1 << 41), st.sampled_from([1, 2]))
def test_cells_that_fit_stay_in_order_and_leave_room_for_the_weights(room: int, itemsize: int) -> None:
    cells = grid([1, 8, 256], [512, 16384])
    fit = fitting(LLAMA, cells, room, itemsize)
    assert [cell for cell in cells if cell in fit] == fit
    for cell in cells:  # contexts of whole blocks
        taken = weight_bytes(LLAMA) + cell.rows * cell.context * position_bytes(LLAMA, itemsize)
        assert (taken <= room) == (cell in fit)


def test_80_gb_hold_the_expected_cells_of_llama_3_8b() -> None:
    fit = fitting(LLAMA, grid([1, 8, 32, 64, 128, 256], [512, 4096, 16384]), 74 * 10**9, 2)
    assert fit == [
        *(Cell(rows, 512) for rows in (1, 8, 32, 64, 128, 256)),
        *(Cell(rows, 4096) for rows in (1, 8, 32, 64)),
        Cell(1, 16384),
        Cell(8, 16384),
    ]


def test_bytes_of_llama_3_8b_equal_hand_computed_ones() -> None:
    assert weight_bytes(LLAMA) == 8_030_261_248 * 2  # as published
    assert position_bytes(LLAMA, 2) == 131_072
    assert position_bytes(LLAMA, 1) == 65_536
    table = 128_256 * 4096
    assert decode_bytes(LLAMA, 1, 0, 2) == (8_030_261_248 - table + 4096) * 2 + 131_072
    assert decode_bytes(LLAMA, 8, 512, 2) - decode_bytes(LLAMA, 8, 511, 2) == 8 * 131_072


def test_a_window_limits_the_positions_that_are_read() -> None:
    per_layer = position_bytes(SMALL, 2) // 2
    assert decode_bytes(SMALL, 1, 10, 2) - decode_bytes(SMALL, 1, 0, 2) == (10 + 3) * per_layer


def test_a_tied_table_is_read_once_as_the_output() -> None:
    tied = shape_of(SHAPES["qwen3-0.6b"])
    assert decode_bytes(tied, 1, 0, 2) == weight_bytes(tied) + 2 * tied.hidden + position_bytes(tied, 2)


@given(st.integers(1, 60))
def test_attention_of_a_prompt_is_the_sum_over_its_tokens(tokens: int) -> None:
    assert attention_flops(SMALL, tokens) == sum(4 * 2 * 8 * seen for seen in range(1, tokens + 1))
    products = 2 * tokens * 100 + 2 * 10 * 4
    assert prefill_flops(SMALL, tokens) == products + 2 * attention_flops(SMALL, tokens)


@given(spans)
def test_time_with_work_is_the_measure_of_the_union(given_spans: list[tuple[int, int]]) -> None:
    covered = {unit for begin, end in given_spans for unit in range(begin, end)}
    assert working_seconds(given_spans) == len(covered)


def test_intervals_without_work_take_no_time() -> None:
    assert working_seconds([]) == 0.0


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4))
def test_a_load_moves_the_bytes_of_its_steps(lengths: list[tuple[int, int]]) -> None:
    """One request after the other: a step per prompt and one per token behind the first."""
    shape = ModelShape(
        hidden=4, heads=2, kv_heads=1, head_dim=8, vocab=10, windows=(0, 0), layer_weights=100, weights=180
    )
    steps = sum(output for _, output in lengths)
    weights, position = decode_bytes(shape, 0, 0, 2), position_bytes(shape, 2)
    expected = 0.0
    for prompt, output in lengths:
        expected += weights + prompt * position
        for before, _ in pairwise(range(prompt, prompt + output)):
            expected += weights + (before + 1) * position
    assert load_bytes(shape, steps, lengths, 2) == expected
