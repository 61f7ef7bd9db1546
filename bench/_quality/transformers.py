"""Greedy answers and perplexity of transformers, on the weights that Pagewire serves."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from pagewire.client.async_client import Messages
from pagewire.services.executor.models.tensors import open_tensors
from pagewire.shared.models import model_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer


def greedy_answers(path: Path, conversations: Sequence[Messages], max_tokens: int) -> list[list[int]]:
    """Returns the token ids of the greedy answer to each conversation, in float32, without the token that ends it.

    Args:
        path: model folder or GGUF file, whose quantized weights are unpacked as for Pagewire.
        conversations: laid out by the model's own chat template, as transformers renders it.
        max_tokens: tokens of an answer at most.

    Raises:
        ConfigurationError: the model is broken.
    """
    tokenizer, model, ends = (
        load_tokenizer(path).to_transformers(),
        load_model(path),
        sorted(model_folder.eos_ids(path)),
    )
    answers = []
    for messages in conversations:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        with torch.inference_mode():
            generated = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        answer = generated[0, ids.shape[1] :].tolist()
        answers.append(answer[:-1] if answer and answer[-1] in ends else answer)
    return answers


def perplexity(path: Path, prompts: Sequence[Sequence[int]]) -> float:
    """Returns the same as `pagewire.bench._quality.perplexity.perplexity`, in float32.

    Raises:
        ConfigurationError: the model is broken.
    """
    model = load_model(path)
    losses = []
    with torch.inference_mode():
        for prompt in prompts:
            logits = model(torch.tensor([prompt])).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(logits, torch.tensor(prompt[1:]), reduction="none").tolist()
    return math.exp(math.fsum(losses) / len(losses))


def load_model(path: Path) -> PreTrainedModel:
    """Returns transformers' model of a checkpoint, in float32.

    Raises:
        ConfigurationError: a file is missing or broken.
    """
    config = AutoConfig.for_model(**model_folder.read_config(path))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().requires_grad_(requires_grad=False)
    parameters = dict(model.named_parameters())
    with open_tensors(path, names=parameters.keys()) as source:
        source.read({name: parameters[name] for name in source.names()})
    return model
