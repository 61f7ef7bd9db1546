"""Loads the part of a model that one of several ranks computes."""

import torch

from pagewire.services.executor.models.model import CausalLM, ModelCut
from pagewire.services.executor.models.shard import Collectives, Shard, Units, largest_units
from pagewire.services.executor.models.tensors import TensorSource
from pagewire.services.executor.models.weights import (
    HEAD,
    Packing,
    check_tensors,
    load_weights,
    places_of,
    random_weights,
    stored_slices,
)


def load_part(
    whole: CausalLM,
    source: TensorSource,
    dtype: torch.dtype,
    packing: Packing | None,
    shard: Shard,
    collectives: Collectives,
) -> CausalLM:
    """Loads a rank's part of a model, which is `whole` on the meta device, and reads its part of the tensors alone.

    Raises:
        ConfigurationError: the tensors do not match the model, or cannot be cut for the ranks.
    """
    _, tied = check_tensors(whole, source)
    cut = find_cut(whole, source, packing, shard)
    model = _build(cut, collectives)
    slices = stored_slices(whole, cut.held)
    part = {name: slices[name] for name, _ in places_of(model)}
    if tied:
        part[HEAD] = next(
            slices[name] for name, place in places_of(whole) if whole.get_parameter(place.parameter) is whole.embedding
        )
    load_weights(model, source.cut(part), dtype, packing)
    return model.eval()


def find_cut(whole: CausalLM, source: TensorSource, packing: Packing | None, shard: Shard) -> ModelCut:
    """Returns a rank's part of a model in the units in which its tensors are stored, and in which they are packed.

    Raises:
        ConfigurationError: the model cannot be cut.
    """
    finest = stored_slices(whole, whole.cut(shard, Units()).held)
    units = largest_units([source.units(finest), Units() if packing is None else packing.units])
    return whole.cut(shard, units)


def random_part(whole: CausalLM, dtype: torch.dtype, seed: int, shard: Shard, collectives: Collectives) -> CausalLM:
    """Returns a rank's part of a model with the random weights that the `whole` has by `random_weights`.

    Raises:
        ConfigurationError: the model cannot be cut for the ranks.
    """
    cut = whole.cut(shard, Units())
    model = _build(cut, collectives)
    state = random_weights(whole, dtype, seed, cut.held)
    model.load_state_dict({name: state[name] for name, _ in model.named_parameters()}, assign=True)
    return model.requires_grad_(requires_grad=False).eval()


def _build(cut: ModelCut, collectives: Collectives) -> CausalLM:
    """Returns a rank's part of a model without memory for its weights (on torch's meta device)."""
    with torch.device("meta"):
        model = cut.build(collectives)
    model.part = cut
    return model
