"""The settings with which the model that drafts is loaded, where it fits the one that it drafts for."""

import msgspec

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import folder_of, max_model_len, read_config, tokenizer_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import draft_model


def draft_settings(settings: Settings, length: int) -> Settings | None:
    """Returns the settings of the model that drafts for one with a context of `length` tokens; None: there is none.

    Raises:
        ConfigurationError: it is not there, or its tokenizer has other tokens.
    """
    small = draft_model(settings)
    if small is None:
        return None
    ids, own = (
        load_tokenizer(tokenizer_folder(each)).backend.get_vocab(with_added_tokens=True) for each in (small, settings)
    )
    if ids != own:
        raise ConfigurationError(
            f"the tokenizer of the draft model {small.model} has other tokens than the model's, such as "
            f"{_difference(ids, own)}: give a draft model with the same tokenizer"
        )
    own_length = max_model_len(small, read_config(folder_of(small)))
    return msgspec.structs.replace(small, max_model_len=min(own_length, length))


def _difference(ids: dict[str, int], own: dict[str, int]) -> str:
    """Returns, in words, a token that has other ids in two tokenizers."""
    token = min(token for token, id_ in ids.items() ^ own.items())
    return f"{token!r}, {ids.get(token, 'none')} instead of {own.get(token, 'none')}"
