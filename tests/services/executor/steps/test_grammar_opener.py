"""Grammars of new sequences: opened beside the steps, and followed past the tokens that there are."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from typing_extensions import override

from pagewire.services.executor.devices.masks import Masks
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.services.executor.steps.grammar_opener import GrammarOpener
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.plan import AddSlot
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.sampling_parameters import pack_record
from tests.services.executor.fakes import PATIENCE, Run, add, plan, sampling
from tests.support.checkpoints import VOCABULARY, checkpoint

LIBRARY = load_tokenizer(checkpoint("llama")).backend
COMPILER = GrammarCompiler(lambda: LIBRARY, VOCABULARY, {0})
CAPACITY = Capacity(8, 8, 4, 64, VOCABULARY)


class SlowOpener(GrammarOpener):
    """Opens a grammar when it is told to."""

    def __init__(self) -> None:
        self.opened: list[Callable[[], None]] = []

    @override
    def open(self, added: AddSlot, opened: Callable[[], None], on_limit: Callable[[], None]) -> SequenceGrammar:
        def no_matcher(output: Sequence[int], *, fresh: bool) -> None: ...

        grammar = SequenceGrammar([], 0, [], 9, no_matcher, on_limit, forces=False)

        def finish() -> None:
            grammar.start()
            opened()

        self.opened.append(finish)
        return grammar

    @override
    def close(self) -> None: ...


def with_grammar(added: AddSlot, grammar: str, min_tokens: int = 0) -> AddSlot:
    picks = msgspec.structs.replace(added.sampling, grammar=grammar, min_tokens=min_tokens)
    return msgspec.structs.replace(added, sampling=picks)


def test_a_sequence_waits_for_its_grammar_and_no_other_waits_for_it() -> None:
    opener = SlowOpener()
    run = Run(opener=opener)
    short = sampling(max_tokens=3)
    run.inbox.put(plan(1, with_grammar(add(0, 7, [1, 2], [0], picks=short), "x"), add(1, 8, [3], [1], picks=short)))
    assert [unpack(run.output().sequences) for _ in range(3)] == [[8]] * 3
    opener.opened[0]()
    assert [unpack(run.output().sequences) for _ in range(3)] == [[7]] * 3
    run.finish()


def test_the_grammar_of_a_removed_sequence_is_not_compiled() -> None:
    compiled: list[str] = []
    sequence = SequenceGrammar([], 0, [], 9, lambda *_, **__: compiled.append("x"), lambda: None, forces=False)

    class Opener(SlowOpener):
        @override
        def open(self, added: AddSlot, opened: Callable[[], None], on_limit: Callable[[], None]) -> SequenceGrammar:
            return sequence

    run = Run(opener=Opener())
    run.inbox.put(plan(1, with_grammar(add(0, 7, [1], [0]), "x")))
    run.output()
    run.inbox.put(plan(2, removed=[0]))
    run.output()
    sequence.start()
    assert not compiled
    assert sequence.ready
    run.finish()


def test_a_removed_sequence_waits_for_nothing() -> None:
    opener = SlowOpener()
    run = Run(opener=opener)
    short = sampling(max_tokens=2)
    run.inbox.put(plan(1, with_grammar(add(0, 7, [1], [0], picks=short), "x")))
    run.output()
    run.inbox.put(plan(2, add(0, 9, [5], [2], picks=short), removed=[0]))
    assert [unpack(run.output().sequences) for _ in range(2)] == [[9]] * 2
    opener.opened[0]()
    run.finish()


def allowed(masks: Masks, slot: int) -> set[int]:
    masks.fill(np.array([slot]))
    return set(np.flatnonzero(np.unpackbits(masks.table[slot].view(np.uint8), bitorder="little")).tolist())


def opened(text: str, generated: str = "", **fields: Any) -> Masks:
    """Masks with a grammar in slot 2, of a sequence that has generated a text. `fields`: of its sampling."""
    opener = GrammarOpener(COMPILER)
    tokens = [5, 6, *LIBRARY.encode(generated).ids] if generated else [5, 6]
    picks = msgspec.structs.replace(sampling(stop_ids=[0], max_tokens=50), grammar=text, **fields)
    ready = threading.Event()
    grammar = opener.open(add(2, 1, tokens, [0], prompt_tokens=2, picks=picks), ready.set, lambda: None)
    assert ready.wait(PATIENCE)
    opener.close()
    masks = Masks(CAPACITY)
    masks.add(2, grammar)
    return masks


def test_a_grammar_is_taken_past_the_tokens_so_far() -> None:
    (b,) = LIBRARY.encode("b").ids
    assert allowed(opened('start: "xyb"', "xy"), 2) == {b}
    assert allowed(opened('start: "xyb"', "xyb"), 2) == {0}


def test_stop_ids_wait_for_min_tokens_where_the_grammar_can_go_on() -> None:
    assert 0 in allowed(opened("start: /x+/", "xx"), 2)
    assert 0 not in allowed(opened("start: /x+/", "xx", min_tokens=9), 2)
    assert allowed(opened('start: "xx"', "xx", min_tokens=9), 2) == {0}


def test_a_grammar_without_a_way_on_allows_nothing() -> None:
    assert allowed(opened('start: "x"', "y"), 2) == set()
    assert allowed(opened("start: /(/"), 2) == set()


def test_the_states_that_other_texts_have_needed_end_no_text() -> None:
    """The matchers of a grammar share their lexer, and 50,000 states are too many."""
    text, draw = "start: /(.*a.{18}b|.*b.{17}c|.*[c-e].{16}d)+/", random.Random(1)
    masks, other = opened(text), COMPILER.compile(text)
    while not other.is_error():
        mask = np.frombuffer(other.compute_bitmask(), np.uint8)
        other.consume_token(draw.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() or [0]))
    first = allowed(masks, 2)
    assert first
    grammar = masks.of(2)
    assert grammar is not None
    grammar.sampled(min(first))
    assert allowed(masks, 2)
    assert allowed(opened(text), 2) == first


def test_sampled_tokens_count_for_the_next_mask() -> None:
    masks = opened('start: "xb"')
    x, b = LIBRARY.encode("x").ids[0], LIBRARY.encode("b").ids[0]
    grammar = masks.of(2)
    assert grammar is not None
    assert x in allowed(masks, 2)
    grammar.sampled(x)
    assert allowed(masks, 2) == {b}
    masks.add(2, None)
    assert masks.start(np.array([2, 3])) is None
    masks.close()


@pytest.mark.parametrize("text", ['start: "xb"', "start: /(x|b)+/"])
def test_masks_along_a_draft_equal_its_tokens_masks_and_change_no_state(text: str) -> None:
    masks, plain = opened(text), opened(text)
    x, b = LIBRARY.encode("x").ids[0], LIBRARY.encode("b").ids[0]
    along = masks.along(np.array([2]), [[x, b]])
    grammar = plain.of(2)
    assert grammar is not None
    for mask, token in zip(along, (x, b, b), strict=True):
        allowed(plain, 2)
        assert mask.tolist() == plain.table[2].tolist()
        grammar.sampled(token)
    assert allowed(masks, 2) == allowed(opened(text), 2)
    assert masks.along(np.array([2]), [[]]).tolist() == [along[0].tolist()]


def test_a_limit_beyond_a_draft_ends_nothing() -> None:
    """The draft is one that the grammar forbids, which is as if it failed."""
    limits: list[str] = []
    masks = opened('start: "xb"')
    grammar = masks.of(2)
    assert grammar is not None
    grammar._on_limit = lambda: limits.append("limit")
    (b,) = LIBRARY.encode("b").ids
    grammar.sampled(b)
    grammar.advance()
    grammar.complete(masks.table[2], drafted=True)
    assert (limits, masks.table[2].any()) == ([], False)
    grammar.complete(masks.table[2])
    assert limits == ["limit"]


FORCING = [
    '{"grammars": [{"json_schema": {"type": "object", "properties": {"colour": {"enum": ["red", "redder"]},'
    ' "the_number": {"type": "integer"}}, "required": ["colour", "the_number"], "x-guidance":'
    ' {"whitespace_flexible": false}}}]}',
    'start: "The morning train" | "The market town left " /[a-z]{2,9}/ " window."',
    "start: /(one|two|three apples)(, (four|five bridges))* and more/",
]


@pytest.mark.parametrize("text", FORCING)
def test_a_forced_token_is_the_only_one_that_its_mask_allows(text: str) -> None:
    draw, forced_tokens = random.Random(1), 0
    for _ in range(5):
        taken, plain = opened(text), opened(text)
        grammar, follower = taken.of(2), plain.of(2)
        assert grammar is not None
        assert follower is not None
        for _ in range(40):
            forced = taken.forced(np.array([2])).get(0, [])
            for token in forced:
                assert allowed(plain, 2) == {token}
                follower.sampled(token)
            forced_tokens += len(forced)
            choices = allowed(taken, 2)
            assert choices == allowed(plain, 2)
            token = draw.choice(sorted(choices))
            if token == 0:
                break
            grammar.sampled(token)
            follower.sampled(token)
    assert forced_tokens > 10


def test_a_forced_token_is_never_the_last() -> None:
    text = 'start: "The morning train left"'
    ids = opened(text).forced(np.array([2]))[0]
    assert LIBRARY.decode(ids) == "The morning train left"
    assert opened(text, max_tokens=3).forced(np.array([2]))[0] == ids[:2]
    assert opened(text, max_tokens=1).forced(np.array([2])) == {}
    assert opened(text, stop_ids=pack([ids[3]])).forced(np.array([2]))[0] == ids[:3]


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"record": pack_record(frequency_penalty=0.5)}])
def test_tokens_of_which_something_is_reported_or_counted_are_sampled(fields: dict[str, Any]) -> None:
    assert opened('start: "The morning train"', **fields).forced(np.array([2])) == {}
