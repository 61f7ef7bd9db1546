"""Finds the chat templates of a model."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from pagewire.shared.errors import ConfigurationError

DEFAULT = "default"
TOOL_USE = "tool_use"
"""Names under which a model may have several templates: the second is for requests with tools."""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The templates of one model, and what they may say of its tokens."""

    named: dict[str, str]
    """Sources by name; empty: the model has none."""
    special: dict[str, str]
    """Special tokens by their names, such as `bos_token`."""

    def choose(self, *, tools: bool) -> str | None:
        """The name of the template for a request, as `transformers` chooses; None: there is none for it."""
        if tools and TOOL_USE in self.named:
            return TOOL_USE
        return DEFAULT if DEFAULT in self.named else None


def find_chat_template(tokenizer: PreTrainedTokenizerFast, chosen: str = "") -> ChatTemplates:
    """The templates of a loaded tokenizer, or the one that the setting `chat-template` has chosen instead.

    `transformers` has read chat_template.jinja, additional_chat_templates and tokenizer_config.json; a tokenizer from
    another source brings its template as `chat_template` too, a text or texts by name.

    Args:
        chosen: a file, or the text of a template; empty: the model's own.

    Raises:
        ConfigurationError: `chosen` is neither.
    """
    own = _read(chosen) if chosen else tokenizer.chat_template or {}
    named = {DEFAULT: own} if isinstance(own, str) else dict(own)
    return ChatTemplates(named, dict(tokenizer.special_tokens_map))


def _read(chosen: str) -> str:
    """The text of a template that is given as a file or as it is: then it has braces or line breaks."""
    if any(character in chosen for character in "{}\n"):
        return chosen
    try:
        return Path(chosen).expanduser().read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(
            f"the chat template {chosen} cannot be read ({reason}): give a file, or the text of a template"
        ) from error
