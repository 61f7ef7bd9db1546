"""Draws values that a grammar takes, token by token."""

import json
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher
from tokenizers import Tokenizer

EOS = 0
"""The token of the bundled model that ends a text."""
MOST_TOKENS = 200
CLOSING = 0.3
"""Probability of ending a string, an array, an object or the text where that is allowed."""


class Unfinished(Exception):
    """A text did not end within `MOST_TOKENS`, or its grammar went beyond a limit."""


def random_value(matcher: LLMatcher, tokenizer: Tokenizer, seed: int) -> Any:
    """Returns the JSON value of a random text that the grammar of a matcher takes.

    Raises:
        Unfinished: the text did not end.
    """
    draw, ids = random.Random(seed), list[int]()
    vocabulary = tokenizer.get_vocab()
    closing = [EOS, *(vocabulary[text] for text in ('"', "}", "]"))]
    for _ in range(MOST_TOKENS):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        last = [token for token in closing if mask[token]]
        token = draw.choice(last if last and draw.random() < CLOSING else np.flatnonzero(mask).tolist())
        if matcher.is_error():
            break
        if token == EOS:
            return json.loads(tokenizer.decode(ids, skip_special_tokens=False))
        if not matcher.consume_token(token):
            break
        ids.append(token)
    raise Unfinished
