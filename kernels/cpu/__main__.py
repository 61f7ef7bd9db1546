"""`python -m pagewire.kernels.cpu` compiles the kernels ahead of the first start, which would do it otherwise."""

import sys

import torch  # noqa: F401 - the library finds OpenMP in the process

from pagewire.kernels.cpu import build

try:
    build.load()
except build.NotBuilt as error:
    sys.exit(f"the CPU kernels are not built, plain PyTorch serves instead: {error}")
