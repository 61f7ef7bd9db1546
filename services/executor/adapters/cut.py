"""Cuts an adapter as the matrices that it changes are cut for several ranks.

Where a rank has some outputs of a matrix, it has all narrow factors and the expanding ones of these outputs. Where it
has some inputs, it has the narrow factors of these inputs and all expanding ones: the sum over the ranks, which adds up
their products anyway, adds up their updates with it.
"""

from collections.abc import Mapping

from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.models.model import ModelCut
from pagewire.services.executor.models.shard import Ranges, Slices, take

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a matrix."""


def cut_adapter(adapter: Adapter, part: ModelCut) -> Adapter:
    """Returns the adapter of a rank's part of the model. Its tensors share no memory with those of the whole one."""
    updates: Mapping[str, list[LowRank]] = {
        path: [cut for update in several if (cut := cut_update(update, part.held(f"{path}.weight"))) is not None]
        for path, several in adapter.updates.items()
    }
    return Adapter({path: several for path, several in updates.items() if several})


def cut_update(update: LowRank, held: Slices) -> LowRank | None:
    """Returns the update of a part of a product, which has the indices `held` of its matrix.

    None: it changes no output of the part.

    >>> import torch
    >>> update = LowRank(torch.ones(1, 4), torch.tensor([[4.0], [5.0], [6.0], [7.0]]), first=4, scale=2.0)
    >>> cut_update(update, {0: (range(1, 3), range(5, 7))})
    LowRank(shrink=tensor([[1., 1., 1., 1.]]), expand=tensor([[5.],
            [6.]]), first=2, scale=2.0)
    """
    shrink, expand, first = update.shrink, update.expand, update.first
    if INPUTS in held:
        shrink = take(shrink, {1: held[INPUTS]})
    if OUTPUTS in held:
        first, rows = _common(held[OUTPUTS], range(first, first + len(expand)))
        if not rows:
            return None
        expand = take(expand, {0: rows})
    return LowRank(shrink.clone(), expand.clone(), first, update.scale)


def _common(held: Ranges, changed: range) -> tuple[int, Ranges]:
    """Returns the first of the `changed` outputs in the part that has those `held`, and the places in `changed` of all
    that it has: they are consecutive in the part, since it has its outputs in their order."""
    first, before = 0, 0
    rows: list[range] = []
    for part in held:
        begin, end = max(part.start, changed.start), min(part.stop, changed.stop)
        if begin < end:
            first = first if rows else before + begin - part.start
            rows.append(range(begin - changed.start, end - changed.start))
        before += len(part)
    return first, tuple(rows)
