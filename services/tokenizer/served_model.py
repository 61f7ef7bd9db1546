"""The served model as a tokenizer knows it: what its folder and the settings say."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from pagewire.services.tokenizer.adapters import ServedAdapters
from pagewire.services.tokenizer.chat.format_recognition import Formats
from pagewire.services.tokenizer.chat.template_probe import MessageRules
from pagewire.services.tokenizer.chat.templates import ChatTemplates, find_chat_template
from pagewire.services.tokenizer.encoder import Encoder
from pagewire.services.tokenizer.validation.generation_config import GenerationDefaults, generation_defaults
from pagewire.services.tokenizer.validation.grammar_checker import GrammarChecker
from pagewire.shared import subjects
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages.client import ModelInfo
from pagewire.shared.models import model_folder
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.settings.config import Settings


@dataclass(frozen=True, slots=True)
class Model:
    """One served model."""

    names: tuple[str, ...]
    """Names in requests: its own first, then aliases."""
    encoder: Encoder
    grammars: GrammarChecker
    chat: ChatTemplates
    formats: Formats
    """Formats of tool calls and reasoning."""
    generation: GenerationDefaults
    """Sampling defaults of its generation_config."""
    eos: frozenset[int]
    """Tokens that end a text."""
    max_model_len: int
    """Context length in tokens."""
    vocab_size: int
    """Number of token ids, which begin at 0."""
    longest_token: int
    """Number of characters of the longest token."""
    revision: str
    """Fingerprint of the model folder."""
    adapters: ServedAdapters
    """Adapters that change it."""

    @classmethod
    def load(cls, settings: Settings) -> Self:
        """Reads the model folder. Blocks, for as long as the files or a download take.

        Raises:
            ConfigurationError: the folder or a setting cannot be used.
        """
        path = model_folder.folder_of(settings)
        config = model_folder.read_config(path)
        tokenizer = load_tokenizer(model_folder.tokenizer_folder(settings))
        vocab_size: int = config.get("vocab_size", tokenizer.backend.get_vocab_size())
        chat = find_chat_template(tokenizer, settings.chat_template)
        eos = model_folder.eos_ids(path)
        own_defaults = model_folder.read_generation_config(path) if settings.generation_config == "auto" else {}
        return cls(
            names=tuple(model_folder.served_names(settings)),
            encoder=Encoder(tokenizer.backend),
            grammars=GrammarChecker(GrammarCompiler(lambda: tokenizer.backend, vocab_size, eos)),
            chat=chat,
            formats=Formats.find(settings, chat, tokenizer.backend),
            generation=generation_defaults(own_defaults, vocab_size),
            eos=eos,
            max_model_len=model_folder.max_model_len(settings, config),
            vocab_size=vocab_size,
            longest_token=max(map(len, tokenizer.backend.get_vocab()), default=1),
            revision=model_folder.revision(path),
            adapters=ServedAdapters(possible=settings.enable_lora),
        )

    def with_rules(self, rules: Mapping[str, MessageRules]) -> Self:
        """Returns the model with the formats that follow from the rules of its templates, by name."""
        template = self.chat.choose(tools=True) or ""
        return replace(self, formats=self.formats.with_rules(rules.get(template, MessageRules())))

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.names[0]

    @property
    def token(self) -> str:
        """The model's own name as a token of subjects."""
        return subjects.model_token(self.name)

    @property
    def tokens(self) -> frozenset[str]:
        """All names as tokens of subjects, without those of adapters."""
        return frozenset(map(subjects.model_token, self.names))

    def serves(self, token: str) -> bool:
        """Returns whether a token of subjects is a name of the model or of an adapter."""
        return token in self.tokens or self.adapters.find(token) is not None

    @property
    def infos(self) -> list[ModelInfo]:
        """Descriptions of the model and its adapters for clients, one per name."""
        own = [
            ModelInfo(
                name,
                f"{subjects.GENERATE}.{subjects.model_token(name)}",
                self.max_model_len,
                self.revision,
                root=self.name,
                adaptable=self.adapters.possible,
            )
            for name in self.names
        ]
        return [*own, *self.adapters.infos(own[0])]
