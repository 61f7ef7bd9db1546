"""The grammar of an answer that may reason before the text whose form the request asks for."""

import re
from collections.abc import Mapping

from pagewire.services.tokenizer.chat.grammars.lark import SPACE, symbols
from pagewire.services.tokenizer.chat.tool_use import Progress
from pagewire.shared.chat.formats import HARMONY, REASONING, harmony


def reasoning_grammar(
    reasoning: str, progress: Progress, token_ids: Mapping[str, int], call: str = "", free: str = ""
) -> str:
    """Returns llguidance's Lark of a text that may have reasoning and then matches `@answer`; empty: it is the answer.

    Reasoning is free until its closing tag, and has no other token that stands for a tag.

    Args:
        reasoning: format of the reasoning.
        progress: how far the prompt takes the reasoning.
        token_ids: ids of tags, or of parts of them, that are tokens of their own: no other token has their text.
        call: rule `call`, which the text may match instead of `@answer`; empty: it may not.
        free: rule `free`, which the text matches instead of `@answer`; empty: it does not.
    """
    answer = "free" if free else "@answer"
    final = f"({answer} | call)" if call and not free else answer
    if progress is Progress.OVER:
        return f"start: {final}\n{call}{free}" if call or free else ""
    begin, end = REASONING[reasoning]
    rules = f"thought: /(?s:.*)/ {symbols(end, token_ids)}\n"
    if end not in token_ids:
        closing = re.escape(end).replace("/", r"\/")
        rules = f"thought[lazy]: /(?s:.*){closing}/\n"
    rules += call + free
    behind = f"{SPACE} {final}"
    if reasoning == HARMONY:
        rules += f"next: {symbols(harmony.NEXT, token_ids)}\n"
        behind = f"{symbols(harmony.FINAL, token_ids)} {answer}"
        behind = f"({behind} | call)" if call else behind
    follows = "thought next" if reasoning == HARMONY else "thought"
    if progress is Progress.BEGUN:
        return f"start: {follows} {behind}\n{rules}"
    return f"start: ({symbols(begin, token_ids)} {follows})? {behind}\n{rules}"
