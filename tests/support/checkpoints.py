"""Tiny checkpoints of every family with random weights and a real tokenizer, and what transformers says of them.

A checkpoint is written once per machine, into the temporary folder, and is the same in every process and run.
"""

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

transformers.utils.logging.disable_progress_bar()

VOCABULARY = 512
EOS = "<|end|>"
CONTEXT = 256
WINDOW = 24
"""Positions that sliding layers see: fewer than the texts of the tests have."""

_TEXT = """The morning train left the small station by the river a few minutes late, as it did on most days, and nobody
minded. An old woman with a basket of apples sat beside the window and watched the fields go by. Two children counted
bridges: one, two, three, and then a long tunnel in which they whispered. The conductor came through the carriage,
looked at every ticket, and told them that the next stop was the market town, where the fair had opened on Friday.
There would be music, he said, and horses, and a man who could balance eleven plates on his nose. When the train came
out of the hill the light was so bright that everyone laughed. Questions were asked; answers were given. "How far is
the sea?" asked the younger child. "Twenty miles," said the woman, "and then it never ends." She gave each of them an
apple, kept one for herself, and began to tell a story about a lighthouse keeper, his daughter, and the winter when
the whole harbour was frozen from the first of December until the end of March."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
_GATED: dict[str, Any] = _SHAPE | {"num_key_value_heads": 2, "intermediate_size": 96, "initializer_range": 0.25}
_OPT: dict[str, Any] = _SHAPE | {"ffn_dim": 96, "init_std": 0.25}
_NEOX: dict[str, Any] = _SHAPE | {"intermediate_size": 96, "initializer_range": 0.25}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.25}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS: dict[str, Any] = {
    "llama": lambda **common: LlamaConfig(**_GATED, **common),
    "llama-tied": lambda **common: LlamaConfig(**_GATED, **common, tie_word_embeddings=True),
    "llama-biased": lambda **common: LlamaConfig(**_GATED, **common, attention_bias=True, mlp_bias=True, head_dim=32),
    "llama-linear": lambda **common: LlamaConfig(
        **_GATED, **common, rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    ),
    "llama-llama3": lambda **common: LlamaConfig(**_GATED, **common, rope_parameters=LLAMA3),
    "llama-yarn": lambda **common: LlamaConfig(**_GATED, **common, rope_parameters=YARN),
    "llama-yarn-mscale": lambda **common: LlamaConfig(
        **_GATED, **common, rope_parameters=YARN | {"truncate": False, "mscale": 1.5, "mscale_all_dim": 0.5}
    ),
    "llama-sharded": lambda **common: LlamaConfig(**_GATED, **common),
    "mistral": lambda **common: MistralConfig(**_GATED, **common, sliding_window=WINDOW),
    "qwen2": lambda **common: Qwen2Config(**_GATED, **common),
    "qwen2-sliding": lambda **common: Qwen2Config(
        **_GATED, **common, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen2-yarn": lambda **common: Qwen2Config(
        **_GATED | {"max_position_embeddings": 64}, **common, rope_parameters=YARN
    ),
    "qwen3": lambda **common: Qwen3Config(**_GATED, **common, head_dim=32, tie_word_embeddings=True),
    "gemma": lambda **common: GemmaConfig(**_GATED, **common, head_dim=16),
    "gemma2": lambda **common: Gemma2Config(
        **_GATED, **common, head_dim=24, query_pre_attn_scalar=20, sliding_window=WINDOW, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda **common: Gemma3TextConfig(
        **_GATED, **common, head_dim=16, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda **common: Phi3Config(
        **_GATED,
        **common,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "phi3-longrope": lambda **common: Phi3Config(
        **_GATED,
        **common,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
            "long_factor": [4.0] * 8,
        },
    ),
    "smollm3": lambda **common: SmolLM3Config(**_GATED, **common, no_rope_layers=[1, 0]),
    "olmo2": lambda **common: Olmo2Config(**_GATED, **common),
    "olmo3": lambda **common: Olmo3Config(
        **_GATED, **common, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixtral": lambda **common: MixtralConfig(**_GATED, **common, num_local_experts=4),
    "qwen2-moe": lambda **common: Qwen2MoeConfig(**_GATED, **common, **_EXPERTS, shared_expert_intermediate_size=48),
    "qwen3-moe": lambda **common: Qwen3MoeConfig(
        **_GATED, **common, **_EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "olmoe": lambda **common: OlmoeConfig(**_GATED, **common, num_experts=8, num_experts_per_tok=2),
    "gpt2": lambda **common: GPT2Config(**_GPT2, **common),
    "gpt-neox": lambda **common: GPTNeoXConfig(**_NEOX, **common, rotary_pct=0.5),
    "gpt-neox-serial": lambda **common: GPTNeoXConfig(**_NEOX, **common, use_parallel_residual=False),
    "opt": lambda **common: OPTConfig(**_OPT, **common),
    "opt-post-norm": lambda **common: OPTConfig(**_OPT, **common, do_layer_norm_before=False, word_embed_proj_dim=48),
}
"""Name of a checkpoint of a native family, to the configuration of its model."""

OTHERS: dict[str, Any] = {
    "gpt-oss": lambda **common: GptOssConfig(
        **_GATED, **common, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "granite": lambda **common: GraniteConfig(
        **_GATED, **common, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.2
    ),
}
"""Checkpoints of families that transformers builds, by name."""


class Reference(NamedTuple):
    """The result of greedy decoding in float32 by transformers."""

    tokens: list[int]
    """The generated ids."""
    gap: float
    """Least distance between the best and the second best logit: below 1e-4 rounding may decide."""


@functools.cache
def checkpoint(name: str) -> Path:
    """The folder of a checkpoint of `CONFIGS` or `OTHERS`, in Hugging Face format. Do not write to it: copy it."""
    version = hashlib.sha256(Path(__file__).read_bytes() + transformers.__version__.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"pagewire-checkpoints-{os.getuid()}-{version}" / name
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        _write(name, draft)
        try:
            draft.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(draft)
    return folder


@functools.cache
def reference_model(folder: Path) -> Any:
    """The checkpoint as a transformers model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] of every position, in float32."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(folder)(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits


def reference(folder: Path, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> Reference:
    """Greedy decoding, each step computed from the beginning. The end token is part of the result."""
    eos = reference_model(folder).config.eos_token_id
    ids, gap = list(prompt_ids), float("inf")
    while len(ids) < len(prompt_ids) + max_new_tokens:
        best = reference_logits(folder, ids)[-1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        if ids[-1] == eos and not ignore_eos:
            break
    return Reference(ids[len(prompt_ids) :], gap)


def _write(name: str, folder: Path) -> None:
    words = tokenizer()
    eos = words.eos_token_id
    ids = {"vocab_size": VOCABULARY, "eos_token_id": eos, "bos_token_id": eos, "pad_token_id": None}
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config((CONFIGS | OTHERS)[name](**ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start as zeros and norms as ones: nothing would notice if they were lost
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder, max_shard_size="100KB" if name.endswith("sharded") else "50GB")
    words.save_pretrained(folder)
    folder.chmod(0o755)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` ids: every text has ids, every id has a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT], trainer)
    assert bpe.get_vocab_size() == VOCABULARY
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, bos_token=EOS)
