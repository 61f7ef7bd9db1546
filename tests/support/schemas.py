"""Texts that the grammar of a JSON schema takes, with the tokens of the bundled model."""

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pagewire.services.tokenizer.validation.grammar_checker import GrammarChecker, grammar_of
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages.client import StructuredOutputsParams
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tools.experiments.correctness.inputs.random_values import EOS, random_value


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(Path(__file__).parents[2] / "pagewire" / "bundled").backend


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer().get_vocab_size(), {EOS})


@cache
def checker() -> GrammarChecker:
    return GrammarChecker(compiler())


def takes(schema: Any, text: str, **options: Any) -> bool:
    """Returns whether the grammar of a schema takes a text."""
    matcher = compiler().compile(grammar_of(StructuredOutputsParams(json=schema, **options)))
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def draw(grammar: str, seed: int) -> Any:
    """Returns a random value that a grammar takes."""
    return random_value(compiler().compile(grammar), tokenizer(), seed)
