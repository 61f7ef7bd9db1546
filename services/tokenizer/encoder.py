"""Turns the prompts of requests into token ids without holding up the event loop."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerFast

from pagewire.services.tokenizer.token_ids import to_ids

INLINE_CHARACTERS = 8_000
"""Texts up to this are encoded at once: for prose of this length fastokens takes a tenth of a millisecond, like a
change of thread, half of one when it has just started, and two where every word is new."""
MAX_THREADS = 4


class Encoder:
    """A tokenizer, with threads of its own for what takes long."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._to_ids = to_ids(tokenizer.backend_tokenizer)
        self._turn = asyncio.Lock()
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="encode")

    async def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Token ids of each text; with `special`, between the special tokens that the model wants around a prompt.

        Special tokens that a text spells out are encoded as such either way: chat templates spell out all of theirs.
        """
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            async with self._turn:
                ids = self._to_ids(texts, special)
                # Of many requests that come at once each goes its way before the next is encoded, not after the last.
                await asyncio.sleep(0)
            return ids
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._to_ids, texts, special)

    def close(self) -> None:
        """Ends the threads after what they are doing; what has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
