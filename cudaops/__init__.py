"""Raw CUDA C kernels as ordinary torch operations, on a GPU or, the same PTX, on the CPU.

Neither CuPy nor LLVM is loaded here: they come with the first kernel.
"""

from cudaops import cache
from cudaops.emulator import emulation, sanitize
from cudaops.errors import CompileError, CudaopsError, EmulatorError, LaunchError, SanitizerError, UnsupportedError
from cudaops.explain import explain
from cudaops.info import info, is_available
from cudaops.interop import to_cupy, to_torch
from cudaops.kernel import RawKernel, RawModule
from cudaops.nn import CudaModule, convert, cpu, cuda, report, restore
from cudaops.ops import conv2d, linear, matmul

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CudaModule",
    "CudaopsError",
    "EmulatorError",
    "LaunchError",
    "RawKernel",
    "RawModule",
    "SanitizerError",
    "UnsupportedError",
    "__version__",
    "cache",
    "conv2d",
    "convert",
    "cpu",
    "cuda",
    "emulation",
    "explain",
    "info",
    "is_available",
    "linear",
    "matmul",
    "report",
    "restore",
    "sanitize",
    "to_cupy",
    "to_torch",
]
