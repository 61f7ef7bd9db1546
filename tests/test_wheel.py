"""The wheel: one top-level package, which works beside packages that bear the names of our folders."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pagewire.serving import serving
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
NAMESAKES = ("bench", "kernels", "services", "shared", "tests", "tools")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the wheel; its dependencies are those that run the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout, environment = folder / "checkout", folder / "environment"
    listed = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(checkout))
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    (wheel,) = folder.glob("*.whl")
    _run(*pip, "--python", str(environment / "bin" / "python"), "install", "--no-deps", str(wheel))
    yield environment
    shutil.rmtree(folder)


def _site_packages(environment: Path) -> Path:
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


@pytest.fixture
def project(installed: Path, tmp_path: Path) -> Path:
    """A folder of a user whose own packages have the names of ours and must not be imported."""
    (_site_packages(installed) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    for name in NAMESAKES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} is the package of somebody else')")
    return tmp_path


def test_the_wheel_holds_one_package(installed: Path) -> None:
    names = {entry.name for entry in _site_packages(installed).iterdir()} - {"dependencies.pth"}
    assert names == {"pagewire", next(name for name in names if name.endswith(".dist-info"))}


def test_the_wheel_holds_every_module(installed: Path) -> None:
    package = _site_packages(installed) / "pagewire"
    missing = [
        source
        for folder in ("bench", "kernels", "services", "shared")
        for source in (ROOT / folder).rglob("*")
        if source.suffix in {".py", ".cpp", ".hpp"} and not (package / source.relative_to(ROOT)).exists()
    ]
    assert not missing
    assert (package / "bundled" / "model.safetensors").exists()


def test_the_library_is_imported_from_a_project_with_the_same_names(installed: Path, project: Path) -> None:
    code = "from pagewire import LLM, AsyncClient, Client, SamplingParams; print(LLM.__module__)"
    assert _run(str(installed / "bin" / "python"), "-c", code, cwd=project) == "pagewire.llm\n"


def test_the_wheel_serves_from_a_project_with_the_same_names(installed: Path, project: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # nats-server is a dependency too
    with serving(
        "--model", "bundled", command=(str(installed / "bin" / "pagewire"),), cwd=project, PATH=path
    ) as served:
        modules = [Path(f"/proc/{pid}/cmdline").read_text() for pid in served.processes()]
    assert sum("pagewire.services." in command for command in modules) == 5


def _run(*command: str, cwd: Path | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    return result.stdout
