"""Cuts a model of `transformers` for one of several ranks, by the family's own `base_model_tp_plan`.

Matrices of attention and feed-forward layers are cut; the embedding and the output matrix are whole on every rank.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.heads import HeadCut, cut_heads
from pagewire.services.executor.models.shard import Collectives, Shard, Slices, Units, cut_inner
from pagewire.services.executor.models.transformers_backend.model import TransformersLM
from pagewire.shared.errors import ConfigurationError

_COLUMNS, _ROWS = "colwise", "rowwise"
_WHOLE = frozenset({"embedding_rowwise", "colwise_gather_output", "replicated_with_grad_allreduce"})
"""Styles of a plan whose modules every rank has whole."""


class TransformersCut:
    """A rank's part of a model.

    Attributes:
        slices: the indices of each parameter that the rank has; it has the others whole.
        layers: the attention of each layer, with the heads that the rank has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[Attention],
        attentions: Sequence[nn.Module],
        shard: Shard,
        units: Units,
    ) -> None:
        """`model` is the whole one on the meta device, whose modules `attentions` attend as `layers` says.

        Raises:
            ConfigurationError: the family cannot be cut.
        """
        self._shard, self._units = shard, units
        self._name = model.config.model_type
        paths = {module: path for path, module in model.named_modules()}
        self._heads = {
            paths[module]: cut_heads(layer, shard, units) for module, layer in zip(attentions, layers, strict=True)
        }
        self.layers = tuple(heads.attention for heads in self._heads.values())
        self._modules: dict[str, dict[int, tuple[range, ...]]] = {}
        self._summed: list[str] = []
        plan = _plan(model)
        for path, module in model.named_modules():
            if getattr(module, "activation_sparsity", 0.0) > 0.0:  # a part of Gemma 3n's runs, with wrong results
                raise self.refusal(f"{path} chooses among the features of all ranks")
            style = next((style for pattern, style in plan.items() if re.fullmatch(pattern, path)), None)
            if style is None or style in _WHOLE:
                continue
            if style not in (_COLUMNS, _ROWS) or not isinstance(module, nn.Linear):
                raise self.refusal(f"its plan for tensor parallelism has {path} as {style}")
            features = module.out_features if style == _COLUMNS else module.in_features
            self._modules[path] = {0 if style == _COLUMNS else 1: (self._kept(path, style, features),)}
            if style == _ROWS:
                self._summed.append(path)
        above = {path.rpartition(".")[0] for path in self._summed}
        if lacking := self._heads.keys() - above:
            raise self.refusal(f"its plan for tensor parallelism lacks the attention {min(lacking)}")
        for path, heads in self._heads.items():
            self._check_others(path, model.get_submodule(path), heads.whole)
        self.slices: Mapping[str, Slices] = {
            f"{path}.{kind}": slices if kind == "weight" else {0: slices[0]}
            for path, slices in self._modules.items()
            for kind, _ in model.get_submodule(path).named_parameters()
            if kind == "weight" or 0 in slices
        }

    def apply(self, model: PreTrainedModel) -> None:
        """Replaces the modules of a whole model, which may have memory, by the rank's."""
        for path, slices in self._modules.items():
            module = model.get_submodule(path)
            assert isinstance(module, nn.Linear)
            sizes = [module.out_features, module.in_features]
            for dim, ranges in slices.items():
                sizes[dim] = sum(map(len, ranges))
            bias: Tensor | None = module.bias
            biased = bias is not None and (0 in slices or self._shard.rank == 0)
            part = nn.Linear(sizes[1], sizes[0], bias=biased, device=module.weight.device, dtype=module.weight.dtype)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, part)
        for path, heads in self._heads.items():
            attention: Any = model.get_submodule(path)
            attention.num_key_value_groups = heads.attention.group

    def sum_over(self, part: TransformersLM, collectives: Collectives) -> None:
        """Has the modules whose inputs are cut return the sums of all ranks."""

        def total(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
            return out if part.collectives is None else part.collectives.all_reduce(out.contiguous())

        part.collectives = collectives
        for path in self._summed:
            part.model.get_submodule(path).register_forward_hook(total)

    def absent(self, parameter: str) -> bool:
        """Returns whether a parameter is on another rank alone: a bias behind a sum."""
        path, _, kind = parameter.rpartition(".")
        return kind == "bias" and path in self._summed and self._shard.rank > 0

    def _kept(self, path: str, style: str, features: int) -> range:
        """Returns the features of a module that the rank has."""
        parent, _, name = path.rpartition(".")
        heads = self._heads.get(parent)
        if heads is None:
            return cut_inner(features, self._shard, self._units)
        part, whole = self._of_heads(heads, name if style == _COLUMNS else "o_proj")
        if features != whole:
            raise self.refusal(f"{path} has {features} features for {whole} of its heads")
        return part

    def _of_heads(self, heads: HeadCut, name: str) -> tuple[range, int]:
        """Returns the rank's features of a projection in attention, and the number of all."""
        whole = heads.whole
        parts: dict[str, Callable[[], tuple[range, int]]] = {
            "q_proj": lambda: (heads.query_features, whole.heads * whole.head_size),
            "k_proj": lambda: (heads.key_features, whole.kv_heads * whole.head_size),
            "v_proj": lambda: (heads.value_features, whole.kv_heads * whole.value_head_size),
            "o_proj": lambda: (heads.output_features, whole.heads * whole.value_head_size),
        }
        if name not in parts:
            raise self.refusal(f"its attention has a projection {name}")
        return parts[name]()

    def _check_others(self, path: str, attention: nn.Module, whole: Attention) -> None:
        """Refuses parameters of attention, beside those that are cut, that are not the same for all heads."""
        for name, parameter in attention.named_parameters():
            module, _, _ = name.rpartition(".")
            if f"{path}.{module}" in self._modules:
                continue
            if "." in module or tuple(parameter.shape) not in ((whole.head_size,), (whole.value_head_size,)):
                raise self.refusal(f"its plan for tensor parallelism does not say how {path}.{name} is cut")

    def refusal(self, reason: str) -> ConfigurationError:
        """Returns the error of a model that cannot be cut, which names its family."""
        return ConfigurationError(
            f"model_type {self._name} cannot be cut for {self._shard.size} ranks, because {reason}: set "
            "tensor-parallel-size to 1"
        )


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Returns the styles of a family's plan by regular expressions for paths of modules."""
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    return {re.escape(prefix + path).replace(r"\*", r"\d+"): str(style) for path, style in plan.items()}


def cut_class(kind: type[PreTrainedModel], cut: TransformersCut) -> type[PreTrainedModel]:
    """Returns a class whose models have the rank's part of the parameters."""

    class Part(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            cut.apply(self)

    Part.__name__ = kind.__name__
    return Part
