"""A whole model in bfloat16: as near to float32 as PyTorch's own, and its tokens but for near ties."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagewire.services.executor.devices.cpu.device import CpuDevice
from pagewire.services.executor.devices.cuda.device import CudaDevice
from tests.services.executor.devices.cuda.twins import GREEDY, Host, Text, batch_of, cpu_device, cuda_device
from tests.support.checkpoints import checkpoint, reference_logits

pytestmark = [pytest.mark.cuda] if torch.cuda.is_available() else []
PROMPT = [7, 300, 41, 5, 88, 12, 450, 3, 77, 140, 9, 31, 256, 64, 2, 19, 500, 18]
TOKENS = 6
BOUND = 0.2
"""Largest distance of a logit from that of PyTorch in bf16, by the spread of the logits."""
FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3", "mistral", "opt", "gemma3"))]


def following(device: CpuDevice | CudaDevice, ids: list[int]) -> Tensor:
    """Returns the logits [V] behind `ids`."""
    seen: list[Tensor] = []
    plain = device._model.logits

    def kept(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        result = plain(hidden, out)
        seen.append(result[0].float().cpu())
        return result

    device._model.logits = kept  # type: ignore[method-assign]
    device.add(1, [9, 4], GREEDY)
    device.launch(batch_of((1, 0, ids, True))).wait()
    device.remove(1)
    device._model.logits = plain  # type: ignore[method-assign]
    return seen[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_as_exact_as_pytorchs(name: str) -> None:
    """Not to the bit: PyTorch's attention rounds in other places."""
    rows = following(cuda_device(name, captured=False, dtype=torch.bfloat16), PROMPT)
    plain = following(cpu_device(name, torch.bfloat16), PROMPT)
    exact = following(cpu_device(name), PROMPT)
    error, allowed = ((logits - exact).pow(2).mean().sqrt() for logits in (rows, plain))
    assert 0 < error < 1.5 * allowed
    assert (rows - plain).abs().max() < BOUND * exact.std()


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_differ_at_near_ties_only(name: str) -> None:
    text = Text(list(PROMPT), len(PROMPT) + TOKENS)
    (tokens,) = Host(cuda_device(name, captured=False, dtype=torch.bfloat16), seed=1).run([text])
    plain = cpu_device(name, torch.bfloat16)
    for place in range(len(PROMPT), len(tokens)):
        logits = following(plain, tokens[:place])
        assert logits[tokens[place]] >= logits.max() - BOUND * logits.std()


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_64_tokens_equal_transformers_but_for_near_ties(name: str) -> None:
    """A near tie is one that the rounding of transformers' own bfloat16 could decide."""
    text = Text(list(PROMPT), len(PROMPT) + 64)
    device = cuda_device(name, captured=False, dtype=torch.bfloat16)
    (ids,) = Host(device, seed=1, preempt=0).run([text])
    tokens = torch.tensor(ids[len(PROMPT) :])
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint(name), dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.inference_mode():
        rounded = model.eval()(torch.tensor([ids[:-1]]), use_cache=False).logits[0, len(PROMPT) - 1 :].float()
    exact = reference_logits(checkpoint(name), ids[:-1])[len(PROMPT) - 1 :]
    noise = (rounded - exact).square().mean().sqrt()
    for logits in (rounded, exact):
        behind = logits.max(-1).values - logits.gather(1, tokens[:, None])[:, 0]
        assert behind.max() < 5 * noise
    wrong, allowed = ((exact.argmax(-1) != sampled).sum() for sampled in (tokens, rounded.argmax(-1)))
    assert wrong <= allowed + 2
    assert len(set(tokens.tolist())) > 20, "a text that repeats itself shows little"
