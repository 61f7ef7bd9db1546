"""The heads of an attention that one of several ranks has."""

import math
from dataclasses import dataclass, replace

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.shard import Ranges, Shard, Units, refuse_cut


@dataclass(frozen=True, slots=True)
class HeadCut:
    """A rank's heads: whole groups of query heads with their KV heads, or a part of one group."""

    whole: Attention
    """The attention of all ranks."""
    queries: range
    """Query heads of this rank."""
    keys: range
    """KV heads of this rank."""
    holders: int = 1
    """Number of ranks that have each of these KV heads."""

    @property
    def attention(self) -> Attention:
        """The attention of this rank."""
        return replace(self.whole, heads=len(self.queries), kv_heads=len(self.keys))

    @property
    def packed(self) -> Ranges:
        """The rank's rows of a matrix of all queries, keys and values."""
        keys_at = self.whole.heads * self.whole.head_size
        values_at = keys_at + self.whole.kv_heads * self.whole.head_size
        return self.query_features, _behind(keys_at, self.key_features), _behind(values_at, self.value_features)

    @property
    def query_features(self) -> range:
        """Features of the rank's queries."""
        return _features(self.queries, self.whole.head_size)

    @property
    def key_features(self) -> range:
        """Features of the rank's keys."""
        return _features(self.keys, self.whole.head_size)

    @property
    def value_features(self) -> range:
        """Features of the rank's values."""
        return _features(self.keys, self.whole.value_head_size)

    @property
    def output_features(self) -> range:
        """Features of the rank's results of attention, which the output projection multiplies."""
        return _features(self.queries, self.whole.value_head_size)


def cut_heads(whole: Attention, shard: Shard, units: Units) -> HeadCut:
    """Returns the heads of a rank. With more ranks than KV heads, several ranks have the same one.

    Raises:
        ConfigurationError: there are too few heads for the ranks.

    >>> cut_heads(Attention(32, 8, 128, 0.1), Shard(2, 3), Units()).attention.heads
    8
    >>> shared = cut_heads(Attention(8, 2, 128, 0.1), Shard(3, 4), Units())
    >>> shared.queries, shared.keys, shared.holders
    (range(6, 8), range(1, 2), 2)
    """
    group, size = whole.group, whole.value_head_size
    rows = math.lcm(_heads(units.outputs, whole.head_size), _heads(units.outputs, size))
    unit = math.lcm(rows, _heads(units.inputs, group * size))  # KV heads between which both matrices may be cut
    if -(-whole.kv_heads // unit) >= shard.size:
        keys = shard.part(whole.kv_heads, unit)
        return HeadCut(whole, range(keys.start * group, keys.stop * group), keys)
    head, ranks = next(
        (head, ranks)
        for head in range(whole.kv_heads)
        if shard.rank in (ranks := Shard(head, whole.kv_heads).part(max(shard.size, whole.kv_heads)))
    )
    inner = math.lcm(_heads(units.outputs, whole.head_size), _heads(units.inputs, size))
    together = unit if whole.kv_heads > 1 else 1
    if together > 1 or len(ranks) > -(-group // inner):
        refuse_cut(shard, whole.heads, "attention heads", min(together * group if together > 1 else inner, whole.heads))
    queries = Shard(shard.rank - ranks.start, len(ranks)).part(group, inner)
    first = head * group
    return HeadCut(whole, range(first + queries.start, first + queries.stop), range(head, head + 1), holders=len(ranks))


def _heads(unit: int, size: int) -> int:
    """Returns the least number of heads of `size` numbers that fills whole units."""
    return unit // math.gcd(unit, size)


def _features(heads: range, size: int) -> range:
    """Returns the features of heads of so many each."""
    return range(heads.start * size, heads.stop * size)


def _behind(first: int, part: range) -> range:
    return range(first + part.start, first + part.stop)
