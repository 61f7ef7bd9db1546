"""Prints samples of an exported model."""

import argparse
from pathlib import Path
from typing import Any, cast

import torch

from tools.bundled_model.measure import load_exported


def sample(args: argparse.Namespace) -> None:
    """Prints continuations of a few prompts, greedy and sampled."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model, tokenizer = load_exported(Path(args.model))
    for prompt in args.prompts:
        for temperature in (0.0, args.temperature):
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            chosen: dict[str, Any] = {"do_sample": False}
            if temperature:
                chosen = {"do_sample": True, "temperature": temperature, "top_p": 0.95}
            out = cast("Any", model).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens, pad_token_id=0, **chosen
            )
            print(f"--- temperature {temperature}\n{tokenizer.decode(out[0].tolist(), skip_special_tokens=False)}\n")
