"""Chat templates are programs of strangers: they render text or are refused, within their limits."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from jinja2 import TemplateError

from pagewire.services.tokenizer.chat.chat_template import ChatTemplate, Conversation
from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.chat.templates import ChatTemplates
from pagewire.shared.errors import InvalidRequest, Unavailable
from tests.fuzz.fuzzing import fuzz, mutated, values
from tests.support.waiting import PATIENCE

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
TEMPLATES = [path.read_bytes() for path in sorted(FOLDER.glob("*.jinja")) if path.stat().st_size < 6000]
TOKENS = [
    b"{{ messages }}",
    b"{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    b"{{ raise_exception('no') }}",
    b"{% set ns = namespace(a=1) %}{% set ns.a = ns.a * 9 %}",
    b"{{ 'x' * 9999 }}",
    b"{{ messages.__class__.__mro__ }}",
    b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    b"{{ strftime_now('%Y') }}",
    b"{{ (",
    b"{%- break %}",
    b"| map(attribute='content')",
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
]


@pytest.mark.anyio
async def test_any_template_renders_or_is_refused_in_its_process() -> None:
    """A process per template, so that few are tried here."""

    async def check(source: bytes) -> None:
        templates = ChatTemplates({"default": source.decode(errors="replace")}, {"bos_token": "<s>"})
        async with ChatRenderer() as renderer:
            renderer.use(templates)
            try:
                await renderer.render(Conversation(MESSAGES, True, False, {}))
            except (InvalidRequest, Unavailable) as error:
                assert str(error)  # noqa: PT017

    def run(source: bytes) -> None:
        asyncio.run(asyncio.wait_for(check(source), PATIENCE))

    await asyncio.to_thread(fuzz, mutated(TEMPLATES, TOKENS), run, batch=1)


def test_any_message_renders_or_is_refused_by_real_templates() -> None:
    """The template is a real one and the messages are strange."""
    templates = [ChatTemplate(chat_environment(), source.decode(), {"bos_token": "<s>"}) for source in TEMPLATES]

    def check(given: tuple[ChatTemplate, list[Any], dict[str, Any]]) -> None:
        template, contents, variables = given
        messages = [{"role": role, "content": content} for role, content in contents]
        try:
            text = template.render(Conversation(messages, True, False, variables))
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError):
            return  # what templates raise is answered with 400
        msgspec.msgpack.encode(text.encode(errors="replace"))

    roles = st.one_of(st.sampled_from(["user", "assistant", "system", "tool"]), st.text(max_size=5))
    contents = st.lists(st.tuples(roles, values), max_size=4)
    variables = st.dictionaries(st.sampled_from(["enable_thinking", "tools", "x"]), values, max_size=2)
    fuzz(st.tuples(st.sampled_from(templates), contents, variables), check)
