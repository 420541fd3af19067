"""Is there a GPU to run on, and if not, why: `is_available` and `info`."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cudaops import cache
from cudaops.errors import UnsupportedError
from cudaops.launch import arch_of
from cudaops.listing import Listing

_CUPY_NEEDED = 14
_CUDA_ERROR_NO_DEVICE = 100
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it; memory in bytes."""

    index: int
    name: str
    arch: str
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {self.arch}, {self.memory_bytes / 2**30:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why no GPU can be used, and what to do about it."""

    reason: str
    next_step: str


@dataclass(frozen=True, slots=True, repr=False)
class Info(Listing):
    """What `info()` found. Print it, or read the fields; each is None, or empty, where there is no such thing.

    Arguments:
        nvrtc: version and file of the NVRTC that is really loaded, or why there is none.
        driver: the NVIDIA driver and the CUDA version it supports.
        available: a GPU is usable through torch and CuPy.
        reason, next_step: why not, and what to do.
        cache: the kernel cache's folder and what is in it.
        emulator: what runs kernels on CPU tensors.
    """

    cudaops: str
    python: str
    torch: str
    torch_cuda: str | None
    cupy: str | None
    nvrtc: str
    driver: str | None
    gpus: tuple[Gpu, ...]
    available: bool
    reason: str | None
    next_step: str | None
    cache: str
    emulator: str
    emulate_arch: str

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON types."""
        return asdict(self)

    def _lines(self) -> list[tuple[str, str]]:
        build = f"CUDA {self.torch_cuda} build" if self.torch_cuda else "CPU build"
        lines = [
            ("cudaops", self.cudaops),
            ("Python", self.python),
            ("torch", f"{self.torch} ({build})"),
            ("CuPy", self.cupy or "not installed"),
            ("NVRTC", self.nvrtc),
            ("driver", self.driver or "none"),
            *(("GPU", str(gpu)) for gpu in self.gpus),
        ]
        if self.reason is not None:
            lines += [("GPU", f"not usable: {self.reason}"), ("next step", self.next_step or "")]
        return [
            *lines,
            ("CUDA tensors", "run on the GPU" if self.available else "there can be none"),
            ("CPU tensors", f"run in the emulator: {self.emulator}, as {self.emulate_arch}"),
            ("cache", self.cache),
        ]


def is_available() -> bool:
    """Whether a CUDA GPU is usable through torch and CuPy. Without one, CPU tensors still run, in the emulator."""
    return obstacle() is None


def why_unavailable() -> str:
    """Why `is_available()` is False and what to do, as one sentence; empty when it is True."""
    found = obstacle()
    return "" if found is None else f"{found.reason}; {found.next_step}"


def info() -> Info:
    """What is installed and what can run: torch, CuPy, NVRTC, driver, GPUs or why there is none, cache, emulator."""
    from cudaops import __version__

    found = obstacle()
    gpus = _gpus() if torch.cuda.is_available() else ()
    return Info(
        cudaops=__version__,
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        cupy=_cupy_version(),
        nvrtc=_nvrtc(),
        driver=_driver(),
        gpus=gpus,
        available=found is None,
        reason=found.reason if found else None,
        next_step=found.next_step if found else None,
        cache=str(cache.info()),
        emulator=_emulator(),
        emulate_arch=arch_of(torch.device("cpu")),
    )


def obstacle() -> Obstacle | None:
    """What stands between this process and a GPU; None if nothing does. The first thing missing is named."""
    return _torch_obstacle() or _cupy_obstacle()


def _torch_obstacle() -> Obstacle | None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available() and torch.version.cuda is not None:
            return None
    if torch.version.cuda is None:
        kind = "a ROCm build" if torch.version.hip else "a CPU build"
        return Obstacle(
            f"this torch ({torch.__version__}) is {kind}, which cannot use an NVIDIA GPU",
            "on a machine with a GPU install the CUDA build (https://pytorch.org/get-started/locally)",
        )
    driver = _libcuda()
    if driver is None:
        return Obstacle(
            "no NVIDIA driver: libcuda.so.1 cannot be loaded",
            "on a machine with a GPU install the driver (nvidia-smi must list the GPU; a container needs --gpus all)",
        )
    status = driver.cuInit(0)
    if status == _CUDA_ERROR_NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        return Obstacle(
            f"the NVIDIA driver is there but shows no GPU{hidden}",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES (a container needs --gpus all)",
        )
    words = "; ".join(str(warning.message).split("(Triggered")[0].strip() for warning in said)
    return Obstacle(
        f"torch cannot use the NVIDIA driver ({words or f'cuInit returns {status}'})",
        f"install a driver that supports CUDA {torch.version.cuda}, or a torch built for the driver's CUDA",
    )


def _cupy_obstacle() -> Obstacle | None:
    install = f"pip install 'cupy-cuda{(torch.version.cuda or '13').partition('.')[0]}x>={_CUPY_NEEDED}'"
    version = _cupy_version()
    if version is None:
        return Obstacle("CuPy, which launches the kernels, is not installed", install)
    if int(version.partition(".")[0]) < _CUPY_NEEDED:
        return Obstacle(f"CuPy {version} is too old; {_CUPY_NEEDED} or newer is needed", install)
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        count = runtime.getDeviceCount()
    except Exception as error:  # ImportError, or CUDARuntimeError, which is CuPy's own
        return Obstacle(f"CuPy {version} cannot use the GPU ({error})", install)
    return None if count > 0 else Obstacle(f"CuPy {version} sees no GPU", "check CUDA_VISIBLE_DEVICES")


def _cupy_version() -> str | None:
    """CuPy's version without importing it, which takes seconds."""
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _nvrtc() -> str:
    from cudaops.toolkit import loaded_library, toolkit

    try:
        tools = toolkit()
    except UnsupportedError as error:
        return f"none: {error}"
    headers = (
        ""
        if tools.include_dirs
        else "; no CUDA headers of that version, so kernels cannot include cuda_fp16.h and such"
    )
    return f"{tools.version[0]}.{tools.version[1]} ({loaded_library()}){headers}"


def _emulator() -> str:
    from cudaops import emulator

    try:
        return emulator.describe()
    except ImportError as error:
        return f"not usable ({error}); pip install llvmlite"


def _libcuda() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _driver() -> str | None:
    library = _libcuda()
    if library is None:
        return None
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    supports = f"supports CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    try:
        said = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text())
    except OSError:
        said = None
    return f"{said.group()} ({supports})" if said else supports


def _gpus() -> tuple[Gpu, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, seen.name, f"sm_{seen.major}{seen.minor}", seen.total_memory))
    return tuple(found)
