"""A stand-in for the few CuPy calls of the CUDA seam, so that it runs without a GPU.

It follows CuPy 14's `cupy/_core/raw.pyx`, `cupy/cuda/function.pyx`, `cupy/cuda/stream.pyx` and `cupy/cuda/device.pyx`:
arguments become addresses by CuPy's rules, the driver reads as many bytes there as the kernel declares, and what it
reads goes to the emulator. "GPU memory" is the memory of CPU tensors.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest

from cudaops import compile as compiler
from cudaops import emulator
from cudaops.plan import SMEM_WITHOUT_OPT_IN, LaunchConfig


class CUDADriverError(RuntimeError):
    """CuPy's error for whatever the driver refuses."""


@dataclass(frozen=True)
class Launch:
    """What reached the driver."""

    entry: str
    device: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int
    arguments: bytes


@dataclass
class FakeCupy:
    """The state of the pretended driver."""

    device_count: int = 2
    device: list[int] = field(default_factory=lambda: [0])
    current_streams: dict[int, int] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    loads: list[tuple[str, int]] = field(default_factory=list)
    opted_in: list[tuple[str, int, int]] = field(default_factory=list)
    buffers: list[emulator.Buffer] = field(default_factory=list)
    refuse_load: bool = False

    @property
    def current(self) -> int:
        return self.device[-1]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in CuPy's place."""
        cupy = types.ModuleType("cupy")
        cuda = types.ModuleType("cupy.cuda")
        function = types.ModuleType("cupy.cuda.function")
        function.CPointer = CPointer  # type: ignore[attr-defined]
        cuda.function = function  # type: ignore[attr-defined]
        cuda.Device = lambda index: Device(self, index)  # type: ignore[attr-defined]
        cuda.Stream = Stream  # type: ignore[attr-defined]
        cuda.get_current_stream = self._current_stream  # type: ignore[attr-defined]
        cupy.cuda = cuda  # type: ignore[attr-defined]
        cupy.RawModule = lambda *, path: RawModule(self, path)  # type: ignore[attr-defined]
        cupy.from_dlpack = numpy.from_dlpack  # type: ignore[attr-defined]
        cupy.empty = numpy.empty  # type: ignore[attr-defined]
        for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.function", function)):
            monkeypatch.setitem(sys.modules, name, module)

    def _current_stream(self, device_id: int) -> Stream:
        stream = Stream.__new__(Stream)
        stream.ptr = self.current_streams.get(device_id, 0)
        return stream


class Device:
    """`cupy.cuda.Device(index)` as a context: the device is current inside, and what was current is again after."""

    def __init__(self, cupy: FakeCupy, index: int) -> None:
        assert type(index) is int
        assert 0 <= index < cupy.device_count, "cudaErrorInvalidDevice"
        self._cupy, self._index = cupy, index

    def __enter__(self) -> Device:
        self._cupy.device.append(self._index)
        return self

    def __exit__(self, *_: object) -> None:
        self._cupy.device.pop()


class Stream:
    """`cupy.cuda.Stream`; ExternalStream is deprecated since CuPy 14."""

    ptr: int

    def __init__(self) -> None:
        raise AssertionError("a launch creates no stream of CuPy's own")

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, handle = obj.__cuda_stream__()
        assert type(version) is int
        assert type(handle) is int
        assert version == 0
        stream = cls.__new__(cls)
        stream.ptr = handle
        return stream


class CPointer:
    """`cupy.cuda.function.CPointer`: the address of an argument's bytes."""

    def __init__(self, p: int = 0) -> None:
        assert type(p) is int
        self.ptr = p


def pointer(value: Any) -> tuple[int, Any]:
    """`_pointer` of function.pyx: the address of the bytes of an argument, and what keeps them alive."""
    if value is None:
        held: Any = numpy.zeros((), numpy.int64)
    elif isinstance(value, CPointer):
        return value.ptr, value
    elif isinstance(value, numpy.ndarray):
        if value.size != 1:
            raise TypeError(f"You are trying to pass a numpy.ndarray of shape {value.shape} as a kernel parameter.")
        held = value
    elif isinstance(value, numpy.generic):
        held = numpy.array(value)
    elif isinstance(value, bool):
        held = numpy.array(value, numpy.bool_)
    elif isinstance(value, int):
        held = numpy.array(value, numpy.int64)
    elif isinstance(value, float):
        held = numpy.array(value, numpy.float64)
    elif isinstance(value, complex):
        held = numpy.array(value, numpy.complex128)
    else:
        raise TypeError(f"Unsupported type {type(value)}")
    padded = numpy.zeros(64, numpy.uint8)  # what lies behind a value that is too short
    padded[: held.nbytes] = numpy.frombuffer(held.tobytes(), numpy.uint8)
    return padded.ctypes.data, padded


class RawModule:
    """`cupy.RawModule(path=...)`: loads on the device that is current when a function is asked for."""

    def __init__(self, cupy: FakeCupy, path: str) -> None:
        assert type(path) is str
        self._cupy, self._path = cupy, path

    def get_function(self, name: str) -> RawKernel:
        kernel = RawKernel(self._cupy, self._path, name)
        assert kernel.kernel is not None  # CuPy loads here
        return kernel


class RawKernel:
    """What `get_function` returns."""

    def __init__(self, cupy: FakeCupy, path: str, name: str) -> None:
        self._cupy, self._path, self.name = cupy, path, name
        self._functions: dict[int, Function] = {}

    @property
    def kernel(self) -> Function:
        device = self._cupy.current
        if device not in self._functions:
            self._functions[device] = Function(self._cupy, self._path, self.name)
        return self._functions[device]

    def _set_max_dynamic_shared_size_bytes(self, value: int) -> None:
        self.kernel.max_dynamic = value
        self._cupy.opted_in.append((self.name, self._cupy.current, value))

    max_dynamic_shared_size_bytes = property(None, _set_max_dynamic_shared_size_bytes)


class Function:
    """`cupy.cuda.function.Function`: an entry on the device on which it was loaded."""

    def __init__(self, cupy: FakeCupy, path: str, name: str) -> None:
        if cupy.refuse_load:
            raise CUDADriverError(
                "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device"
            )
        cubin = Path(path).read_bytes()
        (self._compiled,) = {c.key: c for c in compiler._memory.values() if c.cubin == cubin}.values()
        if name not in self._compiled.entries:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        self._cupy, self._device, self._entry = cupy, cupy.current, self._compiled.entries[name]
        self.max_dynamic = SMEM_WITHOUT_OPT_IN - self._entry.smem_bytes
        cupy.loads.append((name, cupy.current))

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        stream: Stream | None = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        assert type(grid) is tuple
        assert type(block) is tuple
        grid = tuple(max(1, n) for n in (*grid, 1, 1)[:3])  # a grid of 0 becomes 1 in CuPy
        block = tuple(max(1, n) for n in (*block, 1, 1)[:3])
        handle = self._cupy._current_stream(self._cupy.current).ptr if stream is None else stream.ptr
        if self._cupy.current != self._device:
            raise CUDADriverError("CUDA_ERROR_INVALID_HANDLE: the function was loaded on another device")
        if shared_mem > self.max_dynamic:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        addresses = [pointer(value) for value in args]
        assert len(addresses) >= len(self._entry.params), "the driver would read past the end of kernelParams"
        arguments = bytearray(self._entry.arguments_bytes)
        for (address, _), param in zip(addresses, self._entry.params, strict=False):
            arguments[param.offset : param.offset + param.size] = ctypes.string_at(address, param.size)
        launch = Launch(self._entry.name, self._device, handle, grid, block, shared_mem, bytes(arguments))
        self._cupy.launches.append(launch)
        config = LaunchConfig(grid, block, shared_mem)  # type: ignore[arg-type]
        emulator.execute(
            self._compiled.ptx, self._compiled.key, self._entry.name, config, bytes(arguments), self._cupy.buffers
        )


def record(calls: list[Any]) -> Callable[..., None]:
    """A function that keeps what it was called with."""
    return lambda *args: calls.append(args)
