"""The grammar of a JSON schema with integers that the doubles of llguidance do not hold. Pure.

The parts of the schema that lead to such an integer become Lark, and all other parts stay JSON schemas within it.
"""

import json
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pagewire.services.tokenizer.validation.json_schemas import TYPES, JsonSchema, exclusive
from pagewire.services.tokenizer.validation.large_integers import (
    EXACT,
    LOWER,
    UPPER,
    fractions,
    has_large,
    integers,
    interval,
    is_large,
)
from pagewire.services.tokenizer.validation.schema_references import (
    DEFINITIONS,
    Schema,
    definitions_of,
    leading,
    parts_of,
    pointed,
    resource_of,
)
from pagewire.shared.grammar_compiler import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only in the stubs

_KINDS = {
    bool: ("boolean",),
    type(None): ("null",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}
"""Types of JSON schemas, by Python's types of values."""
MOST_REFERENCES = 8
"""References in a row that are followed to tell alternatives apart."""
_ANY = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "const", "enum", "if", "not", "oneOf"})
"""Keywords that constrain values of all types."""
_NUMBER = frozenset({*LOWER, *UPPER, "multipleOf"})
_ARRAY = frozenset(
    {"additionalItems", "contains", "items", "maxItems", "minItems", "prefixItems", "unevaluatedItems", "uniqueItems"}
)
_OBJECT = frozenset(
    {
        "additionalProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "properties",
        "propertyNames",
        "required",
        "unevaluatedProperties",
    }
)
_STRING = frozenset({"format", "maxLength", "minLength", "pattern"})
_CONSTRAINTS = frozenset({*_ANY, *_NUMBER, *_ARRAY, *_OBJECT, *_STRING, "type"})
_PUNCTUATION = {
    "COMMA": 'SPACE? "," SPACE?',
    "COLON": 'SPACE? ":" SPACE?',
    "ARRAY": '"[" SPACE?',
    "ARRAY_END": 'SPACE? "]"',
    "OBJECT": '"{" SPACE?',
    "OBJECT_END": 'SPACE? "}"',
}
"""Terminals of JSON with white space inside the text."""
_SLASH = r"\/"
_PLAIN_KEY = r"/\"[^\"\\\x00-\x1f\x7f]*\"/"
"""Name of a property without escapes."""


def needs_exact_grammar(schema: object) -> bool:
    """Returns whether a schema has integers, also in its definitions, that llguidance would round.

    >>> needs_exact_grammar({"properties": {"id": {"enum": [2**60 + 1]}}}), needs_exact_grammar({"maximum": 100})
    (True, False)
    """
    if not isinstance(schema, dict):
        return False
    return is_large(schema) or any(needs_exact_grammar(part) for _, part in parts_of(schema))


def exact_grammar(schema: JsonSchema, options: "JsonCompileOptions") -> str:
    """Returns the Lark of a schema: its texts are those of llguidance's grammar, with exact integers.

    Args:
        schema: a simplified schema.
        options: what white space the text may have.

    Raises:
        GrammarError: a keyword or reference beside these integers is not supported; the message names it.
    """
    assert isinstance(schema, dict)
    try:
        writer = _Writer(options, leading(schema, is_large))
        start = writer.expression(schema, schema)
    except LookupError as error:
        raise GrammarError(f"the reference {error} is not supported {_BESIDE}") from error
    space = options.get("whitespace_pattern")
    rules = {"start": start, **writer.rules, **_PUNCTUATION}
    rules["SPACE"] = f"/{space.replace('/', _SLASH)}/" if space else '""'
    return "".join(f"{name}: {body}\n" for name, body in rules.items())


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, options: "JsonCompileOptions", large: Set[int]) -> None:
        """`large`: identities of the schemas that lead to large integers."""
        self.rules: dict[str, str] = {}
        self._large = large
        self._options = options
        self._names: dict[tuple[int, bool], str] = {}
        """Names of rules, by the identity of their schema and by `beside`: references may lead back to a schema."""

    def expression(self, schema: Any, resource: Schema, *, beside: bool = False) -> str:
        """Returns an expression of the values of a schema.

        Args:
            schema: a part of the whole schema.
            resource: what the references in it are relative to.
            beside: whether an alternative to it leads to a large integer. llguidance takes no white space in the first
                of two JSON schemas that could both go on, so its arrays and objects become Lark, if they can.
        """
        resource = resource_of(schema, resource)
        if id(schema) not in self._large:
            if beside and isinstance(schema, dict):
                with suppress(GrammarError):
                    return self._named(schema, resource, beside=True)
            with suppress(LookupError):
                return self._json(schema, resource)
            return self._named(schema, resource, beside=True)
        return self._named(schema, resource)

    def _named(self, schema: Schema, resource: Schema, *, beside: bool = False) -> str:
        """Returns the name of a schema's rule."""
        key = id(schema), beside
        if (name := self._names.get(key)) is None:
            complete = dict(self._names)
            name = self._names[key] = self._rule('""')
            try:
                self.rules[name] = self._alternatives(schema, resource, beside)
            except GrammarError:
                self._names = complete
                raise
        return name

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = body
        return name

    def _alternatives(self, schema: Schema, resource: Schema, beside: bool) -> str:
        constraints = schema.keys() & _CONSTRAINTS
        if constraints & {"const", "enum"}:
            _refuse(constraints - {"const", "enum", "type", *LOWER, *UPPER})
            return self._values(schema)
        if combined := constraints & _ANY:
            keyword = min(combined)
            _refuse(constraints - {keyword})
            return self._combined(keyword, schema[keyword], resource, beside)
        kinds = schema.get("type", TYPES)
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        written = []
        if kinds & {"integer", "number"} and is_large(schema):
            written += self._numbers(schema, kinds)
            kinds -= {"integer", "number"}
        for kind, keywords, write in (("array", _ARRAY, self._array), ("object", _OBJECT, self._object)):
            is_leading = any(name in keywords and id(part) in self._large for name, part in parts_of(schema))
            if kind in kinds and (beside or is_leading):
                written.append(write(schema, resource))
                kinds.remove(kind)
        if kinds:
            others = {*DEFINITIONS, *(() if "array" in kinds else _ARRAY), *(() if "object" in kinds else _OBJECT)}
            rest = {name: value for name, value in schema.items() if name not in others}
            written.append(self._json({**rest, "type": sorted(kinds)}, resource))
        return _either(written)

    def _combined(self, keyword: str, value: Any, resource: Schema, beside: bool) -> str:
        match keyword, value:
            case "$ref", str():
                target, resource = pointed(value, resource)
                return self.expression(target, resource, beside=beside)
            case "allOf", [part]:
                return self.expression(part, resource, beside=beside)
            case "anyOf", [_, *_]:
                return _either([self.expression(part, resource, beside=True) for part in value])
            case "oneOf", [_, *_]:
                if exclusive([_dereferenced(part, resource) for part in value]):
                    return self._combined("anyOf", value, resource, beside)
        raise _unsupported(keyword)

    def _values(self, schema: Schema) -> str:
        """Returns an expression of the values of `const` or `enum`, as far as the other keywords allow them."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds = schema.get("type")
        kinds = {kinds} if isinstance(kinds, str) else kinds
        least, most = interval(schema)
        allowed = [value for value in values if kinds is None or set(kinds).intersection(_KINDS[type(value)])]
        allowed = [
            value
            for value in allowed
            if isinstance(value, bool)
            or not isinstance(value, int | float)
            or ((least is None or least <= value) and (most is None or value <= most))
        ]
        large = [self._value(value) for value in allowed if has_large(value)]
        others = [value for value in allowed if not has_large(value)]
        return _either([*large, self._json({"enum": others}, {})] if others else large)

    def _value(self, value: object) -> str:
        """Returns an expression of one value."""
        if not has_large(value):
            return self._json({"const": value}, {})
        match value:
            case list():
                return f"ARRAY {' COMMA '.join(map(self._value, value))} ARRAY_END"
            case dict():
                members = (f"{_name(name)} COLON {self._value(member)}" for name, member in value.items())
                return f"OBJECT {' COMMA '.join(members)} OBJECT_END"
        return f"/{value}/"

    def _numbers(self, schema: Schema, kinds: Iterable[str]) -> list[str]:
        """Returns expressions of the numbers within the bounds."""
        _refuse(schema.keys() & {"multipleOf"})
        least, most = interval(schema)
        expressions = [integers(least, most), fractions(least, most) if "number" in kinds else ""]
        return [f"/{expression}/" for expression in expressions if expression]

    def _array(self, schema: Schema, resource: Schema) -> str:
        _refuse(schema.keys() & _ARRAY - {"additionalItems", "items", "prefixItems", "minItems", "maxItems"})
        most, least = _typed(schema, "maxItems", int, None), _typed(schema, "minItems", int, 0)
        prefix, others = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(others, list):  # as before draft 2020-12
            prefix, others = others, schema.get("additionalItems", True)
        elements = [self._rule(self.expression(part, resource)) for part in prefix[:most]]
        after = ""
        """Lark of what may follow the last element that is looked at."""
        if others is not False and len(elements) != most:
            other = self._rule(self.expression(others, resource))
            more = max(0, least - len(elements)), None if most is None else most - len(elements)
            after = _repeated(f"COMMA {other}", *more)
            if not elements:
                after = f"{other} {_repeated(f'COMMA {other}', max(0, least - 1), None if most is None else most - 1)}"
                after = after if least else f"({after})?"
        for index, element in reversed(list(enumerate(elements))):
            after = f"{'COMMA ' if index else ''}{element} {after}"
            after = after if index < least else f"({after})?"
        return f"ARRAY {after} ARRAY_END"

    def _object(self, schema: Schema, resource: Schema) -> str:
        _refuse(schema.keys() & _OBJECT - {"properties", "required", "additionalProperties"})
        properties, required = _typed(schema, "properties", dict, {}), _typed(schema, "required", list, [])
        others = schema.get("additionalProperties", True)
        names = dict.fromkeys([*properties, *required])
        tail = head = ""
        """Expressions of the members that may follow another one, and of those that may come first."""
        if others is not False:
            key = _PLAIN_KEY if not names else f"KEY{len(self.rules)}"
            if names:
                self.rules[key] = f"{_PLAIN_KEY} & ~({' | '.join(map(_name, names))})"
            pair = self._rule(f"{key} COLON {self.expression(others, resource)}")
            tail, head = f"(COMMA {pair})*", f"({pair} (COMMA {pair})*)?"
        for name in reversed(names):
            part = properties.get(name, others)
            if part is False and name in required:
                raise GrammarError(f"the required property {name} is not allowed")
            if part is False:
                continue
            member = self._rule(f"{_name(name)} COLON {self.expression(part, resource)}")
            if name in required:
                head, tail = f"{member} {tail}", f"COMMA {member} {tail}"
            else:
                head = f"({member} {tail} | {head})" if head else f"({member} {tail})?"
                tail = f"(COMMA {member})? {tail}"
            head, tail = self._rule(head), self._rule(tail)
        return f"OBJECT {head} OBJECT_END"

    def _json(self, schema: Any, resource: Schema) -> str:
        """Returns an expression of a part without large integers, with the definitions that it refers to."""
        part = schema if isinstance(schema, dict) else {} if schema is True else {"not": {}}
        definitions = {} if part is resource else definitions_of(part, resource)
        return "%json " + json.dumps({**part, **definitions, "x-guidance": self._options})


def _dereferenced(schema: Any, resource: Schema) -> Schema:
    """Returns the schema that a reference leads to, over other references, or the schema itself."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema, resource = pointed(reference, resource)
    return schema if isinstance(schema, dict) else {}


def _typed(schema: Schema, name: str, kind: type, default: Any) -> Any:
    """Returns the value of a keyword. Raises GrammarError if it is of another type."""
    value = schema.get(name, default)
    if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
        raise GrammarError(f"{name} is malformed")
    return value


def _name(name: str) -> str:
    """Returns the name of a property, as JSON, in Lark."""
    quoted = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
    return quoted.replace("\x7f", "\\u007f")


def _repeated(expression: str, least: int, most: int | None) -> str:
    return "" if most == 0 else f"({expression}){{{least},{'' if most is None else most}}}"


def _either(written: Sequence[str]) -> str:
    if not written:
        raise GrammarError("no value fulfils the schema")
    return " | ".join(written)


_BESIDE = f"beside integers beyond {EXACT}"


def _unsupported(keyword: str) -> GrammarError:
    return GrammarError(f"{keyword} is not supported {_BESIDE}")


def _refuse(keywords: Iterable[str]) -> None:
    """Raises GrammarError if there are any."""
    for keyword in sorted(keywords):
        raise _unsupported(keyword)
