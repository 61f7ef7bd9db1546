"""Turns `structured_outputs` into one grammar, and refuses what cannot be compiled before the request is dispatched."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.services.tokenizer.validation.exact_grammar import exact_grammar, needs_exact_grammar
from pagewire.services.tokenizer.validation.json_schemas import JsonSchema, closed, stricter
from pagewire.services.tokenizer.validation.large_integers import clamped
from pagewire.services.tokenizer.validation.schema_keywords import simplified
from pagewire.shared.client_protocol.client_requests import check_free_form
from pagewire.shared.errors import InvalidRequest, invalid_field
from pagewire.shared.grammar_compiler import MAX_GRAMMAR, GrammarCompiler, GrammarError
from pagewire.shared.messages.client import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only in the stubs

FIELD = "structured_outputs"
"""The field of a request, for its error messages."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `structured_outputs`, of which a request has exactly one."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Whitespace between the tokens of JSON: bounded, because a model may write nothing else for ever."""
MAX_CHOICES = 1024
"""Maximum number of texts to choose from."""
Rewrite = Callable[[JsonSchema], JsonSchema]
STRICTER: tuple[Rewrite, ...] = (lambda schema: schema, stricter, lambda schema: clamped(stricter(schema)))
"""Rewrites of a JSON schema, in the order in which to try whether it can be compiled: each one demands more."""
_MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that a form raises whose parts are of other types or sizes than their keywords take."""
THREADS = 2
"""Number of grammars that are compiled at a time."""


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: JsonSchema = msgspec.field(default_factory=dict)


class _StructuralTag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


class _Grammars(msgspec.Struct):
    """Grammars in llguidance's own form. The text matches the first one, which may refer to the others by name."""

    grammars: list[dict[str, Any]]


class GrammarChecker:
    """Compiles the grammars of requests on threads of its own, to refuse those that cannot be compiled."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    async def grammar(
        self, params: StructuredOutputsParams | None, prefix: str = "", parts: Mapping[str, str] | None = None
    ) -> str:
        """Returns the grammar of a request, which can be compiled; empty: it has none.

        Args:
            params: the form of the answer.
            prefix: Lark of the whole text, in which `@answer` stands for that form; empty: there is no more.
            parts: other grammars that `prefix` refers to, by name.

        Raises:
            InvalidRequest: there is not exactly one form, or it cannot be compiled; the message says why.
        """
        if params is None and not prefix:
            return ""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._checked, params, prefix, parts or {})

    def close(self) -> None:
        """Ends the threads. Grammars that wait for them are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _checked(self, params: StructuredOutputsParams | None, prefix: str, parts: Mapping[str, str]) -> str:
        """Returns the grammar of the request, or else one of a stricter schema, which can be compiled."""
        kind = "" if params is None else kind_of(params)
        reason = ""
        for rewrite in STRICTER if kind in {"json", "structural_tag"} else STRICTER[:1]:
            try:
                grammar = grammar_of(params, rewrite=rewrite, prefix=prefix, parts=parts)
                self._compiler.compile(grammar)
            except GrammarError as error:
                reason = str(error)
            else:
                return grammar
        field = FIELD if kind else "tools"
        name = f"{FIELD}.{kind}" if kind else "the grammar of the tools"
        raise InvalidRequest(f"{name} cannot be compiled: {reason}", field=field)


def kind_of(params: StructuredOutputsParams) -> str:
    """Returns the name of the only field of `KINDS` that a request has.

    Raises:
        InvalidRequest: it has none, or several.
    """
    kinds = [kind for kind in KINDS if getattr(params, kind) not in (None, False)]
    if len(kinds) != 1:
        raise invalid_field(FIELD, f"must have exactly one of {', '.join(KINDS)}, not {', '.join(kinds) or 'none'}")
    return kinds[0]


def grammar_of(
    params: StructuredOutputsParams | None,
    *,
    rewrite: Rewrite = STRICTER[0],
    prefix: str = "",
    parts: Mapping[str, str] | None = None,
) -> str:
    """Returns the grammar that a request asks for, as `GrammarCompiler` compiles it.

    Args:
        params: the form of the answer; None: `prefix` has no `@answer`.
        rewrite: what makes JSON schemas stricter.
        prefix: Lark of the whole text, in which `@answer` stands for that form; empty: there is no more.
        parts: other grammars that `prefix` refers to, by name.

    Raises:
        InvalidRequest: it has not exactly one kind, or that is too long or malformed; the message names the field.
        GrammarError: a JSON schema cannot be compiled; the message names the keyword.
    """
    kind, named = "", dict(parts or {})
    if params is not None:
        kind = kind_of(params)
        check_free_form(FIELD, getattr(params, kind), f".{kind}")
        try:
            named["answer"] = _grammar(params, rewrite)
        except _MALFORMED as error:
            raise InvalidRequest(f"{FIELD}.{kind} is malformed: {error}", field=FIELD) from error
    grammar = _joined(prefix, named) if prefix else named["answer"]
    if len(grammar) > MAX_GRAMMAR:
        name = f"{FIELD}.{kind}" if kind else "tools"
        raise InvalidRequest(
            f"{name} has {len(grammar)} characters, at most {MAX_GRAMMAR} are allowed", field=name.partition(".")[0]
        )
    return grammar


def _grammar(params: StructuredOutputsParams, rewrite: Rewrite) -> str:
    if params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else _schema(params.json, params, rewrite)
        if needs_exact_grammar(schema):
            return LLMatcher.grammar_from_lark(exact_grammar(schema, _options(params)))
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_options(params))
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return LLMatcher.grammar_from_lark(_choice(params.choice))
    if params.grammar is not None:
        grammar = params.grammar
        return grammar if grammar.lstrip().startswith("{") else LLMatcher.grammar_from_lark(_lark(grammar))
    assert params.structural_tag is not None
    return _structural_tag(params.structural_tag, params, rewrite)


def _lark(grammar: str) -> str:
    """Returns a grammar in Lark or GBNF as Lark."""
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the library raises nothing narrower for malformed GBNF
        raise ValueError(error) from error


def _joined(prefix: str, named: Mapping[str, str]) -> str:
    """Returns `prefix` with the grammars that it refers to by their names."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": prefix}]
    for name, grammar in named.items():
        parts = msgspec.json.decode(grammar, type=_Grammars).grammars if grammar.lstrip().startswith("{") else ()
        first, *others = parts or [{"lark_grammar": grammar}]
        grammars += [first | {"name": name}, *others]
    return msgspec.json.encode(_Grammars(grammars)).decode()


def _choice(texts: list[str]) -> str:
    if not texts or not all(texts):
        raise ValueError("there must be at least one text, and none may be empty")
    if len(texts) > MAX_CHOICES:
        raise ValueError(f"there are {len(texts)} texts, at most {MAX_CHOICES} are allowed")
    return "start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts))


def _options(params: StructuredOutputsParams) -> "JsonCompileOptions":
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _schema(value: str | JsonSchema, params: StructuredOutputsParams, rewrite: Rewrite) -> JsonSchema:
    schema = _decoded(value)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object")  # noqa: TRY004 a value of a request
    schema = simplified(schema)
    if params.disable_additional_properties:
        schema = closed(schema)
    return rewrite(schema)


def _decoded(value: object) -> object:
    """Returns a value that may be written as JSON."""
    if not isinstance(value, str):
        return value
    decoded = msgspec.json.decode(value)
    check_free_form(FIELD, decoded)
    return decoded


def _structural_tag(value: str | dict[str, Any], params: StructuredOutputsParams, rewrite: Rewrite) -> str:
    tag = msgspec.convert(_decoded(value), _StructuralTag)
    tags = []
    for structure in tag.structures:
        trigger = next((text for text in tag.triggers if text and structure.begin.startswith(text)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {structure.begin!r}")
        schema = _schema(structure.schema, params, rewrite)
        if needs_exact_grammar(schema):
            grammar = exact_grammar(schema, _options(params))
        else:
            grammar = json.dumps({"x-guidance": _options(params), **schema} if isinstance(schema, dict) else schema)
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=grammar, end=structure.end))
    grammar = StructTag.to_grammar(tags, assume_special=False)
    return grammar if grammar.startswith("{") else LLMatcher.grammar_from_lark(grammar)
