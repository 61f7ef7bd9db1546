"""Real texts in ten scripts and hard strings, token by token and several tokens per step."""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, repeat
from pathlib import Path

import pytest

from pagewire.services.detokenizer.sequence_map import SequenceMap
from pagewire.services.detokenizer.state.completion import open_choices
from pagewire.services.detokenizer.state.stream import Stream
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.step import Finish, StepOutput
from tests.services.detokenizer.rig import PROMPT, REQUEST, rig, step_of
from tests.support.tokenizers import NAMES, declarations, hard_cases, tokenizer, vocabulary

ATTACH = Attach("r1", 1, 1, "s1", "e1", "", 100, (b"",))

names = pytest.mark.parametrize("name", NAMES)


def outputs(ids: Sequence[int], sizes: Iterator[int]) -> Iterator[StepOutput]:
    """The steps of one sequence that samples `sizes` tokens at a time."""
    start = 0
    while start < len(ids):
        tokens = ids[start : start + next(sizes)]
        end = start + len(tokens)
        yield step_of(tokens, Finish.LENGTH if end == len(ids) else Finish.NONE, step=start, start=start)
        start = end


def pieces(name: str, ids: Sequence[int], sizes: Iterator[int]) -> list[str]:
    """The text of each token's frame."""
    (choice,) = choices = open_choices(vocabulary(name), REQUEST)
    stream, sequences = Stream("r1", b"", choices, PROMPT), SequenceMap()
    sequences.bind(stream, choices, ATTACH)
    for output in outputs(ids, sizes):
        sequences.apply(output, now=0.0)
    assert choice.finish == "length"
    assert choice.tokens == list(ids)
    return choice.texts


@names
@pytest.mark.parametrize("language", declarations())
def test_every_script_decodes_the_same_in_pieces(name: str, language: str) -> None:
    text = declarations()[language]
    ids = tokenizer(name).encode(text, add_special_tokens=False).ids
    whole = tokenizer(name).decode(ids)
    one_by_one = pieces(name, ids, repeat(1))
    assert "".join(one_by_one) == whole
    assert "\ufffd" not in whole
    draw = random.Random(language)
    assert pieces(name, ids, iter(lambda: draw.randint(1, 8), 0)) == one_by_one


@names
def test_hard_strings_decode_the_same_in_groups_of_one_to_eight(name: str) -> None:
    for ids, decoded in hard_cases(name):
        for size in range(1, 9):
            result = pieces(name, ids, repeat(size))
            assert "".join(result) == decoded
            assert "".join(result).count("\ufffd") == decoded.count("\ufffd")


@names
def test_only_broken_ids_are_replaced(name: str) -> None:
    for ids, decoded in hard_cases(name):
        for cut in range(1, len(ids)):
            result = "".join(pieces(name, ids[:cut], cycle([3, 1, 2])))
            assert decoded.startswith(result.rstrip("\ufffd"))


@pytest.mark.anyio
async def test_frames_of_several_tokens_join_to_the_text(folder: Path) -> None:
    text = "\n".join(decoded for _, decoded in hard_cases("gpt2"))
    ids = tokenizer("gpt2").encode(text).ids
    for size in (1, 3, 8):
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            for output in outputs(ids, repeat(size)):
                world.publish(output)
            await reader.end()
            assert reader.text() == tokenizer("gpt2").decode(ids)
            assert [token for delta in reader.deltas for token in delta.token_ids] == ids
