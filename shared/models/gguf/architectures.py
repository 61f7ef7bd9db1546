"""The architectures of GGUF files that can be served, and how each becomes a config.json.

Every one gets the fields of `config.common_fields`; here is what its family names otherwise or has besides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.shared.models.gguf import family_fields as fields
from pagewire.shared.models.gguf.keys import Keys

Fields = Callable[[Keys], dict[str, Any]]


def _no_fields(_keys: Keys) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A `general.architecture` of GGUF files."""

    model_type: str
    """The family's name in transformers."""
    name: str
    """The class in transformers, as config.json names it."""
    fields: Fields = _no_fields
    """Returns the family's own fields of config.json, which replace the common ones of the same name."""
    interleaved: bool = False
    """Whether the rows of each query and key head are in the order of ggml's rotary embedding, which rotates pairs
    (2i, 2i + 1), while Hugging Face rotates pairs (i, i + d/2)."""
    varying: tuple[str, ...] = ()
    """Keys that may have another number in each layer, which `fields` reads."""


_LLAMA = Architecture("llama", "LlamaForCausalLM", fields.llama, interleaved=True)
_GRANITE = Architecture("granite", "GraniteForCausalLM", fields.granite, interleaved=True)
_QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM")
_QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM")
_QWEN3_MOE = Architecture("qwen3_moe", "Qwen3MoeForCausalLM", fields.qwen3_moe)

_BY_LAYER = ("attention.head_count_kv", "feed_forward_length")

ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture("afmoe", "AfmoeForCausalLM", fields.afmoe),
    "apertus": Architecture("apertus", "ApertusForCausalLM"),
    "arcee": Architecture("arcee", "ArceeForCausalLM", interleaved=True),
    "baichuan": Architecture("llama", "LlamaForCausalLM", fields.baichuan, interleaved=True),
    "chatglm": Architecture("glm", "GlmForCausalLM"),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", fields.cohere2),
    "command-r": Architecture("cohere", "CohereForCausalLM", fields.cohere),
    "deepseek2": Architecture("deepseek_v3", "DeepseekV3ForCausalLM", fields.deepseek2),
    "dots1": Architecture("dots1", "Dots1ForCausalLM"),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", fields.ernie),
    "ernie4_5-moe": Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", fields.ernie),
    "exaone": Architecture("exaone", "ExaoneForCausalLM"),
    "exaone-moe": Architecture("exaone_moe", "ExaoneMoeForCausalLM", fields.exaone_moe),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", fields.exaone4),
    "gemma": Architecture("gemma", "GemmaForCausalLM"),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", fields.gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", fields.gemma3),
    "gemma3n": Architecture("gemma3n_text", "Gemma3nForCausalLM", fields.gemma3n),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", fields.gemma4, varying=_BY_LAYER),
    "glm4": Architecture("glm4", "Glm4ForCausalLM"),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", fields.glm4_moe),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", fields.gpt_oss),
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", fields.gpt2),
    "gptneox": Architecture("gpt_neox", "GPTNeoXForCausalLM", fields.gpt_neox),
    "granite": _GRANITE,
    "granitemoe": Architecture("granitemoe", "GraniteMoeForCausalLM", fields.granite, interleaved=True),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    "internlm2": _LLAMA,
    "jais2": Architecture("jais2", "Jais2ForCausalLM"),
    "llama": _LLAMA,
    "llama4": Architecture("llama4_text", "Llama4ForCausalLM", fields.llama4),
    "maincoder": _QWEN3,
    "minicpm": _GRANITE,
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", fields.minicpm3),
    "minimax-m2": Architecture("minimax_m2", "MiniMaxM2ForCausalLM", fields.minimax_m2),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", fields.mistral3, interleaved=True),
    "nemotron": Architecture("nemotron", "NemotronForCausalLM"),
    "olmo": Architecture("olmo", "OlmoForCausalLM", fields.olmo, interleaved=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", fields.olmo2),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM"),
    "pangu-embedded": Architecture("llama", "LlamaForCausalLM"),
    "phi2": Architecture("phi", "PhiForCausalLM"),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", fields.phi3),
    "phimoe": Architecture("phimoe", "PhimoeForCausalLM", fields.phimoe),
    "qwen": _QWEN2,
    "qwen2": _QWEN2,
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", fields.qwen2_moe),
    "qwen2vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3moe": _QWEN3_MOE,
    "qwen3vl": _QWEN3,
    "qwen3vlmoe": _QWEN3_MOE,
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", fields.seed_oss),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", fields.smollm3, interleaved=True),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", fields.stablelm),
    "starcoder": Architecture("gpt_bigcode", "GPTBigCodeForCausalLM", fields.gpt2),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", fields.starcoder2),
    "xverse": _LLAMA,
}
"""By `general.architecture`. Mistral's and Mixtral's models are published as `llama`."""

_REASONS: Mapping[str, str] = {
    "its layers keep other state than keys and values": """
        arwkv7 falcon-h1 granitehybrid jamba kimi-linear lfm2 lfm2moe mamba mamba2 nemotron_h nemotron_h_moe plamo2
        qwen35 qwen35moe qwen3next rwkv6 rwkv6qwen2 rwkv7""",
    "it generates no text": """
        bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
        nomic-bert-moe t5encoder wavtokenizer-dec""",
    "it has an encoder": "t5",
    "it generates text by diffusion": "dream llada llada-moe rnd1",
    "its scores depend on distance by a bias": "bloom jais mpt refact",
    "it chooses the keys to attend to": "glm-dsa",
}


def reason(architecture: str) -> str:
    """Returns why an architecture that is not in `ARCHITECTURES` is refused.

    >>> reason("mamba")
    'its layers keep other state than keys and values'
    """
    known = (why for why, names in _REASONS.items() if architecture in names.split())
    return next(known, "neither Pagewire nor transformers has layers of its kind that can be served")
