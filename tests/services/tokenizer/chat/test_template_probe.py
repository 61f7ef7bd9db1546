"""The rules of templates as their publishers ship them, and of small ones."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from pagewire.services.tokenizer.chat.chat_template import ChatTemplate
from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.template_probe import MessageRules
from tests.support.model_folders import TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ONE_SYSTEM = {"several_systems": False, "late_system": False}
NO_TOOLS = {"shows_tools": False, "shows_calls": False}
RULES: Mapping[str, dict[str, Any]] = {
    "Apertus-8B-Instruct": ONE_SYSTEM,
    "GLM-4.6": {},
    "HuggingFaceTB-SmolLM3-3B": ONE_SYSTEM | NO_TOOLS,
    "Kimi-K2-Thinking": {"shows_calls": False},
    "Qwen-QwQ-32B": {"no_content_beside_calls": False},
    "Qwen-Qwen2.5-7B-Instruct": {},
    "Qwen-Qwen3-0.6B": {"no_content_beside_calls": False},
    "Qwen3-Coder": {},
    "Qwen3.5-4B": ONE_SYSTEM | {"no_user": False},
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ONE_SYSTEM
    | {
        "shows_tools": False,
        "no_content_beside_calls": False,
        "null_beside_calls": True,
        "empty_beside_calls": False,
        "text_beside_calls": False,
        "reasoning_beside_text_and_calls": False,
        "arguments_as_text": True,
    },
    "deepseek-ai-DeepSeek-V3.1": {"shows_tools": False},
    "ibm-granite-granite-3.3-2B-Instruct": {"shows_calls": False},
    "microsoft-Phi-3.5-mini-instruct": NO_TOOLS,
    "mistralai-Mistral-Nemo-Instruct-2407": ONE_SYSTEM
    | {"repeated_turns": False, "assistant_first": False, "no_user": False, "short_ids": True}
    | {"system_beside_results": False},
    "openai-gpt-oss-120b": ONE_SYSTEM | {"reasoning_beside_text_and_calls": False, "parallel_calls": False},
    "openbmb-MiniCPM5-1B": {},
    "unsloth-mistral-Devstral-Small-2507": {"no_content_beside_calls": False, "single_part": ("system", "assistant")},
}
"""Rules that differ from the defaults, but `no_content`, which hardly any template takes."""


def rules(source: str) -> MessageRules:
    return ChatTemplate(chat_environment(), source, SPECIAL).probe()


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_a_publishers_template_has_the_known_rules(name: str) -> None:
    probed = rules((TEMPLATES / f"{name}.jinja").read_text())
    default = msgspec.structs.asdict(MessageRules())
    others = {key: value for key, value in msgspec.structs.asdict(probed).items() if value != default[key]}
    others.pop("no_content", None)
    assert others == RULES[name]


def test_a_template_that_takes_everything_has_the_default_rules() -> None:
    assert rules("{{ messages }} {{ tools }}") == MessageRules()


def test_a_template_that_takes_no_question_has_the_default_rules() -> None:
    assert rules("{{ raise_exception('no') }}") == MessageRules()


def test_an_id_of_a_call_that_the_model_writes_is_numbered() -> None:
    shown = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    template = shown + "{{ c.function.arguments }}{% endfor %}{% endfor %}{{ tools }}"
    assert rules(template).numbered_ids
    assert not rules(template.replace("c.id", "c.function.name")).numbered_ids


def test_a_template_for_tools_alone_is_probed_with_tools() -> None:
    probed = rules("{% for tool in tools %}{{ tool }}{% endfor %}{{ messages }}{{ messages[0].content }}")
    assert probed.shows_tools


def test_reasoning_is_found_under_the_key_that_shows_it() -> None:
    assert rules("{% for m in messages %}{{ m.content }}{{ m.reasoning }}{% endfor %}").reasoning
    assert not rules("{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}").reasoning
    assert not rules("{{ messages }}").reasoning
