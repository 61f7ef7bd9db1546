"""Compiles the CPU kernels in advance: for this machine, or for an image, which runs on many."""

import argparse
import sys

import torch  # noqa: F401 - the library finds OpenMP in the process

from pagewire.kernels.cpu import build

parser = argparse.ArgumentParser(prog="python -m pagewire.kernels.cpu", description=__doc__)
parser.add_argument("--ahead", action="store_true", help="for every class of machines of this architecture")
given = parser.parse_args()
try:
    if given.ahead:
        print(*(library.name for library in build.build_ahead()), sep="\n")
    else:
        build.load()
except build.NotBuilt as error:
    sys.exit(f"the CPU kernels cannot be built, so the executor will use plain PyTorch: {error}")
