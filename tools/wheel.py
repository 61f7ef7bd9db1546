"""`python -m tools.wheel [FOLDER]`: builds the wheel with the CPU kernels inside, for machines without a compiler.

The kernels are compiled for every class of machines of this architecture. A copy of the checkout is built, so that
neither its files nor those of an earlier build get into the wheel, and the checkout goes on compiling its own.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pagewire.kernels.cpu.build import build_ahead
from pagewire.kernels.cpu.targets import Target, targets_of

ROOT = Path(__file__).resolve().parents[1]


def build_wheel(folder: Path, targets: Sequence[Target]) -> Path:
    """Returns a wheel in `folder`, with libraries for the machine classes `targets`."""
    with tempfile.TemporaryDirectory() as draft:
        checkout = Path(draft) / "checkout"
        _copy(checkout)
        build_ahead(checkout / "kernels" / "cpu" / "cpp", targets)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        tag = sysconfig.get_platform().replace("-", "_")
        command += ["--no-build-isolation", f"--config-settings=--build-option=--plat-name={tag}"]
        subprocess.run([*command, "--wheel-dir", draft, str(checkout)], check=True)
        (wheel,) = Path(draft).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


def _copy(checkout: Path) -> None:
    """Copies the files that git knows or would add to a new folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)


if __name__ == "__main__":
    path = build_wheel(Path(*sys.argv[1:2] or ["dist"]), targets_of(platform.machine()))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
