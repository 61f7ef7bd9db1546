"""The grammar of an answer that may reason before the text whose form the request asks for."""

import json
import re
from collections.abc import Mapping

from pagewire.services.tokenizer.chat.tool_use import Progress
from pagewire.shared.chat.formats import HARMONY, REASONING, harmony

SPACE = r"/[ \n\r\t]{0,16}/"
"""White space between the reasoning and the answer."""


def reasoning_grammar(reasoning: str, progress: Progress, token_ids: Mapping[str, int]) -> str:
    """Returns llguidance's Lark of a text that has reasoning and then matches `@answer`; empty: no reasoning can come.

    Reasoning is free until its closing tag, and has no other token that stands for a tag.

    Args:
        reasoning: format of the reasoning.
        progress: how far the prompt takes the reasoning.
        token_ids: ids of tags, or of parts of them, that are tokens of their own: no other token has their text.
    """
    if progress is Progress.OVER:
        return ""
    begin, end = REASONING[reasoning]
    rules = f"thought: /(?s:.*)/ {_symbols(end, token_ids)}\n"
    if end not in token_ids:
        closing = re.escape(end).replace("/", r"\/")
        rules = f"thought[lazy]: /(?s:.*){closing}/\n"
    answer = f"{SPACE} @answer"
    if reasoning == HARMONY:
        rules += f"next: {_symbols(harmony.NEXT, token_ids)}\n"
        answer = f"{_symbols(harmony.FINAL, token_ids)} @answer"
    follows = "thought next" if reasoning == HARMONY else "thought"
    if progress is Progress.BEGUN:
        return f"start: {follows} {answer}\n{rules}"
    return f"start: ({_symbols(begin, token_ids)} {follows})? {answer}\n{rules}"


def _symbols(text: str, token_ids: Mapping[str, int]) -> str:
    """Returns a text in Lark, in which parts that are tokens of their own are written as ids."""
    if not token_ids:
        return json.dumps(text)
    parts = re.split(f"({'|'.join(map(re.escape, token_ids))})", text)
    return " ".join(f"<[{token_ids[part]}]>" if part in token_ids else json.dumps(part) for part in parts if part)
