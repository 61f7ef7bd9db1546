"""Finds the chat templates of a model."""

from dataclasses import dataclass
from pathlib import Path

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_tokenizer import ModelTokenizer

DEFAULT = "default"
"""Name of the only template of a model, or of the usual one of several."""
TOOL_USE = "tool_use"
"""Name of the template for requests with tools, in models with several."""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The templates of one model, and the special tokens that they may use."""

    named: dict[str, str]
    """Sources by name; empty: the model has no template."""
    special: dict[str, str]
    """Special tokens by name, such as `bos_token`."""

    def choose(self, *, tools: bool) -> str | None:
        """Returns the name of the template for a request, chosen as in `transformers`; None: there is none."""
        if tools and TOOL_USE in self.named:
            return TOOL_USE
        return DEFAULT if DEFAULT in self.named else None


def find_chat_template(tokenizer: ModelTokenizer, chosen: str = "") -> ChatTemplates:
    """Returns the templates of a loaded tokenizer, or the template of the setting `chat-template` instead.

    Args:
        chosen: a file, or the text of a template; empty: the model's own templates.

    Raises:
        ConfigurationError: `chosen` is neither a readable file nor a template.
    """
    return ChatTemplates({DEFAULT: _read(chosen)} if chosen else tokenizer.templates, tokenizer.special)


def _read(chosen: str) -> str:
    """Returns the text of a template from a file, or `chosen` itself if it has braces or line breaks."""
    if any(character in chosen for character in "{}\n"):
        return chosen
    try:
        return Path(chosen).expanduser().read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(
            f"the chat template {chosen} cannot be read ({reason}): give a file, or the text of a template"
        ) from error
