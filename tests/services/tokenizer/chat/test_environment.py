import json
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from jinja2 import TemplateError

from pagewire.services.tokenizer.chat.environment import chat_environment


def rendered(template: str, **variables: Any) -> str:
    return chat_environment().from_string(template).render(**variables)


def test_json_is_not_escaped_for_html() -> None:
    assert rendered("{{ x | tojson }}", x={"é": "<&'>"}) == '{"é": "<&\'>"}'


@pytest.mark.parametrize(
    "arguments",
    ["indent=2", "ensure_ascii=true", "separators=(',', ':')", "sort_keys=true", "indent=4, sort_keys=true"],
)
def test_json_takes_pythons_arguments(arguments: str) -> None:
    value = {"b": [1, "é"], "a": None}
    reference = json.dumps(value, **{"ensure_ascii": False} | eval(f"dict({arguments})", {"true": True}))
    assert rendered(f"{{{{ x | tojson({arguments}) }}}}", x=value) == reference


def test_blocks_leave_no_blank_lines() -> None:
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loops_can_be_left() -> None:
    loop = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert rendered(loop) == "02"


def test_generation_blocks_are_rendered() -> None:
    template = "{% for m in messages %}<{% generation %}{{ m }}{% endgeneration %}>{% endfor %}"
    assert rendered(template, messages=["a", "b"]) == "<a><b>"


def test_dates_are_todays() -> None:
    assert rendered("{{ strftime_now('%Y') }}{{ strftime_now(format='%%') }}") == f"{datetime.now():%Y}%"


def test_a_template_can_refuse() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_templates_may_use_namespaces_and_dictionaries() -> None:
    template = "{% set n = namespace(a=1, self=2) %}{% set n.a = n.a + n.self %}{{ n.a }}{{ dict(b=2) }}"
    assert rendered(template) == "3{'b': 2}"
    assert rendered("{{ dict.fromkeys('ab', 0) }}") == "{'a': 0, 'b': 0}"


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__subclasses__() }}",
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ dict.__init__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ (strftime_now | attr('__globals__'))['sys'] }}",
    ],
)
def test_there_is_no_way_out_of_the_sandbox(escape: str) -> None:
    """An attribute that is not refused is undefined."""
    with suppress(TemplateError):
        assert rendered(escape, messages=[]) == ""


def test_nothing_can_be_included() -> None:
    with pytest.raises(TypeError):
        rendered("{% include '/etc/passwd' %}")
