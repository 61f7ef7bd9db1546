"""Loads the part of a model that one of several ranks computes."""

import torch

from pagewire.services.executor.models.cut import Cut
from pagewire.services.executor.models.decoder import DecoderLM
from pagewire.services.executor.models.model import CausalLM
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
from pagewire.shared.errors import ConfigurationError

EMBEDDING = "model.embed_tokens.weight"


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
    finest = stored_slices(whole, _cut(whole, shard, Units()).held)
    units = largest_units([source.units(finest), Units() if packing is None else packing.units])
    cut = _cut(whole, shard, units)
    model = build_part(cut, collectives)
    slices = stored_slices(whole, cut.held)
    part = {name: slices[name] for name, _ in places_of(model)}
    if tied:
        part[HEAD] = slices[whole.stored_name(EMBEDDING)]
    load_weights(model, source.cut(part), dtype, packing)
    return model.eval()


def random_part(whole: CausalLM, dtype: torch.dtype, seed: int, shard: Shard, collectives: Collectives) -> CausalLM:
    """Returns a rank's part of a model with the random weights that the `whole` has by `random_weights`.

    Raises:
        ConfigurationError: the model cannot be cut for the ranks.
    """
    cut = _cut(whole, shard, Units())
    model = build_part(cut, collectives)
    state = random_weights(whole, dtype, seed, cut.held)
    model.load_state_dict({name: state[name] for name, _ in model.named_parameters()}, assign=True)
    return model.requires_grad_(requires_grad=False).eval()


def build_part(cut: Cut, collectives: Collectives) -> DecoderLM:
    """Returns a rank's part of a model without memory for its weights (on torch's meta device).

    Raises:
        ConfigurationError: the model has too few heads or features for the ranks.
    """
    with torch.device("meta"):
        return DecoderLM(cut.spec(), collectives)


def _cut(whole: CausalLM, shard: Shard, units: Units) -> Cut:
    if not isinstance(whole, DecoderLM):
        raise ConfigurationError(f"{type(whole).__name__} cannot be cut: set tensor-parallel-size to 1")
    return Cut(whole.described, shard, units)
