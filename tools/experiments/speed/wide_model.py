"""Writes a model of about a billion parameters whose texts are those of SmolLM2-135M, to measure a draft model.

Each layer of the smaller model stands in a wider one: the further heads, channels and inner columns have random
weights, but nothing that they compute reaches the output. So a step takes the time of the larger model, the smaller one
drafts for it as a well-trained draft model would, and what it drafts wrongly comes from the rounding of the larger
model's weights.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pagewire.bench._quality.transformers import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models import model_folder
from pagewire.shared.models.named_models import DEFAULT
from pagewire.shared.models.tokenizer_files import load_tokenizer

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Fields of the config that are multiplied."""
DEVIATION = 0.02
"""Standard deviation of the random weights."""


def main(arguments: list[str]) -> int:
    """Writes the folder."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments wide_model", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder that is written, with config, weights and tokenizer")
    parser.add_argument("--model", default=DEFAULT.name, help="the small model of the family Llama")
    parser.add_argument("--factor", type=int, default=3, help="by which each width is multiplied")
    options = parser.parse_args(arguments)
    path = model_folder.resolve(options.model)
    model = load_model(path)
    if not isinstance(model, LlamaForCausalLM):
        raise ConfigurationError(f"{options.model} is no model of the family Llama: choose one that is")
    wide = widened(model, options.factor).bfloat16()
    wide.save_pretrained(options.folder)
    load_tokenizer(path).to_transformers().save_pretrained(options.folder)
    print(f"{options.folder}: {sum(weight.numel() for weight in wide.parameters()) / 1e6:.0f} million parameters")
    return 0


def widened(model: LlamaForCausalLM, factor: int) -> LlamaForCausalLM:
    """Returns a model with each of `WIDTHS` multiplied by `factor`, and the logits of `model`.

    The further channels of the hidden states are zero, by which a norm's mean of squares is `factor` times smaller:
    its weights and its epsilon make up for that.
    """
    fields = model.config.to_dict()
    fields |= {name: fields[name] * factor for name in WIDTHS}
    fields |= {"head_dim": model.model.layers[0].self_attn.head_dim, "rms_norm_eps": fields["rms_norm_eps"] / factor}
    wide = LlamaForCausalLM(LlamaConfig(**fields)).float()
    hidden = model.config.hidden_size
    small = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            if weight.dim() == 1:
                corner(weight.zero_(), small[name] * factor**-0.5)
                continue
            corner(weight.normal_(std=DEVIATION), small[name])
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight[:, hidden:] = 0
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[hidden:], weight[:, small[name].shape[1] :] = 0, 0
    return wide.eval().requires_grad_(requires_grad=False)


def corner(target: Tensor, values: Tensor) -> None:
    """Copies `values` to the places of `target` whose indices they have."""
    target[tuple(slice(size) for size in values.shape)].copy_(values)
