"""The tokenizer of a GGUF model: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`) or a mixture (`gemma4`)."""

from collections.abc import Sequence
from typing import Any

import structlog
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.ends import misnamed_ends
from pagewire.shared.models.gguf.reader import GgufModel
from pagewire.shared.models.gguf.splits import DEFAULT, GPT_2, SPLITS, Split
from pagewire.shared.models.model_tokenizer import ModelTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of `tokenizer.ggml.token_type`."""
SPACE = "\u2581"
"""SentencePiece's character for a space."""

_log = structlog.get_logger()


def load_tokenizer(model: GgufModel) -> ModelTokenizer:
    """Returns the tokenizer with special tokens and chat template.

    Raises:
        ConfigurationError: the kind is not supported, or the metadata is broken.
    """
    vocabulary = _Vocabulary(model)
    try:
        if vocabulary.kind == "gpt2":
            tokenizer = _byte_level(vocabulary)
        elif vocabulary.kind == "llama":
            tokenizer = _sentencepiece(vocabulary)
        elif vocabulary.kind == "gemma4":
            tokenizer = _spaced(vocabulary)
        else:
            raise ConfigurationError(
                f"{model.path} has a tokenizer of kind {vocabulary.kind}: only gpt2, gemma4 and llama can be read"
            )
        tokenizer.add_tokens(vocabulary.added())
        tokenizer.post_processor = _template(vocabulary)
        return ModelTokenizer.of(tokenizer, _templates(model), vocabulary.special())
    except ConfigurationError:
        raise
    except Exception as error:  # the Rust library raises bare Exceptions for merges of unknown tokens and the like
        raise ConfigurationError(f"the tokenizer in {model.path} is broken ({error}): fetch the model again") from error


def _templates(model: GgufModel) -> dict[str, str]:
    """Returns the chat templates by name."""
    key = "tokenizer.chat_template"
    names = {name: name.removeprefix(f"{key}.") for name in model.metadata if name.startswith(f"{key}.")}
    templates = {key: "default"} | names
    return {name: text for place, name in templates.items() if isinstance(text := model.metadata.get(place), str)}


class _Vocabulary:
    """The tokens of a model, as its metadata has them."""

    def __init__(self, model: GgufModel) -> None:
        self._path, self._metadata = model.path, model.metadata
        self.kind: Any = self.find("model")
        self.pre: Any = self.find("pre")
        self.tokens = model.strings("tokenizer.ggml.tokens")
        self.merges = [_pair(merge) for merge in model.strings("tokenizer.ggml.merges")]
        self.types: list[int] = self._list("token_type", NORMAL)
        for id_ in misnamed_ends(model):
            self.types[id_] = CONTROL
        self.scores: Sequence[float] = self._list("scores", 0.0)
        self.sentencepiece = self.kind == "llama"
        if not self.tokens:
            raise ConfigurationError(f"{self._path} has no tokenizer: give a file with one")

    @property
    def split(self) -> Split:
        """The pre-tokenizer of a byte-level BPE.

        Raises:
            ConfigurationError: it is not supported.
        """
        if self.pre is None or self.pre == "default":
            _log.warning("pre_tokenizer_missing", file=str(self._path), used="that of llama.cpp for such files")
            return DEFAULT
        if self.pre not in SPLITS:
            supported = ", ".join(sorted(SPLITS))
            raise ConfigurationError(f"the pre-tokenizer {self.pre} is not supported; these are: {supported}")
        return SPLITS[self.pre]

    def find(self, key: str) -> Any:
        """Returns a value of the metadata, or None if it is missing."""
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean of the metadata."""
        value = self.find(key)
        return value if isinstance(value, bool) else default

    def id_of(self, role: str) -> int | None:
        """Returns the id of a special token. SentencePiece models have default ids for the first three."""
        usual = {"unknown": 0, "bos": 1, "eos": 2}.get(role) if self.sentencepiece else None
        value = self.find(f"{role}_token_id")
        value = usual if value is None else value
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def special(self) -> dict[str, AddedToken]:
        """Returns the special tokens by transformers' names."""
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self.id_of(role) for name, role in roles.items()}
        return {name: AddedToken(self.tokens[id_], special=True) for name, id_ in ids.items() if id_ is not None}

    def ids(self) -> dict[str, int]:
        """Returns the id of each token."""
        return {token: id_ for id_, token in enumerate(self.tokens)}

    def added(self) -> list[AddedToken]:
        """Returns the tokens that are split off a text first: control tokens and user-defined tokens."""
        kinds = {CONTROL: True, USER_DEFINED: False} | ({UNKNOWN: True} if self.sentencepiece else {})
        return [
            AddedToken(token, special=kinds[kind], normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in kinds and token
        ]

    def _list(self, key: str, default: float) -> Any:
        """Returns a list of numbers, one per token."""
        value = self.find(key)
        if value is None:
            return [default] * len(self.tokens)
        numbers = value.tolist() if hasattr(value, "tolist") else []
        if len(numbers) != len(self.tokens):
            raise ConfigurationError(
                f"{self._path} has {len(numbers)} {key} for {len(self.tokens)} tokens: fetch it again"
            )
        return numbers


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    split = vocabulary.split
    model = BPE(vocab=vocabulary.ids(), merges=vocabulary.merges, ignore_merges=split.whole_words)
    tokenizer = Tokenizer(model)
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    plain = split.expressions[-1] == GPT_2  # then one step does both, faster
    expressions = split.expressions[:-1] if plain else split.expressions
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=plain)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last]) if cuts else last
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spaced(vocabulary: _Vocabulary) -> Tokenizer:
    """Returns the tokenizer of Gemma 4: a BPE with merges over a text whose spaces are SentencePiece's."""
    unknown = vocabulary.id_of("unknown")
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary.ids(),
            merges=vocabulary.merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.id_of("unknown")
    model = BPE(
        vocab=vocabulary.ids(),
        merges=vocabulary.merges or _merges(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Returns the merges that the scores imply: SentencePiece merges the pair whose token has the highest score."""
    ids = {token: id_ for token, id_ in vocabulary.ids().items() if vocabulary.types[id_] == NORMAL}
    merges: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, id_ in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-vocabulary.scores[id_], id_, left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(merges)]


def _pair(merge: str) -> tuple[str, str]:
    """Returns both sides of a merge, which are separated by a space. The left side may begin with a space itself."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _template(vocabulary: _Vocabulary) -> processors.TemplateProcessing:
    """Returns the template that adds `bos` and `eos` to a prompt."""
    begins = vocabulary.kind != "gpt2" or vocabulary.split.begins
    sides = {"bos": vocabulary.flag("add_bos_token", begins), "eos": vocabulary.flag("add_eos_token", False)}
    ids = {role: vocabulary.id_of(role) for role, is_added in sides.items() if is_added}
    used = {role: (vocabulary.tokens[id_], id_) for role, id_ in ids.items() if id_ is not None}
    parts = [used["bos"][0] if "bos" in used else "", "$A", used["eos"][0] if "eos" in used else ""]
    return processors.TemplateProcessing(single=[part for part in parts if part], special_tokens=list(used.values()))
