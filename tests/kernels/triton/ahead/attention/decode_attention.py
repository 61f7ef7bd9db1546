"""The variants of `kernels/triton/attention/decode_attention.py` that devices launch."""

from pagewire.kernels.triton.attention.decode_attention import split_attention_kernel, tiling
from pagewire.kernels.triton.attention.join_splits import splits_at_a_time
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.gpus import parts_with
from tests.kernels.triton.ahead.known_layers import SHAPES, TENSORS


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch."""
    forms = []
    for shape in SHAPES:
        layer, cached = shape.layer, 1 if shape.cache.startswith("fp8") else shape.itemsize
        parts_of: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for part in parts_with(shape.cache):
            parts_of.setdefault(tuple(tiling(layer, shape.itemsize, cached, part).items()), []).append(part)
        for sizes, parts in parts_of.items():
            constants = {name: size for name, size in sizes if name.isupper()}
            joined = splits_at_a_time(layer.group, layer.value_head_size)
            integers = dict.fromkeys(("item_rows", "cu_splits", "split_size", "counters"), "i32")
            forms.append(
                Configuration(
                    name=f"{shape.name}, tiles of {constants['TILE']}",
                    kernel=split_attention_kernel,
                    tensors={**TENSORS, **shape.tensors, "partial": "fp32", "logsum": "fp32", **integers},
                    constants={**shape.constants, **constants, "JOINED": joined},
                    options={name: size for name, size in sizes if name.islower()},
                    spills=False,
                    parts=tuple(parts),
                )
            )
    return forms
