"""A tokenizer with the special tokens and chat templates of its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that transformers gives every model."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """The tokenizer of one model."""

    backend: Tokenizer
    """The tokenizer itself, without truncation and padding, so that several threads can use it at once."""
    templates: dict[str, str]
    """Sources of chat templates by name; empty: the model has none."""
    special: dict[str, str]
    """Special tokens by name: first the names in `NAMED`, then the model's own names."""

    @classmethod
    def of(
        cls, backend: Tokenizer, template: object, named: dict[str, AddedToken], others: Iterable[AddedToken] = ()
    ) -> ModelTokenizer:
        """Returns a tokenizer that reads each special token as one token.

        Args:
            backend: tokenizer, to which missing special tokens are added, as `transformers` does it.
            template: a chat template, several in a list or by name; anything else: none.
            named: special tokens by name.
            others: further special tokens.

        Raises:
            KeyError, TypeError: `template` is a list of something else.
        """
        existing = {token.content for token in backend.get_added_tokens_decoder().values()}
        special = {token.content: token for token in (*named.values(), *others)}
        backend.add_tokens([token for content, token in special.items() if content not in existing])
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, _by_name(template), {name: token.content for name, token in named.items()})

    def to_transformers(self) -> PreTrainedTokenizerFast:
        """Returns the same tokenizer as an object of `transformers`, whose import takes half a second."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend, chat_template=self.templates or None, **self.special
        )


def _by_name(template: object) -> dict[str, str]:
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return dict(template) if isinstance(template, dict) else {}
