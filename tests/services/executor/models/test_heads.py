"""Ranks share all heads, each query head beside its KV head, between whole units of the weights."""

from itertools import product

import pytest

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.heads import HeadCut, cut_heads
from pagewire.services.executor.models.shard import Shard, Units
from pagewire.shared.errors import ConfigurationError

SIZE = 64
UNITS = (Units(), Units(inputs=16), Units(outputs=8, inputs=32), Units(outputs=32, inputs=128), Units(inputs=256))


def check(cuts: list[HeadCut], units: Units) -> None:
    whole = cuts[0].whole
    assert [query for cut in cuts for query in cut.queries] == list(range(whole.heads))
    assert {key for cut in cuts for key in cut.keys} == set(range(whole.kv_heads))
    for cut in cuts:
        attention = cut.attention
        assert [cut.keys[i // attention.group] for i in range(attention.heads)] == [
            query // whole.group for query in cut.queries
        ]
        assert all(sum(key in other.keys for other in cuts) == cut.holders for key in cut.keys)
        assert cut.queries.start * SIZE % units.inputs == 0
        assert cut.queries.start * SIZE % units.outputs == 0
        assert cut.keys.start * SIZE % units.outputs == 0


def test_heads_are_shared_in_whole_units() -> None:
    refused = 0
    for heads, kv_heads, size, units in product((1, 2, 4, 6, 8, 12, 32), (1, 2, 3, 4, 6, 8), range(1, 10), UNITS):
        if heads % kv_heads:
            continue
        whole = Attention(heads, kv_heads, SIZE, SIZE**-0.5)
        try:
            cuts = [cut_heads(whole, Shard(rank, size), units) for rank in range(size)]
        except ConfigurationError:
            refused += 1
            assert size > 1
            assert units != Units() or size > heads
            continue
        check(cuts, units)
    assert refused


def test_some_kv_heads_may_be_on_more_ranks_than_others() -> None:
    cuts = [cut_heads(Attention(4, 2, SIZE, 1.0), Shard(rank, 3), Units()) for rank in range(3)]
    assert [(len(cut.queries), cut.holders) for cut in cuts] == [(1, 2), (1, 2), (2, 1)]


def test_more_ranks_than_query_heads_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"has 4 attention heads, too few for .* 5: set it to at most 4"):
        cut_heads(Attention(4, 2, SIZE, 1.0), Shard(0, 5), Units())
