"""`python -m pagewire.kernels.cpu` compiles the kernels in advance, for example when an image is built."""

import sys

import torch  # noqa: F401 - the library finds OpenMP in the process

from pagewire.kernels.cpu import build

try:
    build.load()
except build.NotBuilt as error:
    sys.exit(f"the CPU kernels cannot be built, so the executor will use plain PyTorch: {error}")
