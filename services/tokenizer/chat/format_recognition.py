"""Recognizes the formats in which a model writes tool calls and reasoning, from settings or from its chat templates."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Self

from tokenizers import Tokenizer

from pagewire.services.tokenizer.chat.template_probe import MessageRules
from pagewire.services.tokenizer.chat.templates import ChatTemplates
from pagewire.shared.chat.formats import HARMONY, REASONING, REASONING_PARSERS, TOOL_PARSERS, TOOL_TAGS, harmony
from pagewire.shared.messages.client import ChatFormat
from pagewire.shared.settings.config import Settings

SHOWN = {
    "[TOOL_CALLS]": "mistral",
    "<|tool_calls_section_begin|>": "kimi_k2",
    harmony.COMMENTARY: HARMONY,
    "<tool_call>\\n<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    '"name": function name, "parameters":': "llama3_json",
    "[func_name1(": "pythonic",
}
"""Formats of tool calls by a part of the template's source that only the format has."""
TEXT = "hermes"
"""Format of calls of tools that are texts of the prompt."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of one model."""

    tool_calls: str = ""
    """Format of tool calls; empty: unknown."""
    reasoning: str = ""
    """Format of reasoning; empty: the model does not reason."""
    takes_tools: bool = False
    """Whether the prompt shows tools to the model."""
    tools_as_text: bool = False
    """Whether tools, calls and results are texts of the prompt, because the template does not show tools, or not how
    the model calls them."""
    falls_back: bool = False
    """Whether `tools_as_text` may be."""
    short_ids: bool = False
    """Whether the template takes only ids of calls that have nine letters and digits."""
    auto: bool = True
    """Whether the model may choose to call a tool."""
    special: frozenset[str] = frozenset()
    """Tags of the formats that are special tokens, which texts usually leave out."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tags, or parts of tags, that are tokens of their own, special or not."""

    @classmethod
    def find(cls, settings: Settings, templates: ChatTemplates, tokenizer: Tokenizer) -> Self:
        """Returns the formats of a model, as far as they do not depend on `with_rules`."""
        tool_parser, reasoning_parser = settings.tool_call_parser, settings.reasoning_parser
        with_tools, plain = _source(templates, tools=True), _source(templates, tools=False)
        tool_calls = tool_format(with_tools) if tool_parser == "auto" else TOOL_PARSERS.get(tool_parser, "")
        from_template = reasoning_parser == "auto"
        reasoning = reasoning_format(plain) if from_template else REASONING_PARSERS.get(reasoning_parser, "")
        falls_back = tool_parser in {"auto", TEXT}
        tags, added = _tags(tool_calls, reasoning), tokenizer.get_added_tokens_decoder()
        if falls_back:
            tags |= _tags(TEXT, "")
        special = {token.content for token in added.values() if token.special}
        return cls(
            tool_calls,
            reasoning,
            takes_tools=tool_parser not in {"auto", "none"},
            falls_back=falls_back,
            auto=settings.enable_auto_tool_choice,
            special=frozenset(special.intersection(tags)),
            token_ids={token.content: i for i, token in added.items() if any(token.content in tag for tag in tags)},
        )

    def with_rules(self, rules: MessageRules) -> Self:
        """Returns the formats for the template of requests with tools, which has these rules."""
        as_text = self.falls_back and not (rules.shows_tools and self.tool_calls)
        return replace(
            self,
            tool_calls=TEXT if as_text else self.tool_calls,
            takes_tools=self.takes_tools or rules.shows_tools or as_text,
            tools_as_text=as_text,
            short_ids=rules.short_ids,
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
