"""`python -m pagewire.kernels.cpu` compiles the kernels in advance, for this machine or, for an image, for many.

`--ahead` compiles them for every class of machines of this architecture, into the package's own folder.
"""

import sys

import torch  # noqa: F401 - the library finds OpenMP in the process

from pagewire.kernels.cpu import build

try:
    if sys.argv[1:] == ["--ahead"]:
        print(*(library.name for library in build.build_ahead()), sep="\n")
    else:
        build.load()
except build.NotBuilt as error:
    sys.exit(f"the CPU kernels cannot be built, so the executor will use plain PyTorch: {error}")
