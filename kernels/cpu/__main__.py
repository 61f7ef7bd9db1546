"""Compiles the CPU kernels in advance: for this machine, or for an image, which runs on many."""

import argparse
import platform
import sys

import torch  # noqa: F401 - the library finds OpenMP in the process

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.targets import targets_of

parser = argparse.ArgumentParser(prog="python -m pagewire.kernels.cpu", description=__doc__)
parser.add_argument("--ahead", action="store_true", help="for every class of machines of this architecture")
arguments = parser.parse_args()
try:
    if arguments.ahead:
        libraries = build.build_ahead(build.SOURCES, targets_of(platform.machine()))
        print(*(library.name for library in libraries), sep="\n")
    else:
        build.load()
except build.NotBuilt as error:
    sys.exit(str(error))
