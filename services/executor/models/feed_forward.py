"""The feed-forward layer of a block: a dense one, or a mixture of experts."""

from collections.abc import Iterator
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.services.executor.models.layers import Activate, PackedLinear, Stored
from pagewire.services.executor.models.spec import DecoderSpec, ExpertsSpec, Storage


class MLP(nn.Module):
    """A dense feed-forward layer."""

    def __init__(self, spec: DecoderSpec, inner: int) -> None:
        super().__init__()
        whole = spec.storage in (Storage.WHOLE, Storage.TRANSPOSED)
        parts = {"gate_proj": inner, "up_proj": inner} if spec.gated else {"up_proj": inner}
        if whole and spec.gated:
            parts = {"gate_up_proj": 2 * inner}
        storage = spec.storage if spec.storage is Storage.TRANSPOSED else Storage.PARTS
        self.up = PackedLinear(spec.width, parts, spec.mlp_bias, storage)
        self.activation = Activate(spec.activation, gated=spec.gated)
        biased = spec.mlp_bias and spec.shard.rank == 0
        self.down = PackedLinear(inner, {"down_proj": spec.width}, biased, storage)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]."""
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class Experts(nn.Module):
    """The weights of all experts, and their outputs for the tokens that have chosen them."""

    def __init__(self, spec: DecoderSpec, experts: ExpertsSpec) -> None:
        super().__init__()
        self.spec, self.own = experts, experts.own or range(experts.count)
        self.gate_up = nn.Parameter(torch.empty(len(self.own), 2 * experts.inner, spec.width))
        self.down = nn.Parameter(torch.empty(len(self.own), spec.width, experts.inner))
        self.activation = Activate(spec.activation, gated=True)

    def stored(self) -> Iterator[Stored]:
        """Yields the tensors of the checkpoint that the weights consist of: three matrices per expert."""
        inner, width = self.spec.inner, self.down.shape[1]
        for i, expert in enumerate(self.own):
            for name, rows in (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, None))):
                yield Stored(f"{expert}.{name}.weight", "gate_up", (inner, width), itemgetter((i, rows)))
            yield Stored(f"{expert}.down_proj.weight", "down", (width, inner), itemgetter(i))

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """[T, width], [T, count] -> [T, width]. The outputs of a token's experts are summed in the experts' order.

        Of several ranks, each returns its summand.
        """
        weights, chosen = router_logits.float().softmax(-1).topk(self.spec.chosen)
        if self.spec.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist()).intersection(self.own)):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            i = self.own.index(expert)
            y = F.linear(self.activation(F.linear(x[tokens], self.gate_up[i])), self.down[i])
            out[tokens] += y * weights[tokens, place, None].to(x.dtype)
        return out


class MixtureOfExperts(nn.Module):
    """A mixture of experts. A router chooses some experts for each token; a shared one may serve all tokens."""

    def __init__(self, spec: DecoderSpec, experts: ExpertsSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, experts.count, bias=False)
        self.experts = Experts(spec, experts)
        self.shared_expert = MLP(spec, experts.shared) if experts.shared else None
        self.shared_expert_gate = nn.Linear(spec.width, 1, bias=False) if experts.shared else None

    @property
    def routers(self) -> list[nn.Module]:
        """The products that weigh experts. They take little memory, and small errors would change which are chosen."""
        return [part for part in (self.gate, self.shared_expert_gate) if part is not None]

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]."""
        out: Tensor = self.experts(x, self.gate(x))
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out
