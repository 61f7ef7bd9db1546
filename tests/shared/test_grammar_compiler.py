import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, models

from pagewire.shared import grammar_compiler
from pagewire.shared.grammar_compiler import GrammarCompiler, GrammarError
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.support.checkpoints import VOCABULARY, checkpoint


def allowed(compiler: GrammarCompiler, grammar: str) -> set[int]:
    bits = np.frombuffer(compiler.compile(grammar).compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


@functools.cache
def tokenizer() -> Tokenizer:
    tokenizer: Tokenizer = load_tokenizer(checkpoint("llama")).backend
    return tokenizer


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, {0})


def test_every_matcher_is_at_the_beginning(compiler: GrammarCompiler) -> None:
    (x,) = tokenizer().encode("x").ids
    first = compiler.compile('start: "x"')
    assert first.consume_token(x)
    assert first.is_accepting()
    assert not compiler.compile('start: "x"').is_accepting()
    assert allowed(compiler, 'start: "x"') == {x}


def test_an_invalid_grammar_is_refused_each_time(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed group"):
            compiler.compile("start: /(/")


def test_a_grammar_is_compiled_once_for_many_threads(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, compiled = threading.Event(), threading.Event(), compiler._compile

    def compile_slowly(grammar: str) -> LLMatcher | str:
        assert not begun.is_set(), "it is compiled a second time"
        begun.set()
        assert may_go_on.wait(10)
        return compiled(grammar)

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    with ThreadPoolExecutor(4) as pool:
        matchers = [pool.submit(compiler.compile, 'start: "x"') for _ in range(4)]
        assert begun.wait(10)
        may_go_on.set()
        assert len({id(matcher.result()) for matcher in matchers}) == 4


def test_an_unexpected_failure_is_not_kept(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(grammar_compiler, "_run_deep", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="new thread"):
            compiler.compile('start: "x"')
    assert compiler._characters == 0
    assert compiler.compile('start: "x"').is_accepting() is False


def test_old_grammars_are_dropped(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_COMPILED", 2)
    monkeypatch.setattr(grammar_compiler, "MAX_COMPILED_CHARACTERS", 40)
    for count in range(1, 6):
        compiler.compile(f"start: /x{{{count}}}/")
        assert len(compiler._compiled) <= 2
    compiler.compile("start: /x/ // " + "y" * 30)
    assert len(compiler._compiled) == 0 or compiler._characters <= 40


@pytest.mark.parametrize("chain", ["A{0}: A{1}\n", 'r{0}: "a" r{1} "b"\n'])
def test_long_chains_of_rules_do_not_overflow_the_stack(compiler: GrammarCompiler, chain: str) -> None:
    name, count = chain[0], 6000
    rules = "".join(chain.format(number, number + 1) for number in range(count))
    assert allowed(compiler, f'start: {name}0\n{rules}{name}{count}: "a"')


def test_a_tokenizer_that_does_not_spell_bytes_is_named() -> None:
    words = Tokenizer(models.WordLevel({"<end>": 0, "word": 1}, unk_token="<end>"))
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(lambda: words, 2, {0}).compile('start: "x"')
