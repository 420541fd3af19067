"""CUDA C or PTX text -> the emulator -> NumPy arrays.

Arrays are passed as pointers, surrounded by guard bytes: a launch that changes a byte outside of them fails the test.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudaops.compile import compile_kernel
from cudaops.emulator import Buffer, prepare
from cudaops.emulator.ptx import Variable, parse
from cudaops.plan import KernelSource, LaunchConfig

ARCH = "sm_80"
GUARD = 256  # bytes before and behind every array of a launch
POISON = 0xFF  # of a float or double: NaN
OPCODES_RUN: set[str] = set()  # by the tests of this session

Dim = int | tuple[int, ...]
Argument = Any  # an array, an integer, a float, or the bytes of a struct


@dataclass(frozen=True)
class Kernel:
    """One entry of a PTX module."""

    ptx: str
    key: str
    entry: str
    params: tuple[Variable, ...]

    def __call__(
        self,
        grid: Dim,
        block: Dim,
        *arguments: Argument,
        smem: int = 0,
        threads: int = 1,
        extra: Sequence[Argument] = (),
    ) -> None:
        """Launch on the arrays themselves; `extra` arrays are reachable, but no parameter points to them."""
        config = LaunchConfig(dim3(grid), dim3(block), smem)
        run = prepare(self.ptx, self.key, self.entry, config)
        arrays = [a for a in (*arguments, *extra) if isinstance(a, np.ndarray)]
        buffers = [Buffer(a.ctypes.data, a.nbytes, self.name_of(a, arguments)) for a in arrays]
        run(self.pack(arguments), buffers, threads)

    def name_of(self, array: np.ndarray[Any, Any], arguments: Sequence[Argument]) -> str:
        place = next((n for n, a in enumerate(arguments) if a is array), None)
        return "extra" if place is None else f"argument{place}"

    def pack(self, arguments: Sequence[Argument]) -> bytes:
        """The parameter block: each argument at its parameter's natural alignment."""
        assert len(arguments) == len(self.params), f"{self.entry} takes {len(self.params)} arguments"
        block = bytearray()
        for param, value in zip(self.params, arguments, strict=True):
            block += bytes(-len(block) % param.align)
            block += packed(param, value)
        return bytes(block)


def packed(param: Variable, value: Argument) -> bytes:
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, np.ndarray):
        data = value.ctypes.data.to_bytes(8, "little")
    elif param.type in ("f32", "f64"):
        data = struct.pack("<f" if param.type == "f32" else "<d", value)
    else:
        data = (int(value) & ((1 << 8 * param.size) - 1)).to_bytes(param.size, "little")
    assert len(data) == param.size, f"{param.name} has {param.size} bytes, not {len(data)}"
    return data


def dim3(size: Dim) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def cuda(text: str, entry: str = "k", options: tuple[str, ...] = ()) -> Kernel:
    """Compile CUDA C; `extern "C"` is put in front of `__global__`, and fixed-width integer names are there."""
    source = TYPES + text.replace("__global__", 'extern "C" __global__')
    compiled = compile_kernel(KernelSource(None, entry, text=source, options=options), ARCH)
    return Kernel(compiled.ptx, compiled.key, compiled.name, parse(compiled.ptx).functions[compiled.name].params)


TYPES = (
    "typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16; typedef int i32; "
    "typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;\n"
    "#line 1\n"
)


def ptx(body: str, params: str = ".param .u64 out", entry: str = "k", module: str = "", key: str = "") -> Kernel:
    """PTX: the body of one entry, with directives; `params` without the parentheses."""
    text = (
        f'.version 8.0\n.target {ARCH}\n.address_size 64\n.file 1 "test.cu"\n{module}\n'
        f".visible .entry {entry}({params})\n{{\n{body}\n}}\n"
    )
    return whole_ptx(text, entry, key)


def whole_ptx(text: str, entry: str = "k", key: str = "") -> Kernel:
    key = key or hashlib.sha256(text.encode()).hexdigest()
    return Kernel(text, key, entry, parse(text).functions[entry].params)


def guarded(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of `array` with guard bytes around it; `assert_guards` looks at them."""
    raw = np.full(array.nbytes + 2 * GUARD + 64, 0xA5, dtype=np.uint8)
    start = GUARD + -(raw.ctypes.data + GUARD) % 64
    inside = raw[start : start + array.nbytes]
    inside[:] = np.ascontiguousarray(array).view(np.uint8).ravel()
    return inside.view(array.dtype).reshape(array.shape)


def assert_guards(array: np.ndarray[Any, Any]) -> None:
    raw: Any = array
    while raw.base is not None:
        raw = raw.base
    start = array.ctypes.data - raw.ctypes.data
    assert (raw[:start] == 0xA5).all(), "bytes before the array were changed"
    assert (raw[start + array.nbytes :] == 0xA5).all(), "bytes behind the array were changed"


def poisoned(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """A guarded array of all-ones bits: NaN, or -1."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return guarded(np.full(count, POISON, dtype=np.uint8).view(dtype).reshape(shape))


def run(kernel: Kernel, grid: Dim, block: Dim, *arguments: Argument, **options: Any) -> None:
    """Launch, with every array copied between guards; results are copied back."""
    copies = [guarded(a) if isinstance(a, np.ndarray) else a for a in arguments]
    try:
        kernel(grid, block, *copies, **options)
    finally:
        for a, copy in zip(arguments, copies, strict=True):
            if isinstance(a, np.ndarray):
                assert_guards(copy)
                a[...] = copy
