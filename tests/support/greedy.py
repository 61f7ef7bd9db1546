"""Prompts for a checkpoint, with what `transformers.generate` makes of them."""

import functools
import random
from typing import NamedTuple

import torch

from tests.support.checkpoints import VOCABULARY, checkpoint, reference_model

GAP = 1e-4
"""Two best logits closer than this could change places by rounding: such a prompt is replaced by another."""


class Case(NamedTuple):
    """A prompt and its greedy continuation."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    """Ends with EOS if that came before `max_tokens`."""


@functools.cache
def cases(name: str, count: int = 32, longest: int = 60, most: int = 24) -> tuple[Case, ...]:
    """`count` cases of mixed lengths for a checkpoint, in float32. Two are equal, and three share a beginning."""
    random_ids = random.Random(name)
    collected: list[Case] = []
    while len(collected) < count:
        prompt = [random_ids.randrange(1, VOCABULARY) for _ in range(random_ids.randint(1, longest))]
        if len(collected) in {5, 6}:
            prompt = collected[4].prompt[:1] * 20 + prompt[:20]
        if len(collected) == 9:
            prompt = collected[8].prompt
        max_tokens = random_ids.randint(4, most)
        tokens, gap = _generate(name, prompt, max_tokens)
        if gap >= GAP:
            collected.append(Case(prompt, max_tokens, tokens))
    return tuple(collected)


@functools.cache
def long_pair(name: str, prompt_tokens: int = 30, max_tokens: int = 60) -> tuple[Case, Case]:
    """Two cases that run to `max_tokens`: together they need nearly twice what one may need at most."""
    random_ids = random.Random(name + " pair")
    collected: list[Case] = []
    while len(collected) < 2:
        prompt = [random_ids.randrange(1, VOCABULARY) for _ in range(prompt_tokens)]
        tokens, gap = _generate(name, prompt, max_tokens)
        if gap >= GAP and len(tokens) == max_tokens and tokens[-1] != 0:
            collected.append(Case(prompt, max_tokens, tokens))
    return collected[0], collected[1]


def _generate(name: str, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
    model = reference_model(checkpoint(name))
    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            pad_token_id=0,
            do_sample=False,
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(generated.logits).topk(2).values
    return generated.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())
