"""The two factors of each update, checked against the matrix that they change."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapters.targets import Target, Targets
from pagewire.shared.errors import ConfigurationError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def factors(
    tensors: Mapping[str, Tensor], prefix: str, shrink: str, expand: str, remedy: str
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Returns both factors of each matrix, by the part of their names between `prefix` and `shrink` or `expand`.

    Raises:
        ConfigurationError: a tensor is no factor, or one of two is missing; the message ends with `remedy`.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        end = next((end for end in (shrink, expand) if name.endswith(end)), None)
        if end is None or not name.startswith(prefix):
            raise ConfigurationError(f"the adapter has a tensor {name}, which is no factor of a matrix")
        halves.setdefault(name.removeprefix(prefix).removesuffix(end), {})[end] = tensor
    if not halves:
        raise ConfigurationError(f"the adapter has no tensors: {remedy}")
    for base, pair in halves.items():
        for end in {shrink, expand} - pair.keys():
            raise ConfigurationError(f"the adapter misses {prefix}{base}{end}: {remedy}")
    return {base: (pair[shrink], pair[expand]) for base, pair in halves.items()}


def target_of(module: str, targets: Targets) -> Target:
    """Returns the matrix of a module.

    Raises:
        ConfigurationError: the model does not have it, or an adapter cannot change it.
    """
    if module in targets.products:
        return targets.products[module]
    if module in targets.others or ".experts." in module:
        raise ConfigurationError(
            f"the adapter changes {module}: only the products of attention and of dense feed-forward layers can change"
        )
    raise ConfigurationError(f"the adapter changes {module}, which the model does not have: is it for another model?")


def check_pair(module: str, shrink: Tensor, expand: Tensor, target: Target, rank: int, max_rank: int) -> None:
    """Checks both factors of a module, whose rank should be `rank`, and at most `max_rank`.

    Raises:
        ConfigurationError: one of them does not fit.
    """
    if rank > max_rank:
        raise ConfigurationError(f"the adapter has rank {rank} at {module}: set max-lora-rank to at least {rank}")
    shapes = {"lora_A": (shrink, (rank, target.inputs)), "lora_B": (expand, (target.outputs, rank))}
    for kind, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"the adapter's {module}.{kind} has shape {list(tensor.shape)}, the model needs {list(shape)}"
            )
        if tensor.dtype not in FLOATS:
            raise ConfigurationError(
                f"the adapter's {module}.{kind} has dtype {str(tensor.dtype).removeprefix('torch.')}: only float32, "
                "bfloat16 and float16 are supported"
            )
        if not torch.isfinite(tensor).all():
            raise ConfigurationError(f"the adapter's {module}.{kind} has numbers that are not finite: train it again")


def update_of(shrink: Tensor, expand: Tensor, target: Target, scale: float) -> LowRank:
    """Returns the low-rank update with these two factors, its rows in the order of the product.

    Raises:
        ConfigurationError: a scaled factor exceeds float32.
    """
    if not float(expand.abs().max()) * abs(scale) <= torch.finfo(torch.float32).max:
        raise ConfigurationError(f"the adapter has an alpha that scales {target.path} by {scale:g}: train it again")
    if target.order is not None:
        expand = torch.empty_like(expand).index_copy_(0, target.order, expand)
    return LowRank(shrink, expand, target.first, scale)
