"""Templates as their publishers ship them are rendered as `transformers` renders them."""

import asyncio
import re
from typing import Any

import msgspec
import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from pagewire.services.tokenizer.chat.chat_template import END_MARK, ChatTemplate, Conversation
from pagewire.services.tokenizer.chat.conversation import conversation_of
from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.chat.templates import DEFAULT, ChatTemplates
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import GenerateRequest
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.services.tokenizer.chat.conversations import CONVERSATIONS, parts, said
from tests.support.model_folders import TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TAKE_PARTS = {"GLM-4.6", "Kimi-K2-Thinking", "Qwen3.5-4B", "unsloth-mistral-Devstral-Small-2507"}
"""Templates that iterate over content; the others are given the joined texts."""
KNOW_DEVELOPER = {"openai-gpt-oss-120b"}
OWN = ("add_generation_prompt", "continue_final_message", "messages", "tools")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(BUNDLED).to_transformers()
    for name, token in SPECIAL.items():
        setattr(tokenizer, name, token)
    return tokenizer


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def expected(tokenizer: PreTrainedTokenizerFast, name: str, arguments: dict[str, Any]) -> str | None:
    """The text that `transformers` renders; None where it refuses."""
    messages = [dict(message) for message in arguments["messages"]]
    for message in messages:
        if isinstance(message["content"], list) and name not in TAKE_PARTS:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if message["role"] == "developer" and name not in KNOW_DEVELOPER:
            message["role"] = "system"
    settings = {"add_generation_prompt": True, **arguments, "chat_template": source(name), "tokenize": False}
    del settings["messages"]
    try:
        return str(tokenizer.apply_chat_template(messages, **settings))
    except Exception:  # noqa: BLE001  # templates raise whatever they like
        return None


def requested(arguments: dict[str, Any]) -> Conversation:
    """The conversation of a request with these arguments."""
    fields = {name: value for name, value in arguments.items() if name in OWN}
    variables = {name: value for name, value in arguments.items() if name not in OWN}
    request = msgspec.convert({**fields, "chat_template_kwargs": variables}, GenerateRequest)
    assert request.messages is not None
    return conversation_of(request, request.messages)


def is_whole(reference: str | None, arguments: dict[str, Any]) -> bool:
    """Whether a text has the answers and calls of tools, and all instructions, of a conversation."""
    messages = arguments["messages"]
    called = ["units"] * any("tool_calls" in message for message in messages)
    instructed = [message["content"] for message in messages if message["role"] in {"system", "tool"}]
    texts = [text for text in instructed if isinstance(text, str)]
    return reference is not None and all(text in reference for text in [*called, *texts])


@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
async def test_a_publishers_template_renders_like_transformers(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    refused = set()
    async with ChatRenderer() as renderer:
        renderer.use(ChatTemplates({DEFAULT: source(name), "tool_use": source(name)}, SPECIAL))
        for title, arguments in CONVERSATIONS.items():
            reference = expected(tokenizer, name, arguments)
            (text,) = await asyncio.gather(renderer.render(requested(arguments)), return_exceptions=True)
            if isinstance(text, InvalidRequest):
                assert reference is None, title
                assert re.match(r"messages\[\d\]: .* refuses this message: .", text.message)
                refused.add(title)
                continue
            if is_whole(reference, arguments):
                assert text == reference, title
    assert refused <= {"unknown role", "continued nothing"}


def test_there_are_many_templates_and_conversations() -> None:
    assert len(NAMES) >= 17
    assert len(CONVERSATIONS) >= 15
    assert set(NAMES) >= TAKE_PARTS | KNOW_DEVELOPER


def laid_out(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    return ChatTemplate(chat_environment(), template, SPECIAL).render(Conversation(list(messages), **fields))


def test_a_template_that_iterates_over_content_gets_a_text_as_a_part() -> None:
    template = "{% for m in messages %}{% for c in m['content'] %}[{{ c['text'] }}]{% endfor %}{% endfor %}"
    assert laid_out(template, said("user", "Hi."), said("user", parts("a", "b"))) == "[Hi.][a][b]"


def test_a_late_system_message_stays_where_the_template_takes_it_there() -> None:
    source = (
        "{% if messages[0].role == 'system' or messages | length > 2 %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}: {{ m.content | trim }}]{% endfor %}"
    )
    template = ChatTemplate(chat_environment(), source, SPECIAL)
    template.rules = template.probe()
    assert not template.rules.system
    late = [said("user", "Hello!"), said("system", " Be brief. ")]
    assert template.render(Conversation(late)) == "[user: Hello!][system: Be brief.]"
    assert template.render(Conversation(late[::-1])) == "[user: Be brief. \n\nHello!]"


def test_arguments_of_a_tool_call_are_the_object_that_they_spell() -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"

    def call(arguments: Any) -> dict[str, Any]:
        return said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])

    assert laid_out(template, call('{"a": "é", "b": 1}')) == '{"a": "é", "b": 1}'
    assert laid_out(template, call({"a": 1})) == '{"a": 1}'
    assert laid_out(template, call("")) == "{}"
    assert laid_out(template, call("{no json")) == '"{no json"'


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_by_every_name(name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }} {{ m.thinking }}{% endfor %}"
    assert laid_out(template, said("assistant", "Hi.", **{name: "Hm."})) == "Hm. Hm."


@pytest.mark.parametrize(
    ("template", "final"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "x"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "x"),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", []),
    ],
)
def test_a_final_message_that_is_not_shown_cannot_be_continued(template: str, final: Any) -> None:
    with pytest.raises(TemplateError, match="continue_final_message"):
        laid_out(template, said("assistant", final), add_generation_prompt=False, continue_final_message=True)


def test_no_mark_is_left_in_the_prompt() -> None:
    template = "{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}"
    text = laid_out(template, said("assistant", "Once \n"), add_generation_prompt=False, continue_final_message=True)
    assert text == "Once"
    assert END_MARK not in text


def test_variables_of_a_client_do_not_change_the_messages() -> None:
    template = "{{ messages | length }}{{ tools }}{{ add_generation_prompt }}"
    variables = {"messages": [], "tools": ["x"], "add_generation_prompt": "yes"}
    assert laid_out(template, said("user", "x"), variables=variables) == "1NoneTrue"
