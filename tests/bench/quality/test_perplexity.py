"""The perplexity of a text."""

import math

from pagewire import LLM
from pagewire.bench._quality.perplexity import TEXT, perplexity, windows


def test_windows_are_equal_and_lose_only_the_rest() -> None:
    text = TEXT.read_text()[:6000]
    prompts = windows("bundled", text)
    assert len({len(prompt) for prompt in prompts}) == 1
    whole = windows("bundled", text[:500])
    assert prompts[0][: len(whole[0]) // 2] == whole[0][: len(whole[0]) // 2]


def test_a_text_is_likelier_than_its_tokens_in_disorder() -> None:
    (prompt,) = windows("bundled", TEXT.read_text()[:300])
    with LLM("bundled") as llm:
        text, disorder = (perplexity(llm, [ids]) for ids in (prompt, sorted(prompt)))
    assert 1 < text < disorder / 2
    assert math.isfinite(disorder)
