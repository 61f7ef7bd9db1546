"""The matrices of a model that adapters can change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.services.executor.models.feed_forward import MixtureOfExperts
from pagewire.services.executor.models.layers import PackedLinear
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.registry import build_model, is_native
from pagewire.services.executor.models.weights import places_of

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix of a checkpoint, and the outputs that it has in the model's product."""

    path: str
    """Path of the product's module in the model."""
    inputs: int
    outputs: int
    first: int
    """First of the product's outputs that the matrix has."""
    order: Tensor | None
    """[outputs] place behind `first` of each output of the checkpoint; None: they are in order."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The modules of a model by their names in checkpoints."""

    architectures: tuple[str, ...]
    """Class names of `transformers` that config.json gives the model."""
    products: Mapping[str, Target]
    """Matrices that adapters can change."""
    layers: int
    """Number of layers."""
    head_size: int
    """Numbers of a query or a key in the first layer."""
    others: frozenset[str]
    """Modules that adapters cannot change: embeddings, the output layer, norms, experts and their routers."""


def targets_of(model: CausalLM, architectures: tuple[str, ...] = ()) -> Targets:
    """Returns the modules of a model, which may be on the meta device; its matrices are not packed yet."""
    products: dict[str, Target] = {}
    others: set[str] = set()
    mixtures = tuple(f"{path}." for path, part in model.named_modules() if isinstance(part, MixtureOfExperts))
    for name, (parameter, stored) in places_of(model):
        if not name.endswith(_WEIGHT):
            continue
        path = parameter.rpartition(".")[0]
        module, module_name = model.get_submodule(path), name.removesuffix(_WEIGHT)
        if not isinstance(module, PackedLinear | nn.Linear) or module is model.lm_head or path.startswith(mixtures):
            others.add(module_name)
            continue
        outputs, inputs = module.weight.shape
        # Row numbers of the product, cut like the checkpoint's tensor: they show which rows it fills.
        rows = stored.part(torch.arange(outputs)[:, None].clone()).flatten()
        first = int(rows.min())
        in_order = torch.equal(rows, torch.arange(first, first + len(rows)))
        products[module_name] = Target(path, inputs, len(rows), first, None if in_order else rows - first)
    return Targets(architectures, products, len(model.spec.layers), model.spec.layers[0].head_size, frozenset(others))


def served_targets(model: CausalLM, config: dict[str, Any]) -> Targets:
    """Returns the modules of the model of a config.json; its matrices may be packed already if its family is native."""
    built = build_model(config) if is_native(config) else model
    return targets_of(built, tuple(config.get("architectures") or ()))
