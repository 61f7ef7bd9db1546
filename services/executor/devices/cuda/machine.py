"""Checks a machine for what the device `cuda` needs beside the GPU."""

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from pagewire.kernels.gpu_arch import AMD_PARTS, AMD_STAND_IN, PARTS
from pagewire.shared.errors import ConfigurationError

DRIVERS = {"12": 525, "13": 580}
"""Oldest NVIDIA driver for each release of CUDA that PyTorch is built for."""


def check_machine() -> str:
    """Returns the GPU and the versions, in words.

    Raises:
        ConfigurationError: something is missing; the message says what to install.
    """
    release, rocm = torch.version.cuda, torch.version.hip
    if release is None and rocm is None:
        raise ConfigurationError(f"PyTorch {torch.__version__} is built without CUDA: install torch from PyPI")
    if not torch.cuda.is_available():
        if release is None:
            raise ConfigurationError(f"PyTorch for ROCm {rocm} finds no GPU: install AMD's driver, see docs/gpu.md")
        driver = DRIVERS.get(release.partition(".")[0], max(DRIVERS.values()))
        raise ConfigurationError(
            f"PyTorch for CUDA {release} finds no GPU: install NVIDIA's driver {driver} or newer, and give a container "
            "the GPU (compose.gpu.yaml)"
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigurationError("the kernels need Triton, and there is none: install torch from PyPI")
    if not any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        raise ConfigurationError("Triton compiles its launcher with a C compiler, and there is none: install gcc")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise ConfigurationError("Triton's launcher needs Python.h: install the development files of this Python")
    properties = torch.cuda.get_device_properties(0)
    name, memory = torch.cuda.get_device_name(), properties.total_memory
    if rocm is not None:
        part = properties.gcnArchName.partition(":")[0]
        if part not in AMD_PARTS:
            raise ConfigurationError(f"{name} is {part}: the kernels are compiled for {', '.join(AMD_PARTS)} alone")
        return f"{name}, {memory >> 30} GiB, {part}, ROCm {rocm}: no kernel has run on such a GPU so far"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < min(PARTS):
        raise ConfigurationError(f"{name} has compute capability {major}.{minor}, 8.0 is needed: take a newer GPU")
    return f"{name}, {memory >> 30} GiB, compute capability {major}.{minor}, CUDA {release}"


def capability() -> tuple[int, int]:
    """Returns the compute capability of the GPU. AMD's have that of the GPU whose forms they launch."""
    return divmod(AMD_STAND_IN, 10) if torch.version.hip else torch.cuda.get_device_capability()


if __name__ == "__main__":  # `shared/process/device_choice.py` runs the check in a process of its own
    try:
        print(check_machine())
    except ConfigurationError as problem:
        print(problem)
        sys.exit(1)
