"""`python -m tests.kernels.triton.ahead.matrix`: compiles every kernel by every Triton of PyTorch, for every GPU.

Each Triton is installed into a folder of its own below build/. Writes bench/results/kernels.json and prints how many
forms fit; the exit code is 1 if one spills or asks for more shared memory than its GPU has.
"""

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from pagewire.bench._common.output import commit, machine, today
from tests.kernels.triton.ahead.gpus import GPUS, name_of

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "bench" / "results" / "kernels.json"
VERSIONS = {"3.6.0": "2.11", "3.7.0": "2.12", "3.7.1": "2.13"}
"""Versions of Triton, and of the PyTorch whose wheels ask for them."""


def installed(version: str) -> Path:
    """Returns the folder of a version of Triton, which is installed first if it is missing."""
    folder = ROOT / "build" / f"triton-{version}"
    if not (folder / "triton").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"triton=={version}"], check=True)
    return folder


def compile_all(version: str, archs: list[str]) -> list[dict[str, Any]]:
    """Returns the forms of all kernels as this version compiles them, with the version."""
    folder = installed(version)
    output = folder / "kernels.json"
    command = [sys.executable, "-m", "tests.kernels.triton.ahead.compile", "--output", str(output), "--arch", *archs]
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    report = json.loads(output.read_text())
    if report["triton"] != version:
        raise RuntimeError(f"Triton {report['triton']} was found in place of {version}: empty {folder}")
    return [{"triton": version} | form for form in report["forms"]]


def summary(forms: list[dict[str, Any]]) -> list[str]:
    """Returns a line per version and GPU."""
    lines = []
    for (version, arch), group in groupby(forms, key=lambda form: (form["triton"], form["arch"])):
        here = list(group)
        registers, shared = (max(form[name] for form in here) for name in ("registers", "shared"))
        bad = [form["form"] for form in here if not form["fits"]]
        spilled = [form["form"] for form in here if form["fits"] and form["spills"] and not isinstance(arch, int)]
        verdict = (", ".join(bad) or "all fit") + (f", but these spill: {', '.join(spilled)}" if spilled else "")
        resources = f"{len(here)} forms, up to {registers} registers and {shared} bytes"
        lines.append(f"Triton {version} {name_of(arch)}: {resources}: {verdict}")
    return lines


def main(arguments: list[str]) -> int:
    """Compiles, writes the table and returns the exit code. `arguments` are the versions, by default all."""
    archs = list(GPUS)
    forms = [form for version in arguments or VERSIONS for form in compile_all(version, archs)]
    about = {
        "command": "make kernels-all",
        "machine": machine(),
        "commit": commit(),
        "date": today(),
        "torch": VERSIONS,
    }
    lines = ",\n".join(json.dumps(form) for form in forms)
    RESULTS.write_text(json.dumps(about, indent=1).removesuffix("\n}") + f',\n "forms": [\n{lines}\n ]\n}}\n')
    print("\n".join(summary(forms)))
    return int(not all(form["fits"] for form in forms))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
