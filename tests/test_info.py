"""`is_available` and `info`: what is missing is named, with the next step."""

from __future__ import annotations

import ctypes
import json
import sys
import types
import warnings
from importlib import metadata
from typing import Any

import pytest
import torch
from rich.console import Console

import cudaops
from cudaops import toolkit
from cudaops.errors import UnsupportedError

module: Any = sys.modules["cudaops.info"]  # `cudaops.info` is the function


class Driver:
    """A libcuda: what cuInit says, and the CUDA version it supports."""

    def __init__(self, status: int, version: int = 13_010) -> None:
        self.status = status
        self.version = version

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = self.version
        return 0


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CUDA build of torch on a machine without a GPU or a driver, whatever this one has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "_libcuda", lambda: None)
    return monkeypatch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch, driver and CuPy as on a machine with one GPU."""
    properties = types.SimpleNamespace(name="NVIDIA Something", major=9, minor=0, total_memory=141 * 2**30)
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "_libcuda", lambda: Driver(0))
    monkeypatch.setattr(module, "_cupy_version", lambda: "14.2.0")
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    return monkeypatch


# ---- why there is no GPU ----


def test_a_cpu_build_is_named(no_gpu: pytest.MonkeyPatch) -> None:
    no_gpu.setattr(torch.version, "cuda", None)
    found = cudaops.info()
    assert not cudaops.is_available()
    assert found.reason is not None
    assert "CPU build" in found.reason
    assert found.next_step is not None
    assert "CUDA build" in found.next_step
    no_gpu.setattr(torch.version, "hip", "7.0")
    assert "ROCm build" in (cudaops.info().reason or "")


def test_a_missing_driver_is_named(no_gpu: pytest.MonkeyPatch) -> None:
    found = cudaops.info()
    assert found.reason == "no NVIDIA driver: libcuda.so.1 cannot be loaded"
    assert "nvidia-smi" in (found.next_step or "")
    assert found.driver is None
    assert found.gpus == ()


def test_a_driver_without_a_gpu_is_named_and_so_is_a_mask(no_gpu: pytest.MonkeyPatch) -> None:
    no_gpu.setattr(module, "_libcuda", lambda: Driver(100))
    no_gpu.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cudaops.info().reason == "the NVIDIA driver is there but shows no GPU"
    no_gpu.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cudaops.info().reason == "the NVIDIA driver is there but shows no GPU with CUDA_VISIBLE_DEVICES=''"


def test_what_torch_says_of_its_driver_is_passed_on_and_warns_nobody(no_gpu: pytest.MonkeyPatch) -> None:
    def too_old() -> bool:
        warnings.warn(
            "The NVIDIA driver on your system is too old (found version 11040). (Triggered internally)", stacklevel=1
        )
        return False

    no_gpu.setattr(torch.cuda, "is_available", too_old)
    no_gpu.setattr(module, "_libcuda", lambda: Driver(35, 11_040))
    found = module.obstacle()
    assert found.reason == (
        "torch cannot use the NVIDIA driver (The NVIDIA driver on your system is too old (found version 11040).)"
    )
    assert "supports CUDA 13.0" in found.next_step
    no_gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuInit returns 35" in module.obstacle().reason


def test_cupy_missing_too_old_or_broken_is_named_with_the_pip_command(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(module, "_cupy_version", lambda: None)
    assert "CuPy" in module.obstacle().reason
    assert "pip install 'cupy-cuda13x>=14'" in cudaops.info().next_step
    gpu.setattr(torch.version, "cuda", "12.8")
    assert "pip install 'cupy-cuda12x>=14'" in module.obstacle().next_step
    gpu.setattr(module, "_cupy_version", lambda: "13.4.1")
    assert "CuPy 13.4.1 is too old; 14" in module.obstacle().reason
    gpu.setattr(module, "_cupy_version", lambda: "14.2.0")
    sys.modules["cupy"].cuda.runtime.getDeviceCount = lambda: 0
    assert "sees no GPU" in module.obstacle().reason
    gpu.setitem(sys.modules, "cupy", None)
    assert "CuPy 14.2.0 cannot use the GPU" in module.obstacle().reason


def test_with_a_gpu_it_is_available_and_described(gpu: pytest.MonkeyPatch) -> None:
    assert cudaops.is_available()
    found = cudaops.info()
    assert found.available
    assert found.reason is None
    assert found.next_step is None
    assert [str(each) for each in found.gpus] == ["0: NVIDIA Something, sm_90, 141.0 GiB"]
    assert "supports CUDA 13.1" in (found.driver or "")
    text = str(found)
    assert "CUDA tensors  run on the GPU" in text
    assert "next step" not in text
    assert module.why_unavailable() == ""


def test_the_drivers_own_version_is_read_where_the_kernel_shows_it(gpu: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: gcc 12.2.0\n")
    gpu.setattr(module, "_DRIVER_FILE", file)
    assert cudaops.info().driver == "580.65.06 (supports CUDA 13.1)"
    gpu.setattr(module, "_DRIVER_FILE", tmp_path / "missing")
    assert cudaops.info().driver == "supports CUDA 13.1"


# ---- the rest ----


def test_nvrtc_is_the_one_really_loaded() -> None:
    tools = toolkit.toolkit()
    text = cudaops.info().nvrtc
    assert text.startswith(f"{tools.version[0]}.{tools.version[1]} (")
    assert "libnvrtc.so" in text


def test_a_missing_nvrtc_and_llvmlite_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudaops import emulator

    def missing() -> Any:
        raise UnsupportedError("CuPy is needed: pip install it")

    def no_llvm() -> str:
        raise ModuleNotFoundError("No module named 'llvmlite'")

    monkeypatch.setattr(toolkit, "toolkit", missing)
    monkeypatch.setattr(emulator, "describe", no_llvm)
    found = cudaops.info()
    assert found.nvrtc == "none: CuPy is needed: pip install it"
    assert "pip install llvmlite" in found.emulator


def test_it_names_the_cache_folder_and_the_emulators_arch(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CUDAOPS_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_90")
    found = cudaops.info()
    assert str(tmp_path / "here") in found.cache
    assert found.emulate_arch == "sm_90"


def test_cupys_version_is_read_without_importing_it() -> None:
    installed = [d.metadata["Name"] for d in metadata.distributions() if (d.metadata["Name"] or "").startswith("cupy")]
    assert module._cupy_version() == (metadata.version(installed[0]) if installed else None)


def test_libcuda_that_cannot_be_loaded_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert module._libcuda() is None


@pytest.mark.parametrize("width", [80, 120])
def test_it_prints_as_text_and_as_a_table_with_the_same_facts(width: int) -> None:
    found = cudaops.info()
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found)
    console.file.close()
    table = console.export_text()
    assert max(map(len, table.splitlines())) <= width
    for fact in (found.torch, found.python, found.emulate_arch):
        assert fact in table
        assert fact in str(found)


def test_it_is_json() -> None:
    found = cudaops.info()
    read = json.loads(json.dumps(found.as_dict()))
    assert read["torch"] == torch.__version__
    assert read["available"] is found.available
