"""The page of parallelism names everything that is cut."""

from pagewire.services.executor.models.quantized.formats import FORMATS
from tools.parallel_reference import QUANTIZED, tables


def test_every_format_of_weights_is_there() -> None:
    assert FORMATS.keys() < QUANTIZED.keys()


def test_parts_are_smaller_where_parameters_are_cut() -> None:
    lines = "\n".join(tables())
    assert "| `lm_head.weight` | 128256 × 4096 | 64128 × 4096 | 42752 × 4096 | 8016 × 4096 |" in lines
    assert "| `model.layers.N.self_attn.qkv.weight` | 6144 × 4096 | 3072 × 4096 |" in lines
    assert "experts.down` with `--enable-expert-parallel` | 60 × 4096 × 1408 | 30 × 4096 × 1408 |" in lines
    assert "| `model.norm.weight` | 4096 | 4096 | 4096 | 4096 |" in lines
