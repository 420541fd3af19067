"""The CUDA seam: the one place that touches CuPy's driver side.

Written from CuPy 14's `cupy/_core/raw.pyx` and `cupy/cuda/function.pyx`: a `RawModule(path=...)` loads a cubin on the
current device, its functions are launched with (grid, block, args, shared_mem, stream), and an argument that is a
`CPointer` is handed to the driver as the address of that parameter's bytes. So CuPy never has to guess a type.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cudaops import cache
from cudaops.errors import LaunchError
from cudaops.plan import SMEM_WITHOUT_OPT_IN

if TYPE_CHECKING:
    from cudaops.compile import CompiledKernel
    from cudaops.plan import LaunchConfig
    from cudaops.signature import Entry


@dataclass(slots=True)
class _Loaded:
    """An entry on one device."""

    kernel: Any  # cupy.RawKernel: its attributes are the driver's
    function: Any  # cupy.cuda.Function: what is launched
    opted_in: int  # bytes of dynamic shared memory the driver was told of


_loaded: dict[tuple[str, str, int], _Loaded] = {}
_lock = threading.Lock()


def launch(
    compiled: CompiledKernel, entry: Entry, config: LaunchConfig, arguments: bytes, device_index: int, raw_stream: int
) -> None:
    """Launch `entry` on one GPU and stream; it returns before the kernel has run.

    Arguments:
        arguments: the packed parameter block; pointers are addresses on that GPU.
        raw_stream: a cudaStream_t of that GPU, 0 for the default stream.

    Raises:
        LaunchError: the driver does not load the cubin, or refuses the launch.
    """
    import cupy
    from cupy.cuda.function import CPointer

    with cupy.cuda.Device(device_index):
        loaded = _ready(compiled, entry, config.smem_bytes, device_index)
        block = (ctypes.c_char * len(arguments)).from_buffer_copy(arguments)  # the driver copies it in the call
        base = ctypes.addressof(block)
        pointers = tuple(CPointer(base + param.offset) for param in entry.params)
        try:
            loaded.function(config.grid, config.block, pointers, config.smem_bytes, _stream(raw_stream))
        except RuntimeError as error:  # CuPy's CUDADriverError is one
            raise LaunchError(
                f"kernel {entry.name} on cuda:{device_index}, {config}: the driver refused it ({error})"
            ) from error


def load(compiled: CompiledKernel, entry: Entry, config: LaunchConfig, device_index: int) -> None:
    """Do all that the first `launch` would do but the launch, so that later ones fit into a CUDA graph.

    Raises:
        LaunchError: the driver does not load the cubin.
    """
    import cupy

    with cupy.cuda.Device(device_index):
        _ready(compiled, entry, config.smem_bytes, device_index)


def _ready(compiled: CompiledKernel, entry: Entry, smem_bytes: int, device_index: int) -> _Loaded:
    """The entry on the current device, allowed as much dynamic shared memory as this launch needs."""
    name = (compiled.key, entry.name, device_index)
    loaded = _loaded.get(name)
    if loaded is None:
        with _lock:
            loaded = _loaded.get(name) or _load(compiled, entry, device_index)
            _loaded[name] = loaded
    if entry.smem_bytes + smem_bytes > SMEM_WITHOUT_OPT_IN and smem_bytes > loaded.opted_in:
        with _lock:
            most = max(smem_bytes, loaded.opted_in)
            loaded.kernel.max_dynamic_shared_size_bytes = most
            loaded.opted_in = most
    return loaded


def _load(compiled: CompiledKernel, entry: Entry, device_index: int) -> _Loaded:
    import cupy

    path = cache.file_with(f"{compiled.key}.cubin", compiled.cubin)
    try:
        kernel = cupy.RawModule(path=str(path)).get_function(entry.name)
        return _Loaded(kernel, kernel.kernel, 0)
    except RuntimeError as error:
        raise LaunchError(
            f"kernel {entry.name}: cuda:{device_index} does not load the cubin for {compiled.arch} ({error}); a driver "
            "older than NVRTC is the usual cause: update it, or install the NVRTC of its version (see cudaops.info())"
        ) from error


class _RawStream:
    """A stream of torch's by its handle, in the form CuPy takes streams of others."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    import cupy

    return cupy.cuda.Stream.from_external(_RawStream(handle))
