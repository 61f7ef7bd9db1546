"""How the pre-tokenizers of GGUF files split a text into words, by the names that `tokenizer.ggml.pre` has for them.

Source: the published tokenizer.json files, and the list of names of llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A pre-tokenizer of a byte-level BPE."""

    expressions: tuple[str, ...]
    """Each match is a word, first of the whole text, then of each word that the expression before has made."""
    whole_words: bool = False
    """Whether a word that is a token is not made by merges."""
    begins: bool = False
    """Whether every text begins with `bos`, unless the file says otherwise."""
    composed: bool = False
    """Whether the text is brought into Unicode's form NFC before."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's expression, which the step that makes bytes of words has, too."""
_LLAMA_3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN_2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN_35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HEAD = r"[^\r\n\p{L}\p{N}]?"


def _by_case(ending: str, digits: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Returns the expression that begins a word at an upper-case letter behind a lower-case one."""
    words = rf"{_HEAD}[{upper}]*[{lower}]+{ending}|{_HEAD}[{upper}]+[{lower}]*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_TEKKEN = _by_case("", r"\p{N}")
_GPT_4O = _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_HAN = r"&&[^\p{Han}]"
_KIMI = r"\p{Han}+|" + _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", _UPPER + _HAN, _LOWER + _HAN)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
_EAST_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with upper and lower case, as deepseek-llm lists them."""
_DIGITS = (r"\p{N}", GPT_2)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")
_AFMOE = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

DEFAULT = Split(_DEFAULT)
"""The pre-tokenizer of a file that names none, as in llama.cpp."""

_NAMES: Mapping[str, Split] = {
    "default": DEFAULT,
    "gpt-2 phi-2 mpt olmo jais jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert jina-v1-en "
    "jina-v2-code roberta-bpe exaone4 trillion granite-docling": Split((GPT_2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Split(_DIGITS),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Split(
        (_LLAMA_3,), whole_words=True, begins=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Split((_LLAMA_3,)),
    "glm4 glm5": Split((_LLAMA_3,), whole_words=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": Split((_QWEN_2,), composed=True),
    "stablelm2 hunyuan solar-open grok-2": Split((_QWEN_2,)),
    "qwen35": Split((_QWEN_35,)),
    "ufakzeka": Split((_QWEN_2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "laguna": Split((r"[^\n]+|[\n]+", _QWEN_2)),
    "minicpm5": Split((r"\p{N}{1,3}", _LLAMA_3.replace("{1,3}", "+")), whole_words=True),
    "seed-coder": Split((_QWEN_2.replace(_SIGNS, r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": Split((_QWEN_2.replace(_SPACES, r"\s*[\r\n]|\s+(?!\S)|\s+"),)),
    "exaone-moe": Split(
        (
            rf"{_CONTRACTIONS}|{_HEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": Split((_TEKKEN,), whole_words=True, begins=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split((_GPT_4O,)),
    "tiny_aya cohere2moe": Split((_THREES, _GPT_4O)),
    "kimi-k2": Split((_KIMI,)),
    "youtu": Split((_YOUTU, _by_case(f"{_CONTRACTIONS}?", r"\p{N}")), whole_words=True),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split((r"\p{N}{1,3}", _EAST_ASIAN, _DEEPSEEK_3)),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]")),
    "bloom gpt3-finnish poro-chat": Split((_BLOOM,)),
    "viking": Split((_BLOOM, r"\p{N}")),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "afmoe": Split((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE, _DEEPSEEK_3)),
}
SPLITS: Mapping[str, Split] = {name: split for names, split in _NAMES.items() for name in names.split()}
"""By `tokenizer.ggml.pre`."""
