"""Prompts to token ids, without blocking the event loop."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import fastokens
import structlog
from tokenizers import Tokenizer

INLINE_CHARACTERS = 8_000
"""Maximum length of texts that are encoded on the event loop: fastokens takes 0.1 ms for prose of this length, as long
as a change of thread, 0.5 ms when it has just started, and 2 ms if no word repeats."""
MAX_THREADS = 4
"""Maximum number of texts that are encoded at once."""

ToIds = Callable[[Sequence[str], bool], list[list[int]]]
"""Function that returns the token ids of each text; True adds the special tokens that the model wants around one."""

_log = structlog.get_logger()


class Encoder:
    """A tokenizer with threads of its own for long texts.

    Attributes:
        prepared: done once texts are encoded as fast as they can be. That takes 0.3 s, for which no start waits.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._to_ids = _as_is(tokenizer)
        self._spelling = tokenizer.id_to_token
        self._turn = asyncio.Lock()
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="encode")
        self.prepared: Future[None] = self._threads.submit(self._prepare, tokenizer)

    def _prepare(self, tokenizer: Tokenizer) -> None:
        self._to_ids = to_ids(tokenizer)

    async def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Returns the token ids of each text; with `special`, between the special tokens that the model wants around a
        prompt.

        A special token that a text spells out is encoded as such either way: chat templates spell out all of theirs.
        """
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            async with self._turn:
                ids = self._to_ids(texts, special)
                # When many requests arrive at once, each is dispatched before the next is encoded, not after the last.
                await asyncio.sleep(0)
            return ids
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._to_ids, texts, special)

    def spell(self, ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary spells it."""
        return [self._spelling(token) or "" for token in ids]

    def close(self) -> None:
        """Ends the threads once they have encoded their current texts. Waiting texts are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def to_ids(tokenizer: Tokenizer) -> ToIds:
    """Returns a thread-safe function that encodes as `tokenizer` does, and releases the interpreter lock meanwhile.

    fastokens gives the same ids in a fraction of the time, but does not know all kinds of tokenizers.
    """
    try:
        fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
    except ValueError as error:
        _log.info("encoding_takes_longer", library="tokenizers", reason=str(error))
        return _as_is(tokenizer)
    return lambda texts, special: [fast.encode(text, add_special_tokens=special).ids for text in texts]


def _as_is(tokenizer: Tokenizer) -> ToIds:
    # Unlike the other methods, this one releases the interpreter lock and computes no character offsets.
    batch = tokenizer.encode_batch_fast
    return lambda texts, special: [encoding.ids for encoding in batch(list(texts), add_special_tokens=special)]
