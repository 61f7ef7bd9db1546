from pathlib import Path

import pytest
from tokenizers import AddedToken

from pagewire.services.tokenizer.chat.chat_template import ChatTemplate
from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.format_recognition import Formats, reasoning_format, tool_format
from pagewire.services.tokenizer.chat.template_probe import MessageRules
from pagewire.services.tokenizer.chat.templates import ChatTemplates
from pagewire.shared.chat.formats import REASONING_PARSERS, TOOL_PARSERS
from pagewire.shared.messages.client import ChatFormat
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.settings import config
from pagewire.shared.settings.config import Settings
from tests.support.model_folders import TEMPLATES

SHOWN = {
    "Apertus-8B-Instruct": ("", ""),
    "GLM-4.6": ("glm45", "think"),
    "HuggingFaceTB-SmolLM3-3B": ("", "think"),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ""),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", ""),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("", "think"),
    "ibm-granite-granite-3.3-2B-Instruct": ("", "think"),
    "microsoft-Phi-3.5-mini-instruct": ("", ""),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": ("", "think"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", ""),
}
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of arguments and values}. {{ tools }}'
LLAMA_PYTHONIC = "format of [func_name1(params_name1=params_value1, params_name2=params_value2...)] {{ tools }}"


PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SHOWS = "{{ messages }} {{ tools }}"


def find(settings: Settings, *special: str, **named: str) -> Formats:
    tokenizer = load_tokenizer(BUNDLED).backend
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in special])
    templates = ChatTemplates(named, {})
    source = named.get(templates.choose(tools=True) or "")
    rules = MessageRules() if source is None else ChatTemplate(chat_environment(), source, SPECIAL).probe()
    return Formats.find(settings, templates, tokenizer).with_rules(rules)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_formats_of_known_templates_are_recognized(path: Path) -> None:
    source = path.read_text()
    assert (tool_format(source), reasoning_format(source)) == SHOWN[path.stem]


def test_the_formats_of_other_templates_are_recognized() -> None:
    assert tool_format(LLAMA) == "llama3_json"
    assert tool_format(LLAMA_PYTHONIC) == "pythonic"
    assert reasoning_format("[THINK]{{ thoughts }}[/THINK]") == "think_mistral"


def test_a_setting_comes_before_the_template() -> None:
    assert find(Settings(), default=LLAMA + SHOWS).tool_calls == "llama3_json"
    for name, form in TOOL_PARSERS.items():
        assert find(config.load({"tool-call-parser": name}), default="x").tool_calls == form
    for name, form in REASONING_PARSERS.items():
        assert find(config.load({"reasoning-parser": name}), default="x").reasoning == form
    off = find(Settings(tool_call_parser="none", reasoning_parser="none"), default=LLAMA + SHOWS + "<think></think>")
    assert (off.tool_calls, off.reasoning, off.takes_tools) == ("", "", True)


def test_tools_are_taken_where_template_or_setting_has_a_format() -> None:
    native = find(Settings(), default=PLAIN, tool_use=LLAMA + SHOWS)
    assert (native.tool_calls, native.takes_tools, native.tools_as_text) == ("llama3_json", True, False)
    assert find(Settings(tool_call_parser="mistral"), default=PLAIN).takes_tools
    assert not find(Settings(tool_call_parser="none"), default=PLAIN).takes_tools


@pytest.mark.parametrize("template", [PLAIN, SHOWS], ids=["no tools", "tools in a format that is not known"])
def test_tools_are_texts_where_the_template_does_not_say_how_they_are_called(template: str) -> None:
    for parser in ("auto", "hermes"):
        formats = find(config.load({"tool-call-parser": parser}), "<tool_call>", default=template)
        assert (formats.tool_calls, formats.takes_tools) == ("hermes", True)
        assert formats.tools_as_text == (template == PLAIN or parser == "auto")
        assert formats.hides(ChatFormat("hermes"))
    assert not find(Settings(tool_call_parser="none"), default=template).tools_as_text
    assert not find(Settings(tool_call_parser="mistral"), default=template).tools_as_text


def test_tags_that_are_special_tokens_are_asked_for() -> None:
    formats = find(Settings(), "[TOOL_CALLS]", "<think>", default="[TOOL_CALLS]<think></think>")
    assert formats.special == {"[TOOL_CALLS]", "<think>"}
    assert formats.hides(ChatFormat("mistral"))
    assert formats.hides(ChatFormat(reasoning="think"))
    assert not formats.hides(ChatFormat("required"))


def test_ids_of_calls_are_short_where_the_template_wants_them_short() -> None:
    mistral = (TEMPLATES / "mistralai-Mistral-Nemo-Instruct-2407.jinja").read_text()
    assert find(Settings(), default=mistral).short_ids
    assert not find(Settings(), default=PLAIN).short_ids
