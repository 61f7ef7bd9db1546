"""The description of a kernel for ahead-of-time compilation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.kernels.gpu_arch import PARTS, has_dependent_launch, options_of_amd
from pagewire.kernels.triton.jit import Kernel
from tests.kernels.triton.ahead.gpus import Gpu, part_of


@dataclass(frozen=True, slots=True)
class Configuration:
    """A compiled variant of a kernel, as launched for models of a certain shape."""

    name: str
    """Purpose of the variant, shown in the table of `tests.kernels.triton.ahead.compile`."""
    kernel: Kernel
    """The Triton function."""
    tensors: Mapping[str, str]
    """Element type of each tensor parameter by Triton's names, such as bf16 or i32."""
    constants: Mapping[str, object]
    """Value of each `tl.constexpr` parameter; an absent optional tensor is the constant None."""
    options: Mapping[str, int] = field(default_factory=dict)
    """`num_warps`, `num_stages` and `maxnreg`, where they differ from Triton's defaults."""
    spills: bool = True
    """Whether spilled registers are allowed; false for attention and sampling."""
    parts: tuple[int, ...] = PARTS
    """The GPUs, by their numbers in `PARTS`, that launch the variant."""

    def on(self, gpu: Gpu) -> "Configuration":
        """Returns the variant as a GPU launches it: see `pagewire.kernels.triton.dependent_launch`.

        AMD's compiler knows no limit of registers and no instructions of NVIDIA's.
        """
        kernel: Any = self.kernel
        constants, options = dict(self.constants), dict(self.options)
        if "PDL" in kernel.arg_names:
            constants["PDL"] = options["launch_pdl"] = has_dependent_launch(part_of(gpu))
        if isinstance(gpu, str):
            attends = {"TILE", "PADDED"} <= constants.keys()
            if attends or "num_stages" in options:
                tile: dict[str, Any] = {"TILE": constants["TILE"]} if attends else {}
                options = options_of_amd(tile | options, gpu)
                if attends:
                    constants["TILE"] = options.pop("TILE")
            options = {name: value for name, value in options.items() if name not in {"maxnreg", "launch_pdl"}}
            if isinstance(asm := constants.get("ASM"), tuple):
                constants["ASM"] = ("",) * len(asm)
        return replace(self, constants=constants, options=options)
