"""Which steps are captured, and which graph a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.devices.cuda.graph_sizes import (
    LARGEST,
    Bucket,
    Buckets,
    OneShape,
    decode_sizes,
    mixed_sizes,
)
from pagewire.shared.errors import ConfigurationError


def test_a_small_device_captures_the_listed_sizes() -> None:
    assert decode_sizes(5) == [1, 2, 4, 5]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert mixed_sizes(8) == [8]
    assert mixed_sizes(50) == [16, 20, 24, 28, 32, 40, 48, 50]


@given(most=st.integers(1, 1024), tokens=st.integers(1, 100_000), data=st.data())
def test_a_step_fits_into_the_smallest_bucket_that_is_captured(most: int, tokens: int, data: st.DataObject) -> None:
    buckets = Buckets(most, tokens, most)
    rows = data.draw(st.integers(1, most))
    step = data.draw(st.integers(rows, max(rows, 2 * tokens)))
    chosen = buckets.choose(rows, step)
    assert rows <= chosen.rows <= most
    assert chosen.decode == (rows == step)
    fitting = [
        bucket
        for bucket in buckets.captured
        if bucket.decode == chosen.decode and bucket.tokens >= step and bucket.rows >= rows
    ]
    if fitting:
        assert chosen == min(fitting, key=lambda bucket: bucket.tokens)
    else:
        assert chosen == Bucket(min(most, step), step, decode=False)


@given(tokens=st.integers(16, 10_000), step=st.integers(16, LARGEST))
def test_little_of_a_mixed_step_is_padding(tokens: int, step: int) -> None:
    chosen = Buckets(4, tokens, 4).choose(2, step)
    assert step <= chosen.tokens <= 1.25 * step


@given(rows=st.integers(1, 1024), most=st.integers(1, 1024))
def test_little_of_a_decode_step_is_padding(rows: int, most: int) -> None:
    chosen = Buckets(max(rows, most), 512, 2000).choose(rows, rows)
    assert chosen.tokens - rows < 8


@given(rows=st.integers(1, 1024), most=st.integers(1, 1024), drafts=st.integers(0, 200), data=st.data())
def test_a_graph_has_at_most_seven_spare_places_for_logits(
    rows: int, most: int, drafts: int, data: st.DataObject
) -> None:
    buckets = Buckets(max(rows, most), 512, max(rows, most) + drafts)
    assert buckets.places(rows) == buckets.choose(rows, rows).tokens, "a plain step makes no others"
    places = data.draw(st.integers(rows, rows + drafts))
    assert places <= buckets.places(places) < places + 8
    assert buckets.places(places) in buckets.sampled
    assert buckets.sampled == sorted(set(buckets.sampled), reverse=True)


def test_graphs_are_captured_from_large_to_small() -> None:
    captured = Buckets(4, 40, 4).captured
    assert [bucket.tokens for bucket in captured] == [40, 32, 28, 24, 20, 16, 4, 2, 1]
    assert len(set(captured)) == len(captured)


@given(most=st.integers(1, 1024), tokens=st.integers(1, 10_000), data=st.data())
def test_one_shape_holds_every_step_of_a_budget(most: int, tokens: int, data: st.DataObject) -> None:
    shape = OneShape(most, tokens, most + 9)
    step = data.draw(st.integers(1, tokens))
    rows = data.draw(st.integers(1, min(most, step)))
    chosen = shape.choose(rows, step)
    assert chosen == Bucket(min(most, tokens), tokens, decode=False, split=False)
    assert rows <= chosen.rows
    assert shape.captured == ([chosen] if tokens <= LARGEST else [])
    assert shape.places(rows) == min(most + 9, tokens) >= rows
    assert shape.sampled == [shape.places(1) for _ in shape.captured]


def test_a_step_beyond_the_one_shape_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max-num-batched-tokens"):
        OneShape(4, 64, 4).choose(4, 65)
