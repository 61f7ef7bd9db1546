"""Rotary position embedding (Su et al., 2021) and its extensions to longer contexts."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from pagewire.shared.errors import ConfigurationError

SUPPORTED = ("default", "dynamic", "linear", "llama3", "yarn", "longrope", "proportional", "factors", "given")


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that turn positions into angles."""

    rope_type: str = "default"
    """One of `SUPPORTED`. dynamic is default up to max_position_embeddings, which no sequence exceeds."""
    rope_theta: float = 10000.0
    """Base of the wavelengths."""
    factor: float = 1.0
    """Ratio of the extended context to the trained one."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are scaled by the full factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor are not scaled."""
    beta_fast: float | None = None
    """yarn: dimensions with more turns than this over the original context are not scaled; None: 32."""
    beta_slow: float | None = None
    """yarn: dimensions with fewer turns than this are scaled by the full factor; None: 1."""
    attention_factor: float | None = None
    """yarn, longrope and given: multiplies sine and cosine; None: follows from the other parameters."""
    mscale: float | None = None
    """yarn: with mscale_all_dim, weight of ln(factor) in the numerator of the attention factor."""
    mscale_all_dim: float | None = None
    """yarn: with mscale, weight of ln(factor) in the denominator of the attention factor."""
    truncate: bool = True
    """yarn: whether the dimensions between which the blend runs are rounded outwards to integers."""
    original_max_position_embeddings: int | None = None
    """llama3, yarn and longrope: the trained context length, in positions."""
    factors: tuple[float, ...] = ()
    """factors: divisor of each pair's frequency. GGUF files store these instead of llama3's parameters."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each pair's frequency up to the trained context length."""
    frequencies: tuple[float, ...] = ()
    """given: radians per position of each pair."""
    partial_rotary_factor: float = 1.0
    """Share of each head that is rotated. With proportional, the other pairs have the frequency 0."""

    def __post_init__(self) -> None:
        if self.rope_type not in SUPPORTED:
            raise ValueError(f"rope type {self.rope_type} is not supported, only {', '.join(SUPPORTED)}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, not {self.partial_rotary_factor}")
        if self.rope_type not in ("default", "longrope") and self.factor < 1.0:
            raise ValueError(f"the rope factor must be at least 1, not {self.factor}")
        if not all(factor > 0 for factor in (*self.factors, *self.short_factor)):
            raise ValueError("all rope factors must be above 0")

    @property
    def max_length(self) -> int | None:
        """Context up to which a position is always rotated by the same angles; None: any.

        Beyond it, longrope rotates all positions of a sequence by other angles.
        """
        return self.original_max_position_embeddings if self.rope_type in ("longrope", "given") else None


def read_rope(
    parameters: dict[str, Any] | None, theta: float, max_position_embeddings: int, partial: float | None = 1.0
) -> Rope:
    """Returns the `Rope` of `rope_parameters` (transformers 5) or of `rope_scaling` with `rope_theta` (transformers 4).

    Args:
        parameters: see above; None: the default rope.
        theta: base of the wavelengths, unless `parameters` has it.
        max_position_embeddings: the model's context length.
        partial: 1: the family always rotates whole heads; None: as `parameters` say.

    Raises:
        ConfigurationError: the rope type is not supported, or a value has the wrong type.
    """
    if not isinstance(parameters, dict | None):
        raise ConfigurationError("config.json has rope parameters that are no object: fetch the model again")
    stated = {name: value for name, value in (parameters or {}).items() if value is not None}
    stated.setdefault("rope_type", stated.get("type", "default"))
    stated.setdefault("rope_theta", theta)
    if stated.get("partial_rotary_factor", 1) != partial == 1 and stated["rope_type"] != "proportional":
        raise ConfigurationError("config.json has a partial_rotary_factor, but this family rotates whole heads")
    original = stated.setdefault("original_max_position_embeddings", max_position_embeddings)
    stretched = stated["rope_type"] in ("yarn", "longrope")
    if stretched and "factor" not in stated and isinstance(original, int) and original > 0:
        stated["factor"] = max_position_embeddings / original
    try:
        return msgspec.convert(stated, Rope)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"config.json has rope parameters that cannot be used: {error}") from error


Rotate = Callable[[Tensor], Tensor]
"""Rotates the pairs (i, i + r/2) of the first r features of every head of x [T, H, d], which may be overwritten."""


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions of one step, for all layers that rotate alike.

    Attributes:
        rotated: number r of features of a head that are rotated.
    """

    def __init__(self, frequencies: Tensor, scale: float) -> None:
        """`frequencies` float32 [r / 2] in radians per position; `scale` multiplies sines and cosines."""
        super().__init__()
        self.scale, self.rotated = scale, 2 * len(frequencies)
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)

    def table(self, positions: Tensor) -> Tensor:
        """Returns a float32 table [T, r] for positions [T]: the cosines of all pairs, then their sines."""
        angles = positions[:, None].float() * self.frequencies
        return torch.cat((angles.cos(), angles.sin()), -1) * self.scale

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotate:
        """Returns the function that rotates heads of tokens at positions [T]."""
        cos, sin = self.table(positions)[:, None].to(dtype).chunk(2, dim=-1)
        return partial(_rotate, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def _rotate(cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((_rotate(cos, sin, x[..., :rotated]), x[..., rotated:]), -1)
    half = rotated // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), -1), sin)


def rotary_embedding(rope: Rope, head_dim: int) -> RotaryEmbedding:
    """Returns the rotation of heads of `head_dim` features.

    Raises:
        ConfigurationError: the number of factors is not that of the pairs, or it is no whole number of pairs.
    """
    return RotaryEmbedding(*_frequencies(rope, head_dim))


def _frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Returns radians per position, float32 [rotated / 2], and the factor of sine and cosine."""
    rotated = head_dim if rope.rope_type == "proportional" else int(head_dim * rope.partial_rotary_factor)
    if rotated % 2:
        raise ConfigurationError(f"heads of which {rotated} features are rotated do not consist of pairs")
    plain = 1.0 / rope.rope_theta ** (torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated)
    match rope.rope_type:
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, rotated), _yarn_scale(rope)
        case "longrope":
            return _divided(rope, rope.short_factor, plain), _longrope_scale(rope)
        case "proportional":
            plain[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
            return plain / rope.factor, 1.0
        case "given":
            return torch.tensor(rope.frequencies, dtype=torch.float32, device="cpu"), rope.attention_factor or 1.0
        case "factors":
            return _divided(rope, rope.factors, plain), 1.0
        case _:
            return plain, 1.0


def _divided(rope: Rope, factors: tuple[float, ...], plain: Tensor) -> Tensor:
    if len(factors) != len(plain):
        raise ConfigurationError(
            f"rope type {rope.rope_type} has {len(factors)} rope factors for heads of {len(plain)} pairs"
        )
    return plain / torch.tensor(factors, dtype=torch.float32, device="cpu")


def _longrope_scale(rope: Rope) -> float:
    """The factor of sine and cosine. Source: LongRoPE (Ding et al., 2024), as transformers derives it."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings or 0))


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Returns frequencies with long waves scaled, short ones kept, and a blend between. Source: code of Llama 3.1."""
    assert rope.original_max_position_embeddings is not None
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, keep.clamp(0, 1))


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Returns the same blend, linear in the dimension. Source: YaRN (Peng et al., 2023), "NTK by parts"."""
    assert rope.original_max_position_embeddings is not None

    def dimension(turns: float) -> float:
        """Returns the dimension that makes this number of turns over the original context."""
        length = rope.original_max_position_embeddings or 0
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast or 32.0), dimension(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (
        high - low if high != low else 0.001
    )
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def _yarn_scale(rope: Rope) -> float:
    """The factor of sine and cosine, as transformers derives it."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def weighted(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return weighted(rope.mscale) / weighted(rope.mscale_all_dim)
    return weighted(1.0)
