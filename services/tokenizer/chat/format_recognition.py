"""The formats in which a model writes tool calls and reasoning, as settings say or as its chat templates show."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Self

from tokenizers import Tokenizer

from pagewire.services.tokenizer.chat.templates import ChatTemplates
from pagewire.shared.chat.formats import HARMONY, REASONING, REASONING_PARSERS, TOOL_PARSERS, TOOL_TAGS
from pagewire.shared.messages.client import ChatFormat
from pagewire.shared.settings.config import Settings

SHOWN = {
    "[TOOL_CALLS]": "mistral",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|channel|>commentary": HARMONY,
    "<tool_call>\\n<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    '"name": function name, "parameters":': "llama3_json",
    "[func_name1(": "pythonic",
}
"""Formats by what only a template of theirs has, as its source shows it."""


@dataclass(frozen=True, slots=True)
class Formats:
    """What is known of a model."""

    tool_calls: str = ""
    """Format of its calls; empty: unknown."""
    reasoning: str = ""
    """Format of its reasoning; empty: none."""
    takes_tools: bool = False
    """Whether its template shows tools to the model."""
    auto: bool = True
    """Whether the model may choose to call a tool."""
    special: frozenset[str] = frozenset()
    """Tags of these formats that are special tokens, which a text has only if it is asked for them."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the parts of these tags that are tokens of their own, special or not."""

    @classmethod
    def find(cls, settings: Settings, templates: ChatTemplates, tokenizer: Tokenizer) -> Self:
        """Returns the formats of a model."""
        shown = _source(templates, tools=True)
        named = settings.tool_call_parser
        tool_calls = tool_format(shown) if named == "auto" else TOOL_PARSERS.get(named, "")
        asked = settings.reasoning_parser
        plain = _source(templates, tools=False)
        reasoning = reasoning_format(plain) if asked == "auto" else REASONING_PARSERS.get(asked, "")
        tags, added = _tags(tool_calls, reasoning), tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        return cls(
            tool_calls,
            reasoning,
            takes_tools="tools" in shown or named not in {"auto", "none"},
            auto=settings.enable_auto_tool_choice,
            special=frozenset(special.intersection(tags)),
            token_ids={token.content: i for i, token in added.items() if any(token.content in tag for tag in tags)},
        )

    def hides(self, form: ChatFormat) -> bool:
        """Returns whether tags of a format are missing in texts without special tokens."""
        return not self.special.isdisjoint(_tags(form.tool_calls, form.reasoning))


def tool_format(template: str) -> str:
    """Returns the format of calls that a chat template shows; empty if it shows none that is known."""
    for part, name in SHOWN.items():
        if part in template:
            return name
    return "hermes" if "<tool_call>" in template and "arguments" in template else ""


def reasoning_format(template: str) -> str:
    """Returns the format of reasoning whose tags a chat template has; empty if it has none of them."""
    return next((name for name, tags in REASONING.items() if all(tag in template for tag in tags)), "")


def _source(templates: ChatTemplates, *, tools: bool) -> str:
    name = templates.choose(tools=tools)
    return "" if name is None else templates.named[name]


def _tags(tool_calls: str, reasoning: str) -> Set[str]:
    return {*TOOL_TAGS.get(tool_calls, ()), *TOOL_TAGS.get(reasoning, ()), *REASONING.get(reasoning, ())}
