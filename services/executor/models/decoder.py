"""The transformer of Llama and similar models: pre-RMSNorm, rotary attention, gated feed-forward."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pagewire.services.executor.models.config import Common, Positive
from pagewire.services.executor.models.layers import GatedMLP, PackedLinear, RMSNorm, embedding
from pagewire.services.executor.models.model import AttentionFn, CausalLM, ModelSpec
from pagewire.services.executor.models.rope import RotaryEmbedding, Rotate, read_rope


class DecoderConfig(Common, frozen=True, kw_only=True):
    """config.json of Llama. Subclasses override what differs in similar models."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is no multiple of num_attention_heads")
        if self.num_attention_heads % self.kv_heads:
            raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
        if self.head_size % 2:
            raise ValueError(f"heads of an odd size ({self.head_size}) cannot be rotated")

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; by default the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Dimension of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias. `attention_bias` applies to all four projections."""
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """Whether the heads of q and k are normalised before the rotation."""
        return False

    @property
    def windows(self) -> tuple[int, ...]:
        """Per layer, number of positions that a query sees, its own included; 0: all."""
        return (0,) * self.num_hidden_layers


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_size
        heads, kv_heads = config.num_attention_heads, config.kv_heads
        self.heads, self.kv_heads = heads, kv_heads
        sizes = {
            "q_proj": heads * self.head_dim,
            "k_proj": kv_heads * self.head_dim,
            "v_proj": kv_heads * self.head_dim,
        }
        self.qkv_proj = PackedLinear(config.hidden_size, sizes, config.qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotate: Rotate, attend: AttentionFn) -> Tensor:
        """[T, D] -> [T, D]."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        qk, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.heads]), self.k_norm(qk[:, self.heads :])), dim=1)
        q, k = torch.split(rotate(qk), [self.heads, self.kv_heads], dim=1)
        out: Tensor = self.o_proj(attend(self.layer, q, k, v).flatten(1))
        return out


class Layer(nn.Module):
    """One block of the transformer. What it adds to the residual is added by the norm behind it, in the same pass."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor, rotate: Rotate, attend: AttentionFn) -> tuple[Tensor, Tensor]:
        """Output `x` [T, D] of the previous layer and the `residual` [T, D] without it -> the same of this layer."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, rotate, attend), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """The stack of blocks between embedding and output."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rope = read_rope(
            config.rope_parameters or config.rope_scaling, config.rope_theta, config.max_position_embeddings
        )
        self.rotary = RotaryEmbedding(rope, config.head_size)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """[T], [T] -> [T, D]."""
        residual: Tensor = self.embed_tokens(token_ids)
        rotate = self.rotary(positions, residual.dtype)
        x = torch.zeros_like(residual)  # nothing comes before the first layer
        for layer in self.layers:
            x, residual = layer(x, residual, rotate, attend)
        out, _ = self.norm.add(x, residual)
        return out


class DecoderLM(CausalLM):
    """Llama, Mistral, Qwen2 or Qwen3, depending on the configuration."""

    def __init__(self, config: DecoderConfig) -> None:
        heads = config.num_attention_heads, config.kv_heads, config.head_size
        spec = ModelSpec.of_equal_heads(config.vocab_size, *heads, config.windows)
        super().__init__(spec, config.hidden_size, config.tie_word_embeddings)
        self.model = Decoder(config)

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """See `CausalLM.forward`."""
        out: Tensor = self.model(token_ids, positions, attend)
        return out
