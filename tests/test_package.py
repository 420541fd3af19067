"""What is installed is whole: the wheel runs an op from a folder of its own, and a plain source tree does too."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

import cudaops

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

MATMUL = """
import sys, torch, cudaops
from cudaops.sources import kernels_dir
print(cudaops.__file__)
print(kernels_dir())
print(cudaops.matmul(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])).tolist())
"""


def pip(*arguments: str) -> None:
    """Nothing comes from the network: no dependencies, and the build backend is the one the test extra installs."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what belongs to it."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("cudaops", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(tree))
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_every_kernel(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cudaops").rglob("*.py")}
    kernels = {f"cudaops/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.cu*")}
    assert {"cudaops/py.typed", *modules, *kernels} == {name for name in held if name.startswith("cudaops/")}
    others = {name.split("/", 1)[0] for name in held if not name.startswith("cudaops/")}
    assert others == {f"cudaops-{cudaops.__version__}.dist-info"}
    assert any(name.endswith("/LICENSE") for name in held)


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == cudaops.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert {"torch>=2.11", "numpy", "llvmlite>=0.45"} <= set(metadata.get_all("Requires-Dist"))
    assert set(metadata.get_all("Provides-Extra")) == {"cuda12", "cuda13", "demo", "test"}
    for extra in ("12", "13"):
        needs = {
            need for need in metadata.get_all("Requires-Dist") if f"'cuda{extra}'" in need or f'"cuda{extra}"' in need
        }
        assert any(need.startswith(f"cupy-cuda{extra}x>=14") for need in needs)
        assert any(re.match(r"cuda-toolkit\[(cccl|crt|cudart|nvrtc|,)+\] *;", need) for need in needs), needs


def test_the_command_is_there(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    assert "cudaops = cudaops.cli:main" in archive.read(name).decode()
    from cudaops.cli import main

    assert callable(main)


def test_the_wheel_installed_elsewhere_runs_an_op(wheel: Path, tmp_path: Path, run_python: Callable[..., str]) -> None:
    target = tmp_path / "elsewhere"
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    lines = run_python(MATMUL, path=target).splitlines()
    assert lines[:3] == [
        str(target / "cudaops" / "__init__.py"),
        str(target / "cudaops" / "kernels"),
        "[[19, 22], [43, 50]]",
    ]


def test_a_plain_source_tree_runs_an_op(tmp_path: Path, run_python: Callable[..., str]) -> None:
    for name in ("cudaops", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    lines = run_python(MATMUL, path=tmp_path).splitlines()
    assert lines[:3] == [
        str(tmp_path / "cudaops" / "__init__.py"),
        str(tmp_path / "kernels"),
        "[[19, 22], [43, 50]]",
    ]


def test_the_tests_need_nothing_that_the_extra_does_not_bring() -> None:
    """The wheel is built here without a network, so its backend is among what the test extra installs."""
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert set(backend) <= set(PROJECT["optional-dependencies"]["test"])


def test_the_package_is_typed_and_licensed() -> None:
    assert (ROOT / "cudaops" / "py.typed").read_text() == ""
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    assert f"## {cudaops.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_is_a_script_that_bash_accepts() -> None:
    script = ROOT / ".ci" / "run"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    assert script.stat().st_mode & 0o111
