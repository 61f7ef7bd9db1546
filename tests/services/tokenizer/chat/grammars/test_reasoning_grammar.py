"""Texts with reasoning before a requested form: their grammar accepts their tokens, and no others."""

import pytest
from tokenizers import AddedToken, Tokenizer

from pagewire.services.tokenizer.chat.grammars.reasoning_grammar import reasoning_grammar
from pagewire.services.tokenizer.chat.tool_use import Progress
from pagewire.services.tokenizer.validation.grammar_checker import grammar_of
from pagewire.shared.chat.formats import TOOL_TAGS
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages.client import StructuredOutputsParams
from tests.pipeline.test_grammars import FORMS
from tests.support.checkpoints import EOS, tokenizer

FORM = StructuredOutputsParams(
    json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, disable_any_whitespace=True
)


def library(*tags: str, special: bool) -> Tokenizer:
    """A tokenizer with these tokens, whose end of text is no tag."""
    changed: Tokenizer = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str().replace(EOS, "<|eos|>"))
    changed.add_tokens([AddedToken(tag, special=special) for tag in tags])
    return changed


def taken(words: Tokenizer, reasoning: str, progress: Progress, text: str) -> str:
    """As much of the text as the grammar takes."""
    ids = {token.content: i for i, token in words.get_added_tokens_decoder().items()}
    grammar = grammar_of(FORM, prefix=reasoning_grammar(reasoning, progress, ids))
    matcher = GrammarCompiler(lambda: words, words.get_vocab_size(), {0}).compile(grammar)
    tokens = words.encode(text).ids
    complete = matcher.deep_copy()
    count = matcher.validate_tokens(tokens)
    decoded: str = words.decode(tokens[:count], skip_special_tokens=False)
    assert complete.consume_tokens(tokens[:count])
    assert complete.is_accepting() == (decoded == text and text.endswith('{"a":1}'))
    return decoded


PLAIN = '{"a":1}'
THOUGHT = 'Is {"a": 2}</thin\n right?'
TEXTS = [
    (Progress.OVER, PLAIN, PLAIN),
    (Progress.OVER, f"<think>{THOUGHT}</think>", ""),
    (Progress.AHEAD, PLAIN, PLAIN),
    (Progress.AHEAD, f"<think>{THOUGHT}</think>\n\n{PLAIN}", f"<think>{THOUGHT}</think>\n\n{PLAIN}"),
    (Progress.AHEAD, f"<think></think>{PLAIN}", f"<think></think>{PLAIN}"),
    (Progress.AHEAD, "<think></think>[1]", "<think></think>"),
    (Progress.AHEAD, f"{THOUGHT}</think>", ""),
    (Progress.BEGUN, f"{THOUGHT}</think>{PLAIN}", f"{THOUGHT}</think>{PLAIN}"),
    (Progress.BEGUN, f"{THOUGHT}</think>\nWell", f"{THOUGHT}</think>\n"),
]


@pytest.mark.parametrize(("progress", "text", "expected"), TEXTS)
@pytest.mark.parametrize("special", [None, False, True], ids=["no token", "token", "special token"])
def test_the_form_begins_behind_the_reasoning(
    special: bool | None, progress: Progress, text: str, expected: str
) -> None:
    tags = () if special is None else ("<think>", "</think>")
    assert taken(library(*tags, special=bool(special)), "think", progress, text) == expected


@pytest.mark.parametrize("tags", [(), TOOL_TAGS["harmony"]], ids=["no tokens", "tokens"])
def test_harmony_has_the_answer_in_its_final_message(tags: tuple[str, ...]) -> None:
    words, final = library(*tags, special=True), f"<|channel|>final<|message|>{PLAIN}"
    whole = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{final}"
    for text, expected in ((final, final), (whole, whole), (PLAIN, "")):
        assert taken(words, "harmony", Progress.AHEAD, text) == expected


@pytest.mark.parametrize("name", FORMS)
def test_every_form_may_come_behind_reasoning(name: str) -> None:
    words = library(special=False)
    grammar = grammar_of(FORMS[name][0], prefix=reasoning_grammar("think", Progress.AHEAD, {}))
    matcher = GrammarCompiler(lambda: words, words.get_vocab_size(), {0}).compile(grammar)
    assert matcher.consume_tokens(words.encode("<think>Hm.</think>\n").ids)
