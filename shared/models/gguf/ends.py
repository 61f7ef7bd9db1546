"""The tokens of a GGUF model that end an answer, as llama.cpp finds them: most by their texts."""

from collections.abc import Mapping

from pagewire.shared.models.gguf.reader import GgufModel, Strings

TOKENS = "tokenizer.ggml.tokens"
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    )
)
"""Texts of tokens that end an answer: the metadata names one, but chat models have several."""
_FILL: Mapping[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Roles of tokens of code models that end an answer too, and their texts, unless the metadata names the token."""
_MESSAGE_END = "<|end|>"
_OTHER_ENDS = (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|calls|>", "<|flush|>"}))
"""Texts of tokens beside which `_MESSAGE_END` only ends a message, after which the answer goes on."""
_PLAIN_END = "</s>"
_BESIDE_PLAIN = frozenset({"<|tool_response>", "<|plamo:eos|>"})
"""Texts of tokens beside which `_PLAIN_END` is a word like any other."""


def eos_ids(model: GgufModel) -> frozenset[int]:
    """Returns the ids of the tokens that end a text: those that the metadata names, and those of known texts."""
    ids = _ids(model)
    return frozenset(ids[text] for text in ids.keys() & _ends(ids, model)) | (
        _named(model, "eos", "eot", "eom", *_FILL) - {ids[text] for text in _other_words(ids)}
    )


def misnamed_ends(model: GgufModel) -> frozenset[int]:
    """Returns the ids of the tokens that end a text by their own text, whatever type the metadata gives them."""
    ids = _ids(model)
    return frozenset(ids[text] for text in ids.keys() & _ends(ids, model))


def _ids(model: GgufModel) -> Mapping[str, int]:
    fill = {text for texts in _FILL.values() for text in texts}
    return model.positions(TOKENS, ENDS | fill | _BESIDE_PLAIN)


def _ends(ids: Mapping[str, int], model: GgufModel) -> set[str]:
    """Returns the texts that end an answer in a vocabulary that has the tokens `ids`."""
    fill = {text for role, texts in _FILL.items() if not _named(model, role) for text in texts}
    return (fill | ENDS) - _other_words(ids)


def _other_words(ids: Mapping[str, int]) -> set[str]:
    """Returns the texts of tokens that end no answer although they do so in other models."""
    words = {_MESSAGE_END} if any(others <= ids.keys() for others in _OTHER_ENDS) else set()
    return (words | ({_PLAIN_END} if _BESIDE_PLAIN & ids.keys() else set())) & ids.keys()


def _named(model: GgufModel, *roles: str) -> frozenset[int]:
    tokens = model.metadata.get(TOKENS)
    count = tokens.number if isinstance(tokens, Strings) else 0
    ids = (model.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in roles)
    return frozenset(id_ for id_ in ids if type(id_) is int and 0 <= id_ < count)
