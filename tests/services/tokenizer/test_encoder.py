import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagewire.services.tokenizer.encoder import INLINE_CHARACTERS, Encoder
from pagewire.services.tokenizer.load import load_tokenizer
from pagewire.services.tokenizer.token_ids import ToIds
from pagewire.shared.model_folder import BUNDLED
from tests.support.model_folders import model_folder

LONG = "The little rabbit ran into the wood. " * (INLINE_CHARACTERS // 16)
"""More than is encoded on the loop."""


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[Encoder]:
    encoder = Encoder(load_tokenizer(model_folder(tmp_path / "m", begin="<|endoftext|>")))
    yield encoder
    encoder.close()


def ids(text: str) -> list[int]:
    found: list[int] = load_tokenizer(BUNDLED).backend_tokenizer.encode(text).ids
    return found


class Recorder:
    """Encodes, and notes the threads, and the turns of the loop, in which it does."""

    def __init__(self, encode: ToIds) -> None:
        self._encode = encode
        self.threads: list[str] = []
        self.turn = 0
        self.turns: list[int] = []

    def __call__(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        self.threads.append(threading.current_thread().name)
        self.turns.append(self.turn)
        return self._encode(texts, special)


def recorded(encoder: Encoder) -> Recorder:
    recorder = Recorder(encoder._to_ids)
    encoder._to_ids = recorder
    return recorder


@pytest.mark.parametrize("text", ["", "x", "Once upon a time", "naïve 猫 🦊\n\n  ", LONG])
def test_a_text_has_the_models_ids_behind_its_beginning(encoder: Encoder, text: str) -> None:
    assert asyncio.run(encoder.encode([text])) == [[0, *ids(text)]]


def test_texts_of_a_batch_are_independent(encoder: Encoder) -> None:
    texts = ["one", LONG, "", "two"]
    assert asyncio.run(encoder.encode(texts)) == [[0, *ids(text)] for text in texts]


def test_a_text_may_have_only_the_special_tokens_that_it_spells_out(encoder: Encoder) -> None:
    text = "<user>hi<|endoftext|>\n<assistant>"
    assert asyncio.run(encoder.encode([text, LONG], special=False)) == [ids(text), ids(LONG)]
    assert asyncio.run(encoder.encode([text], special=False)) == [ids(text)]
    assert 0 in ids("<|endoftext|>")


def test_only_long_texts_change_the_thread(encoder: Encoder) -> None:
    recorder = recorded(encoder)
    main = threading.current_thread().name
    asyncio.run(encoder.encode(["x" * INLINE_CHARACTERS]))
    asyncio.run(encoder.encode(["x" * INLINE_CHARACTERS, "x"]))
    assert recorder.threads[0] == main
    assert all(name.startswith("encode") for name in recorder.threads[1:])


def test_of_many_short_texts_one_is_encoded_per_turn_of_the_loop(encoder: Encoder) -> None:
    recorder = recorded(encoder)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def count() -> None:
            recorder.turn += 1
            loop.call_soon(count)

        count()
        await asyncio.gather(*(encoder.encode([str(number)]) for number in range(10)))

    asyncio.run(main())
    assert len(set(recorder.turns)) == len(recorder.turns) == 10


def test_many_at_once_do_not_disturb_each_other(encoder: Encoder) -> None:
    texts = [f"{LONG} {number}" for number in range(12)]
    recorder = recorded(encoder)

    async def main() -> list[list[list[int]]]:
        return await asyncio.gather(*(encoder.encode([text]) for text in texts))

    assert asyncio.run(main()) == [[[0, *ids(text)]] for text in texts]
    assert all(name.startswith("encode") for name in recorder.threads)
