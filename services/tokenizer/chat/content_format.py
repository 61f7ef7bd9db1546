"""Detects the form of message content that a chat template expects, by tracing its variables."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import Enum, auto

from jinja2 import nodes


class _Kind(Enum):
    MESSAGES = auto()
    MESSAGE = auto()
    CONTENT = auto()


Variables = dict[str, set[_Kind]]
"""Kinds of value that each variable of a template may hold, by name."""


@dataclass(frozen=True, slots=True)
class ContentFormat:
    """The forms of message content that a template accepts. vLLM calls it `openai` if it takes parts, else `string`."""

    takes_parts: bool
    """Whether the template iterates over content, so that it gets lists of parts. If not, texts of parts are joined."""
    takes_text: bool
    """Whether the template accepts a text. If not, a text becomes a list with one part."""


def content_format(template: nodes.Template) -> ContentFormat:
    """Returns the content format of a template. Traces content through variables, loops and macros.

    A name is treated as one variable in the whole template, as in vLLM's detection, which does not trace macros.
    """
    variables = _variables(template)
    takes_parts = any(_Kind.CONTENT in _kinds(loop.iter, variables) for loop in template.find_all(nodes.For))
    tests = (test for test in template.find_all(nodes.Test) if test.name == "string")
    tests_for_string = any(_Kind.CONTENT in _kinds(test.node, variables) for test in tests)
    return ContentFormat(takes_parts, takes_text=tests_for_string or not takes_parts)


def _variables(template: nodes.Template) -> Variables:
    """Returns the kinds of value that each variable of the template may hold."""
    variables: Variables = {"messages": {_Kind.MESSAGES}}
    while True:
        before = sum(map(len, variables.values()))
        for name, kinds in _assignments(template, variables):
            variables.setdefault(name, set()).update(kinds)
        if sum(map(len, variables.values())) == before:
            return variables


def _assignments(template: nodes.Template, variables: Variables) -> Iterator[tuple[str, Set[_Kind]]]:
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, _kinds(assign.node, variables)
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and _Kind.MESSAGES in _kinds(loop.iter, variables):
            yield loop.target.name, {_Kind.MESSAGE}
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (macro := macros.get(call.node.name)):
            for parameter, argument in zip(macro.args, call.args, strict=False):
                yield parameter.name, _kinds(argument, variables)
            for keyword in call.kwargs:
                yield keyword.key, _kinds(keyword.value, variables)


def _kinds(node: nodes.Node | None, variables: Variables) -> Set[_Kind]:
    """Returns the kinds of value that an expression may have."""
    match node:
        case nodes.Name(name=name):
            return variables.get(name, set())
        case nodes.Filter(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _kinds(inner, variables)
        case nodes.CondExpr(expr1=first, expr2=second) | nodes.Or(left=first, right=second):
            return _kinds(first, variables) | _kinds(second, variables)
        case (
            nodes.Getattr(node=inner, attr="content")
            | nodes.Getitem(node=inner, arg=nodes.Const(value="content"))
            | nodes.Call(node=nodes.Getattr(node=inner, attr="get"), args=[nodes.Const(value="content"), *_])
        ) if _Kind.MESSAGE in _kinds(inner, variables):
            return {_Kind.CONTENT}
        case nodes.Getitem(node=inner) if _Kind.MESSAGES in _kinds(inner, variables):
            return {_Kind.MESSAGE}
        case _:
            return set()
