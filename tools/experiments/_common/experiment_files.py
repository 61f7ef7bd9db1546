"""The files of the experiments."""

from collections.abc import Mapping
from pathlib import Path

from tools.experiments._common.checkouts import HERE

_FOLDER = HERE / "tools" / "experiments"
EXPERIMENTS: Mapping[str, Path] = {
    file.stem: file.relative_to(HERE)
    for file in sorted((*_FOLDER.glob("[!_]*.py"), *_FOLDER.glob("[!_]*/[!_]*.py")), key=lambda file: file.stem)
}
"""Files by the names of the experiments, relative to the checkout. Each has `main(arguments)`, which returns the exit
code; modules without it stand in `_common/` or in a folder of a folder.
"""
