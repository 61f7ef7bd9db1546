"""The perplexity of a served model on a text that the bundled model was not trained on."""

import math
from pathlib import Path

from pagewire import LLM, SamplingParams
from pagewire.shared.models import model_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer

TEXT = Path(__file__).parents[1] / "data" / "held_out.txt"
WINDOW = 512
"""Maximum tokens of a prompt; each begins without context."""
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


def windows(model: str, text: str) -> list[list[int]]:
    """Returns the tokens of `text` in prompts of equal length, which every model supports; the rest is left out."""
    path = model_folder.resolve(model)
    ids = load_tokenizer(path).backend.encode(text, add_special_tokens=False).ids
    size = min(WINDOW, len(ids))
    return [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]


def perplexity(llm: LLM, prompts: list[list[int]]) -> float:
    """Returns the exponential of the mean negative log-probability of all tokens but the first of each prompt."""
    losses = []
    for prompt, result in zip(prompts, llm.generate(prompts, SCORED), strict=True):
        reported = result.prompt_logprobs or []
        losses += [-entry[token].logprob for token, entry in zip(prompt, reported, strict=True) if entry is not None]
    return math.exp(math.fsum(losses) / len(losses))
