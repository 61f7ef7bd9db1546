"""Measures what it costs to round the inputs of matrix products, product by product.

The model computes in float32 with the weights that its file stores, or with weights rounded to `--weights`. Then the
inputs of some products are rounded symmetrically in chunks of 32, to `--bits`, or in pairs as the CPU kernels round
them for weights of `--pairs` bits. The table has the KL divergence from float32 in nats per token, and how much the
perplexity rises.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._quality.perplexity import TEXT, windows
from pagewire.bench._quality.transformers import load_model
from pagewire.kernels.cpu.packed import CHUNK
from pagewire.services.executor.devices.cpu.weight_packing import VOCABULARY_BITS
from pagewire.services.executor.models.quantized.rounding import round_weights
from pagewire.shared.models import model_folder
from pagewire.shared.models.named_models import DEFAULT
from pagewire.shared.progress import shown

PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "attention output": ("o_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "output layer": ("lm_head",),
}
"""Products of a layer, and the output layer, by the names of their modules."""
ONE = 128
PAIRS = {4: (16, 119), 5: (3, 126), 6: (3, 126), 8: (7, 60)}
"""By bits of the weights, the ratio and the largest input of the pairs of `integers.hpp`, where `ONE` is 1."""
STORED = "stored"
Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cost:
    """Loss by the rounded inputs of some products."""

    weights: str
    products: str
    bits: str
    """Bits of the rounded inputs, or of the weights for which they are rounded in pairs."""
    divergence: float
    """KL divergence from float32, in nats per token."""
    rise: float
    """By what share the perplexity rises."""


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments rounding", description=__doc__)
    parser.add_argument("--model", default=DEFAULT.name, help="folder, .gguf file, hub id or short name")
    parser.add_argument("--weights", nargs="+", default=[STORED], choices=[STORED, "int8", "int4"])
    parser.add_argument("--bits", type=int, nargs="*", default=[8], help="of the rounded inputs")
    parser.add_argument("--pairs", type=int, nargs="*", default=[], choices=PAIRS, help="bits of weights instead")
    parser.add_argument("--text", type=Path, default=TEXT, help="the text that is predicted")
    parser.add_argument("--windows", type=int, default=8, help="pieces of the text, of 512 tokens")
    parser.add_argument("--layers", action="store_true", help="each layer's products, instead of each kind of product")
    add_output(parser)
    options = parser.parse_args(arguments)
    prompts = torch.tensor(windows(options.model, options.text.read_text())[: options.windows])
    costs = []
    for weights in options.weights:
        model = load_model(model_folder.resolve(options.model))
        if weights != STORED:
            round_all(model, int(weights.removeprefix("int")))
        exact = predict(model, prompts)
        groups = by_layer(model) if options.layers else by_kind(model)
        roundings: dict[str, Rounding] = {str(bits): partial(rounded, bits=bits) for bits in options.bits}
        roundings |= {f"pairs for {bits}": partial(rounded_pairs, bits=bits) for bits in options.pairs}
        for bits, rounding in roundings.items():
            for name, modules in shown(list(groups.items()), f"{weights}, bits: {bits}"):
                with rounded_inputs(modules, rounding):
                    costs.append(Cost(weights, name, bits, *compare(exact, predict(model, prompts), prompts)))
    rows = [f"{c.weights} | {c.products} | {c.bits} | {c.divergence:.2e} | {c.rise:+.3%}" for c in costs]
    print("\n".join(markdown("weights | rounded inputs | bits | KL divergence | perplexity", rows)))
    write(options.output, parser.prog, arguments, model=options.model, runs=[asdict(cost) for cost in costs])
    return 0


def by_kind(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the modules of each kind of product, and of all."""
    groups = {
        name: [module for path, module in model.named_modules() if path.rpartition(".")[2] in ends]
        for name, ends in PRODUCTS.items()
    }
    return groups | {"all": [module for modules in groups.values() for module in modules]}


def by_layer(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the modules of the products of each layer."""
    layers: Any = model.get_submodule("model.layers")
    return {
        f"layer {at}": [part for part in layer.modules() if isinstance(part, nn.Linear)]
        for at, layer in enumerate(layers)
    }


def round_all(model: nn.Module, bits: int) -> None:
    """Rounds the weights of all products, as `--quantization` does."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            stored = round_weights(module.weight.detach(), max(bits, VOCABULARY_BITS) if path == "lm_head" else bits)
            module.weight.data.copy_(stored.dequantize())


@contextmanager
def rounded_inputs(modules: Sequence[nn.Module], rounding: Rounding) -> Iterator[None]:
    """Rounds what `modules` read."""
    hooks = [module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rounded(x: Tensor, bits: int) -> Tensor:
    """Returns x [..., K] with each chunk of a row rounded to integers of `bits` times a scale.

    >>> rounded(torch.tensor([[0.9, 3.0, -1.4]]), 2)
    tensor([[0., 3., 0.]])
    """
    return by_chunk(x, 2 ** (bits - 1) - 1, torch.round)


def rounded_pairs(x: Tensor, bits: int) -> Tensor:
    """Returns x [..., K] as `integers.hpp` rounds it for weights of `bits`.

    >>> [f"{number:.2f}" for number in rounded_pairs(torch.tensor([119.0, 0, 0, 0, 5.3, 0, 0, 0]), 4)]
    ['119.02', '0.00', '0.00', '0.00', '5.25', '0.00', '0.00', '0.00']
    """
    ratio, most = PAIRS[bits]

    def to_points(numbers: Tensor) -> Tensor:
        a, b = numbers.view(*numbers.shape[:-1], -1, 2, 4).unbind(-2)
        ones = ((ratio * a - b) / ONE).round()
        a = (a - (ratio * a - b - ONE * ones) * ratio / (ratio * ratio + 1)).round()
        first = (a / ONE).round()
        second, common = ratio * first - ones, a - ONE * first
        return torch.stack((a, ONE * second + ratio * common), dim=-2).flatten(-3)

    return by_chunk(x, most * ONE, to_points)


def by_chunk(x: Tensor, most: int, rounding: Rounding) -> Tensor:
    """Returns x [..., K], rounded where the largest number of each chunk is `most`."""
    chunks = F.pad(x, (0, -x.shape[-1] % CHUNK)).reshape(*x.shape[:-1], -1, CHUNK)
    scales = chunks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
    numbers: Tensor = (rounding(chunks / scales) * scales).flatten(-2)[..., : x.shape[-1]]
    return numbers


def predict(model: Any, prompts: Tensor) -> Tensor:
    """Returns the log-probabilities [prompts, tokens, vocabulary] of the next tokens."""
    with torch.inference_mode():
        return torch.cat([model(prompt[None]).logits[:, :-1].log_softmax(-1) for prompt in prompts])


def compare(exact: Tensor, other: Tensor, prompts: Tensor) -> tuple[float, float]:
    """Returns the mean KL divergence of `other` from `exact`, and by what share the perplexity rises."""
    pairs = list(zip(exact, other, strict=True))
    divergence = sum(float(F.kl_div(ours, theirs, reduction="sum", log_target=True)) for theirs, ours in pairs)
    targets = prompts[:, 1:, None]
    risen = float((exact.gather(-1, targets) - other.gather(-1, targets)).double().mean())
    return divergence / targets.numel(), float(torch.tensor(risen).expm1())
