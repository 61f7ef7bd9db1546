from pathlib import Path

import pytest
from tokenizers import AddedToken

from pagewire.services.tokenizer.chat.format_recognition import Formats, reasoning_format, tool_format
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


def find(settings: Settings, *special: str, **named: str) -> Formats:
    tokenizer = load_tokenizer(BUNDLED).backend
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in special])
    return Formats.find(settings, ChatTemplates(named, {}), tokenizer)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_formats_of_known_templates_are_recognized(path: Path) -> None:
    source = path.read_text()
    assert (tool_format(source), reasoning_format(source)) == SHOWN[path.stem]


def test_the_formats_of_other_templates_are_recognized() -> None:
    assert tool_format(LLAMA) == "llama3_json"
    assert tool_format(LLAMA_PYTHONIC) == "pythonic"
    assert reasoning_format("[THINK]{{ thoughts }}[/THINK]") == "think_mistral"


def test_a_setting_comes_before_the_template() -> None:
    assert find(Settings(), default=LLAMA).tool_calls == "llama3_json"
    for name, form in TOOL_PARSERS.items():
        assert find(config.load({"tool-call-parser": name}), default="x").tool_calls == form
    for name, form in REASONING_PARSERS.items():
        assert find(config.load({"reasoning-parser": name}), default="x").reasoning == form
    off = find(Settings(tool_call_parser="none", reasoning_parser="none"), default=LLAMA + "<think></think>")
    assert (off.tool_calls, off.reasoning, off.takes_tools) == ("", "", True)


def test_which_models_take_tools() -> None:
    assert not find(Settings(), default="{{ messages }}").takes_tools
    assert not find(Settings()).takes_tools
    assert find(Settings(), default="{{ messages }}", tool_use=LLAMA) == Formats("llama3_json", takes_tools=True)
    assert find(Settings(tool_call_parser="hermes"), default="{{ messages }}").takes_tools


def test_tags_that_are_special_tokens_are_asked_for() -> None:
    formats = find(Settings(), "[TOOL_CALLS]", "<think>", default="[TOOL_CALLS]<think></think>")
    assert formats.special == {"[TOOL_CALLS]", "<think>"}
    assert formats.hides(ChatFormat("mistral"))
    assert formats.hides(ChatFormat(reasoning="think"))
    assert not formats.hides(ChatFormat("required"))


def test_the_bundled_model_has_no_formats() -> None:
    tokenizer = load_tokenizer(BUNDLED).backend
    assert Formats.find(Settings(), ChatTemplates({"default": "{{ messages }}"}, {}), tokenizer) == Formats()
