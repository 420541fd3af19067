"""The NVRTC that is loaded, its headers, and what is said when one is missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cudaops import toolkit
from cudaops.errors import UnsupportedError


@pytest.fixture
def looked_up_again() -> Iterator[None]:
    """The look-up runs afresh in the test, and again for those after it."""
    toolkit.toolkit.cache_clear()
    yield
    toolkit.toolkit.cache_clear()


def test_it_is_the_nvrtc_that_is_really_loaded() -> None:
    tools = toolkit.toolkit()
    assert tools.version == tuple(tools.nvrtc.getVersion())
    assert tools.archs == tuple(f"sm_{n}" for n in tools.nvrtc.getSupportedArchs())
    assert "sm_80" in tools.archs
    library = toolkit.loaded_library()
    assert library is not None
    assert library.name.startswith("libnvrtc.so")


def test_the_headers_are_of_that_version() -> None:
    tools = toolkit.toolkit()
    assert tools.include_dirs
    found = [version for path in tools.include_dirs if (version := toolkit._cuda_version(path))]
    assert found
    assert set(found) == {tools.version}
    assert f"CUDART_VERSION={tools.version[0]}0{tools.version[1]}0" in tools.header_versions
    assert "CCCL_VERSION=" in tools.header_versions


def header(folder: Path, version: tuple[int, int]) -> Path:
    folder.mkdir(parents=True)
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version[0]}0{version[1]}0\n")
    return folder


def test_headers_in_one_folder_or_in_one_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "loaded_library", lambda: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    assert toolkit._include_dirs((98, 3)) == ()

    # CUDA 12's wheels: a folder each, of which another version's must not be taken
    runtime = header(tmp_path / "nvidia" / "cuda_runtime" / "include", (98, 3))
    crt = tmp_path / "nvidia" / "cuda_nvcc" / "include"
    cccl = tmp_path / "nvidia" / "cuda_cccl" / "include"
    crt.mkdir(parents=True), cccl.mkdir(parents=True)
    assert toolkit._include_dirs((98, 3)) == (runtime, crt, cccl)
    assert toolkit._include_dirs((98, 4)) == ()

    # CUDA 13's: one folder, with another inside
    one = header(tmp_path / "nvidia" / "cu99" / "include", (99, 1))
    (one / "cccl").mkdir()
    assert toolkit._include_dirs((99, 1)) == (one, one / "cccl")
    assert toolkit._include_dirs((99, 2)) == ()

    # an installed toolkit
    installed = header(tmp_path / "toolkit" / "include", (97, 0))
    assert toolkit._include_dirs((97, 0)) == (installed,)


def test_headers_beside_the_library_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = header(tmp_path / "beside" / "include", (99, 1))
    header(tmp_path / "nvidia" / "cu99" / "include", (99, 1))
    (tmp_path / "beside" / "lib").mkdir()
    library = tmp_path / "beside" / "lib" / "libnvrtc.so.99"
    library.touch()
    monkeypatch.setattr(toolkit, "loaded_library", lambda: library)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolkit._include_dirs((99, 1)) == (beside,)


@pytest.mark.parametrize("arch", ["sm_42", "sm_8", "sm_80x", "80", "compute_80", "", "sm_800"])
def test_an_arch_nvrtc_does_not_know_is_refused_with_those_it_does(arch: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"arch '{arch}' is not one that NVRTC \d+\.\d+ compiles for: .*sm_80"):
        toolkit.check_arch(arch)


def test_an_arch_with_its_family_suffix_is_taken() -> None:
    toolkit.check_arch("sm_80")
    toolkit.check_arch("sm_90a")


COMMAND = r"pip install 'cupy-cuda1[23]x>=14' 'cuda-toolkit\[nvrtc,cudart,cccl,crt\]'"


@pytest.mark.usefixtures("looked_up_again")
def test_a_missing_cupy_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    with pytest.raises(UnsupportedError, match=rf"CuPy is needed .*: {COMMAND}"):
        toolkit.toolkit()


def test_a_missing_nvrtc_is_said_with_the_command(run_python: Callable[..., str]) -> None:
    code = """
import torch
from cuda import pathfinder

def missing(name):
    raise pathfinder.DynamicLibNotFoundError(f"no lib{name}.so")

pathfinder.load_nvidia_dynamic_lib = missing  # what CuPy looks for NVRTC with
from cudaops import UnsupportedError
from cudaops.toolkit import toolkit
try:
    toolkit()
except UnsupportedError as error:
    print(error)
"""
    assert re.search(rf"CuPy finds no NVRTC \(no libnvrtc\.so\): {COMMAND}", run_python(code))


@pytest.mark.parametrize(
    ("built_with", "cupy"), [("13.0", "cupy-cuda13x"), ("12.9", "cupy-cuda12x"), (None, "cupy-cuda12x")]
)
def test_the_command_follows_torchs_cuda(monkeypatch: pytest.MonkeyPatch, built_with: str | None, cupy: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_with)
    assert cupy in toolkit._install()


@pytest.mark.usefixtures("looked_up_again")
@pytest.mark.parametrize(("system", "machine"), [("win32", "AMD64"), ("darwin", "arm64"), ("linux", "aarch64")])
def test_another_platform_is_said(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(toolkit.sys, "platform", system)
    monkeypatch.setattr(toolkit.platform, "machine", lambda: machine)
    with pytest.raises(UnsupportedError, match=f"Linux x86-64 only; this is {system} {machine}"):
        toolkit.toolkit()


def test_torch_is_loaded_before_cupy(run_python: Callable[..., str]) -> None:
    code = """
import sys
order = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "cupy_backends"):
            order.append(name)
sys.meta_path.insert(0, Watch())
from cudaops.toolkit import toolkit
assert "cupy" not in sys.modules and "cupy_backends" not in sys.modules, "importing loads no CuPy"
toolkit()
print(order)
"""
    assert run_python(code).strip() == "['torch', 'cupy_backends']"
