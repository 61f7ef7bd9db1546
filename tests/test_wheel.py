"""The wheel: one top-level package, which works beside packages that bear the names of our folders."""

import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.embedded.broker import find_server
from pagewire.kernels.cpu.build import COMPILER, cpu_features
from pagewire.kernels.cpu.targets import best_target
from tests.pagewire.serving import serving
from tests.support.waiting import PATIENCE
from tools.wheel import build_wheel

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(900)  # the kernels are compiled, on cores that other tests use too
NAMESAKES = ("bench", "kernels", "services", "shared", "tests", "tools")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the wheel; its dependencies are those that run the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    target = best_target(platform.machine(), cpu_features())
    assert target is not None, "no class of machines in kernels/cpu/targets.py fits this one"
    wheel = build_wheel(folder, [target])
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
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


def test_the_wheel_serves_without_a_compiler_beside_equal_names(installed: Path, project: Path) -> None:
    programs = project / "programs"
    programs.mkdir()
    (programs / "nats-server").symlink_to(find_server())
    command, cache = (str(installed / "bin" / "pagewire"),), project / "cache"
    assert shutil.which(COMPILER, path=str(programs)) is None
    environ = {"PATH": str(programs), "PYTHONPATH": "", "XDG_CACHE_HOME": str(cache)}
    with serving("--model", "bundled", command=command, cwd=project, **environ) as served:
        modules = [Path(f"/proc/{pid}/cmdline").read_text() for pid in served.processes()]
    assert sum("pagewire.services." in command for command in modules) == 5
    assert not cache.exists(), "the kernels were compiled"


def _run(*command: str, cwd: Path | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    return result.stdout
