"""Recognises a model of `transformers` whose layers are those of `decoder.py`, so that they can run as these.

What a module computes is found out by trying it on numbers, not by its name. Whether the whole decoder computes what
the model computes is for the self-test to say.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagewire.kernels.activation import Activation
from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.decoder import DecoderLM
from pagewire.services.executor.models.layers import ACTIVATIONS, RMSNorm
from pagewire.services.executor.models.model import ModelSpec
from pagewire.services.executor.models.rope import Rope
from pagewire.services.executor.models.spec import DecoderSpec, HeadNorm, LayerSpec, Norm, Placement
from pagewire.services.executor.models.transformers_backend.gate import body_name
from pagewire.services.executor.models.weights import Place, places_of

NORMS: Mapping[frozenset[str], Placement] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): Placement.BEFORE,
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): Placement.AFTER,
    frozenset(
        {
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        }
    ): Placement.AROUND,
}
"""Names of the norms of a block, to what they normalise."""


class Unknown(Exception):
    """The model has a part that `decoder.py` has not."""


def recognize(model: PreTrainedModel, sizes: ModelSpec) -> DecoderLM | None:
    """Returns a decoder that has the parameters of `model` in common with it; None if its modules are others.

    `model` stays usable: projections that the decoder computes as one product become parts of one tensor.
    """
    try:
        with torch.inference_mode():
            spec = _spec(model, sizes)
            with torch.device("meta"):
                decoder = DecoderLM(spec)
            places, theirs = dict(places_of(decoder)), dict(model.named_parameters())
            if places.keys() != theirs.keys() or any(
                theirs[name].shape != places[name].stored.shape for name in places
            ):
                return None
            decoder.load_state_dict(_shared(places, theirs), assign=True)
    except (Unknown, AttributeError):  # a part has another name
        return None
    return decoder.requires_grad_(requires_grad=False).eval()


def _shared(places: Mapping[str, Place], theirs: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the decoder's parameters. Parts are joined, and the model's own parameters become views of them."""
    parts: dict[str, list[str]] = {}
    for name, place in places.items():
        parts.setdefault(place.parameter, []).append(name)
    state = {}
    for parameter, names in parts.items():
        if len(names) == 1:
            state[parameter] = theirs[names[0]].data
            continue
        state[parameter] = torch.cat([theirs[name].data for name in names])
        for name in names:
            theirs[name].data = places[name].stored.part(state[parameter])
    return state


def _spec(model: PreTrainedModel, sizes: ModelSpec) -> DecoderSpec:
    prefix = body_name(model)
    body: Any = getattr(model, prefix)
    layer, attention, mlp = body.layers[0], body.layers[0].self_attn, body.layers[0].mlp
    placement = NORMS.get(frozenset(name for name, part in layer.named_children() if _is_vector(part)))
    if placement is None:
        raise Unknown
    rope = Rope(
        rope_type="given",
        frequencies=tuple(body.rotary_emb.inv_freq.tolist()),
        attention_factor=float(body.rotary_emb.attention_scaling),
        original_max_position_embeddings=sizes.max_length,
    )
    vocabulary, width = body.embed_tokens.weight.shape
    if vocabulary != sizes.vocab_size:
        raise Unknown
    return DecoderSpec(
        vocab_size=vocabulary,
        width=width,
        inner=mlp.down_proj.in_features,
        layers=tuple(LayerSpec(_plain(heads), rope) for heads in sizes.layers),
        eps=_eps(body.norm),
        tied=model.get_output_embeddings().weight is body.embed_tokens.weight,
        norm=_norm(body.norm),
        placement=placement,
        head_norm=_head_norm(attention, sizes.layers[0]),
        qkv_bias=attention.q_proj.bias is not None,
        output_bias=attention.o_proj.bias is not None,
        mlp_bias=mlp.down_proj.bias is not None,
        activation=_activation(mlp.act_fn),
        embedding_scale=_ratio(body.embed_tokens),
        logit_cap=float(getattr(model.config, "final_logit_softcapping", None) or 0.0),
        names={"model": prefix},
    )


def _is_vector(module: nn.Module) -> bool:
    """Returns whether a module has one parameter of one dimension, as a norm has."""
    shapes = [parameter.dim() for parameter in module.parameters()]
    return shapes == [1]


def _plain(heads: Attention) -> Attention:
    if heads.chunk or heads.value_head_size != heads.head_size:
        raise Unknown
    return heads


def _eps(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _norm(theirs: Any) -> Norm:
    """Returns the kind of a norm, found by its results."""
    width = len(theirs.weight)
    for kind, offset in ((Norm.RMS, 0.0), (Norm.RMS_PLUS_ONE, 1.0)):
        ours = RMSNorm(width, _eps(theirs), offset)
        ours.weight.data = theirs.weight.data
        if _agree(theirs, ours, [width], theirs.weight.dtype):
            return kind
    raise Unknown


def _activation(theirs: Any) -> Activation:
    for kind, ours in ACTIVATIONS.items():
        if _agree(theirs, ours, [64], torch.float32):
            return kind
    raise Unknown


def _agree(
    theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype
) -> bool:
    """Returns whether two functions are equal within rounding, on random numbers."""
    x = 3 * torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    return torch.allclose(theirs(x.to(dtype)).float(), ours(x.to(dtype)).float(), rtol=tolerance, atol=tolerance)


def _head_norm(attention: Any, heads: Attention) -> HeadNorm:
    if not hasattr(attention, "q_norm"):
        return HeadNorm.NONE
    if len(attention.q_norm.weight) == heads.head_size:
        return HeadNorm.EACH
    return HeadNorm.TOGETHER


def _ratio(embedding: Any) -> float:
    """Returns the factor of the embeddings."""
    row = embedding.weight[0].float()
    return float((embedding(torch.zeros(1, dtype=torch.long))[0].float() @ row) / (row @ row))
