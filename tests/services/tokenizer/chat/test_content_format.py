import pytest

from pagewire.services.tokenizer.chat.content_format import ContentFormat, content_format
from pagewire.services.tokenizer.chat.environment import chat_environment
from tests.services.tokenizer.chat.test_chat_template import NAMES, TAKE_PARTS, source

TEXT, PARTS, BOTH = ContentFormat(False, True), ContentFormat(True, False), ContentFormat(True, True)


def found(template: str) -> ContentFormat:
    return content_format(chat_environment().parse(template))


@pytest.mark.parametrize("name", NAMES)
def test_publishers_templates_take_the_known_content_formats(name: str) -> None:
    assert found(source(name)) == (BOTH if name in TAKE_PARTS else TEXT)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages[0].content }}",
        "{% for c in messages %}{{ c }}{% endfor %}",
        "{% for m in messages %}{% for c in m.content.split() %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}",
        "{% for c in content %}{{ c }}{% endfor %}",
        "{% macro show(text) %}{{ text }}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    ],
)
def test_content_that_is_only_shown_is_taken_as_text(template: str) -> None:
    assert found(template) == TEXT


@pytest.mark.parametrize(
    "loop",
    [
        "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.get('content') %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set parts = m.content %}{% for c in parts %}{% endfor %}{% endfor %}",
        "{% set turns = messages[1:] %}{% for m in turns %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% for c in messages[0].content %}{% endfor %}",
        "{% set turns = messages if tools else messages[1:] %}{% for m in turns %}{% for c in m.content or [] %}"
        "{% endfor %}{% endfor %}",
        "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% macro show(a, c) %}{% for p in c %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(1, c=m.content) }}{% endfor %}",
    ],
)
def test_content_that_is_iterated_over_is_taken_as_parts(loop: str) -> None:
    assert found(loop) == PARTS
    asks = "{% if messages[0].content is string %}{% endif %}"
    assert found(asks + loop) == BOTH
