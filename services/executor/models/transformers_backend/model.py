"""A decoder of `transformers` as a model of this project."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from pagewire.services.executor.models.model import AttentionFn, CausalLM, ModelSpec
from pagewire.services.executor.models.shard import Collectives
from pagewire.services.executor.models.transformers_backend.attention import (
    EAGER,
    HANDLE,
    NAME,
    PagedLayer,
    PastPositions,
    Step,
    asks_for_length,
)
from pagewire.services.executor.models.transformers_backend.gate import body_name


class _Hidden:
    """The output of a body, with nothing but the hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Body(nn.Module):
    """Takes the place of the layers where the hidden states are there already."""

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["hidden"] = torch.empty(0)

    def forward(self, *_inputs: Any, **_options: Any) -> _Hidden:
        """Returns `hidden` [1, R, D] for any input."""
        return _Hidden(self.hidden)

    def __getattr__(self, _name: str) -> "_Body":
        return self  # some output layers call a part of the body


class TransformersLM(CausalLM):
    """A model that `transformers` has built and loaded, with Pagewire's attention in its layers."""

    collectives: Collectives | None = None
    """Sum the products of the modules whose inputs are cut; None: this is the whole model, or a part set apart."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, attentions: list[nn.Module]) -> None:
        """`attentions` are the modules that attend, in the order of `spec.layers`."""
        super().__init__(spec, width=1, tied=True)
        self.model = model
        self._step = Step()
        for layer, module in enumerate(attentions):
            setattr(module, HANDLE, PagedLayer(self._step, layer))
            if asks_for_length(module):
                module.register_forward_pre_hook(self._with_length, with_kwargs=True)
        model.set_attn_implementation(NAME)
        # The output layer with all that the model's own code does around it: a copy of the model without its layers.
        self._hidden = _Body()
        name = body_name(model)
        self._body = (getattr(model, name),)  # in a tuple, because it is a part of `model` already
        self._head = (_shallow_copy(model, name, self._hidden),)

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        self._step.attend, self._step.positions = attend, positions
        out = self._body[0](input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @override
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self._hidden.__dict__["hidden"] = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        logits: Tensor = self._head[0](input_ids=ids, use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the context, a rank's part is a model of its own, which sums nothing and waits for no other rank."""
        collectives, self.collectives = self.collectives, None
        try:
            yield
        finally:
            self.collectives = collectives

    def eager_logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the float32 logits [L, V] of a text [L] by the model's own attention, which keeps no state.

        The `positions` [L] are consecutive, and the first need not be 0.
        """
        self.model.set_attn_implementation(EAGER)
        self._step.positions = positions
        try:
            logits: Tensor = self.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            ).logits[0]
        finally:
            self.model.set_attn_implementation(NAME)
        return logits.float()

    def _with_length(self, _module: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, named | {"cache": PastPositions(self._step.positions)}


def _shallow_copy(model: PreTrainedModel, name: str, module: nn.Module) -> PreTrainedModel:
    """Returns a model that shares all modules with `model` but for the one of that name."""
    copied: PreTrainedModel = object.__new__(type(model))
    copied.__dict__ = dict(model.__dict__)
    copied.__dict__["_modules"] = dict(model._modules) | {name: module}
    return copied
