"""Pieces of llguidance's Lark."""

import json
import re
from collections.abc import Mapping

SPACE = r"/[ \n\r\t]{0,16}/"
"""White space between two parts of a text."""


def symbols(text: str, token_ids: Mapping[str, int]) -> str:
    """Returns a text in Lark, in which parts that are tokens of their own are written as ids.

    >>> symbols("<think>\\n", {"<think>": 7})
    '<[7]> "\\\\n"'
    """
    if not token_ids:
        return json.dumps(text)
    parts = re.split(f"({'|'.join(map(re.escape, token_ids))})", text)
    return " ".join(f"<[{token_ids[part]}]>" if part in token_ids else json.dumps(part) for part in parts if part)
