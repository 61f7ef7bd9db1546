"""The Jinja environment of chat templates: the same features as in `transformers`, and no others."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class GenerationBlock(Extension):
    """`{% generation %}` … `{% endgeneration %}`, which marks assistant text for training. Renders the body."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the block as a call of its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


class TemplateNamespace(Namespace):
    """`namespace()` without attributes that begin with an underscore, which lead to Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:  # no named parameters, so that a value may be called `self`
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class TemplateDict:
    """`dict()` and `dict.fromkeys()` without access to the type `dict`."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        """Returns a dictionary."""
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Returns a dictionary with one value for several keys."""
        return dict.fromkeys(*args)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Returns an environment with the syntax, globals and filters of `transformers.apply_chat_template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": TemplateDict(),
        "namespace": TemplateNamespace,
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002  # templates may pass it by this name
    return datetime.now().strftime(format)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name}, which begins with an underscore")
