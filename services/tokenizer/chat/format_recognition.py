"""Recognizes the formats in which a model writes tool calls and reasoning, from settings or from its chat templates."""

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
"""Formats of tool calls by a part of the template's source that only the format has."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of one model."""

    tool_calls: str = ""
    """Format of tool calls; empty: unknown."""
    reasoning: str = ""
    """Format of reasoning; empty: the model does not reason."""
    takes_tools: bool = False
    """Whether the template shows tools to the model."""
    auto: bool = True
    """Whether the model may choose to call a tool."""
    special: frozenset[str] = frozenset()
    """Tags of the formats that are special tokens, which texts usually leave out."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tags, or parts of tags, that are tokens of their own, special or not."""

    @classmethod
    def find(cls, settings: Settings, templates: ChatTemplates, tokenizer: Tokenizer) -> Self:
        """Returns the formats of a model."""
        tool_parser, reasoning_parser = settings.tool_call_parser, settings.reasoning_parser
        with_tools, plain = _source(templates, tools=True), _source(templates, tools=False)
        tool_calls = tool_format(with_tools) if tool_parser == "auto" else TOOL_PARSERS.get(tool_parser, "")
        from_template = reasoning_parser == "auto"
        reasoning = reasoning_format(plain) if from_template else REASONING_PARSERS.get(reasoning_parser, "")
        tags, added = _tags(tool_calls, reasoning), tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        return cls(
            tool_calls,
            reasoning,
            takes_tools="tools" in with_tools or tool_parser not in {"auto", "none"},
            auto=settings.enable_auto_tool_choice,
            special=frozenset(special.intersection(tags)),
            token_ids={token.content: i for i, token in added.items() if any(token.content in tag for tag in tags)},
        )

    def hides(self, form: ChatFormat) -> bool:
        """Returns whether texts without special tokens lack tags of a format."""
        return not self.special.isdisjoint(_tags(form.tool_calls, form.reasoning))


def tool_format(template: str) -> str:
    """Returns the format of tool calls that a chat template shows; empty: none that is known.

    >>> tool_format("<tool_call>{{ call.arguments }}</tool_call>")
    'hermes'
    """
    for part, name in SHOWN.items():
        if part in template:
            return name
    return "hermes" if "<tool_call>" in template and "arguments" in template else ""


def reasoning_format(template: str) -> str:
    """Returns the format of reasoning whose tags a chat template has; empty: none."""
    return next((name for name, tags in REASONING.items() if all(tag in template for tag in tags)), "")


def _source(templates: ChatTemplates, *, tools: bool) -> str:
    name = templates.choose(tools=tools)
    return "" if name is None else templates.named[name]


def _tags(tool_calls: str, reasoning: str) -> Set[str]:
    return {*TOOL_TAGS.get(tool_calls, ()), *TOOL_TAGS.get(reasoning, ()), *REASONING.get(reasoning, ())}
