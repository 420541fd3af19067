"""The compiler that is really there: NVRTC as CuPy's own binding loads it, and the headers that belong to it.

Which NVRTC that is depends on the environment (CuPy for CUDA 12 beside torch for CUDA 13 loads NVRTC 13), so its
version, its archs and its headers are asked for at run time. No driver is needed.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from cudaops.errors import UnsupportedError


def _install() -> str:
    """The command that brings CuPy and NVRTC, for the CUDA that torch was built with."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or "12"
    major = "13" if cuda.startswith("13") else "12"
    return f"pip install 'cupy-cuda{major}x>=14' 'cuda-toolkit[nvrtc,cudart,cccl,crt]'"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """NVRTC and what goes with it.

    Arguments:
        nvrtc: `cupy_backends.cuda.libs.nvrtc`.
        version: of NVRTC, (major, minor).
        archs: those it compiles for, `'sm_80'`.
        include_dirs: folders of the CUDA headers of that version, empty where there are none.
        header_versions: what those headers call themselves: part of a kernel's key, in place of thousands of files.
    """

    nvrtc: ModuleType
    version: tuple[int, int]
    archs: tuple[str, ...]
    include_dirs: tuple[Path, ...]
    header_versions: str


@cache
def toolkit() -> Toolkit:
    """The NVRTC of this process and its headers, looked up once.

    Raises:
        UnsupportedError: not Linux on x86-64, or CuPy or NVRTC is missing; with the pip command.
    """
    if not (sys.platform.startswith("linux") and platform.machine() in ("x86_64", "AMD64")):
        raise UnsupportedError(
            f"kernels are compiled and run on Linux x86-64 only; this is {sys.platform} {platform.machine()}: "
            "use torch's own operation here"
        )
    nvrtc, version = _load()
    archs = tuple(f"sm_{number}" for number in nvrtc.getSupportedArchs())
    include_dirs = _include_dirs(version)
    return Toolkit(nvrtc, version, archs, include_dirs, _header_versions(include_dirs))


def _load() -> tuple[ModuleType, tuple[int, int]]:
    importlib.import_module(
        "torch"
    )  # before CuPy: the other way round two copies of a CUDA library get in each other's way
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except Exception as error:  # not ImportError alone: a CuPy that does not fit fails in its own ways
        message = f"CuPy is needed to compile kernels, and cannot be imported ({error}): {_install()}"
        raise UnsupportedError(message) from error
    try:
        return nvrtc, tuple(nvrtc.getVersion())
    except Exception as error:  # whatever the search for the library raises, the remedy is the same
        raise UnsupportedError(f"CuPy finds no NVRTC ({error}): {_install()}") from error


def check_arch(arch: str) -> None:
    """Refuse an arch that the loaded NVRTC does not compile for.

    Raises:
        UnsupportedError: with the archs there are.
    """
    tools = toolkit()
    if not re.fullmatch(r"sm_\d+[af]?", arch) or arch.rstrip("af") not in tools.archs:
        raise UnsupportedError(
            f"arch {arch!r} is not one that NVRTC {tools.version[0]}.{tools.version[1]} compiles for: "
            f"{', '.join(tools.archs)}; an older GPU needs an older NVRTC, a newer GPU a newer one "
            "(without a GPU set CUDAOPS_EMULATE_ARCH to one of these)"
        )


def loaded_library() -> Path | None:
    """The file of the NVRTC in this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.partition("/")[2]
        if re.search(r"(^|/)libnvrtc\.so", path):
            return Path("/" + path)
    return None


def _include_dirs(version: tuple[int, int]) -> tuple[Path, ...]:
    """Folders with the headers of CUDA `version`: beside NVRTC, in the NVIDIA wheels, in an installed toolkit."""
    roots = []
    library = loaded_library()
    if library is not None:
        real = library.resolve()
        roots += [real.parent.parent, real.parent.parent.parent]
    wheels = [Path(entry) / "nvidia" for entry in sys.path if entry]
    roots += [wheel / f"cu{version[0]}" for wheel in wheels]
    roots += [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    roots += [Path(f"/usr/local/cuda-{version[0]}.{version[1]}"), Path("/usr/local/cuda")]
    includes = [root / "include" for root in roots]
    for root in roots:
        includes += sorted(root.glob("targets/x86_64-linux/include"))
    main = next((path for path in includes if _cuda_version(path) == version), None)
    if main is None:
        # the wheels of CUDA 12 have a folder each: runtime, crt (in nvcc's), cccl
        parts = [
            wheel / name / "include"
            for wheel in wheels
            for name in ("cuda_runtime", "cuda_nvcc", "cuda_crt", "cuda_cccl")
        ]
        parts = [path for path in parts if path.is_dir()]
        if not any(_cuda_version(path) == version for path in parts):
            return ()
        found = [path for path in parts if _cuda_version(path) in (version, None)]
    else:
        found = [main]
    return tuple(each for path in found for each in (path, path / "cccl") if each.is_dir())


def _cuda_version(include: Path) -> tuple[int, int] | None:
    number = _define(include / "cuda_runtime_api.h", "CUDART_VERSION")
    return (int(number) // 1000, int(number) % 1000 // 10) if number else None


def _define(header: Path, name: str) -> str | None:
    try:
        match = re.search(rf"^\s*#\s*define\s+{name}\s+(\d+)", header.read_text(errors="replace"), re.M)
    except OSError:
        return None
    return match.group(1) if match else None


def _header_versions(include_dirs: tuple[Path, ...]) -> str:
    found = []
    for folder in include_dirs:
        for header, name in (
            ("cuda_runtime_api.h", "CUDART_VERSION"),
            ("cuda/std/__cccl/version.h", "CCCL_VERSION"),
            ("cuda/std/detail/libcudacxx/include/__cccl/version.h", "CCCL_VERSION"),
        ):
            number = _define(folder / header, name)
            if number:
                found.append(f"{name}={number}")
    return " ".join(found)
