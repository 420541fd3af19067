"""Every kind of fault is found at its line, with block, thread and element named; its repaired twin is silent."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cudaops.emulator import Buffer, Finding, prepare, sanitize
from cudaops.errors import EmulatorError, SanitizerError
from cudaops.plan import LaunchConfig
from tests.emulator import harness
from tests.emulator.harness import Dim, Kernel

BAD, OTHER = "// BAD", "// OTHER"


def launch(
    kernel: Kernel, grid: Dim, block: Dim, *arguments: Any, smem: int = 0, names: Sequence[str] = (),
    uninitialised: Sequence[int] = (),
) -> None:  # fmt: skip
    """A launch whose arrays have names, between guards; those in `uninitialised` count as not written."""
    copies = [harness.guarded(a) if isinstance(a, np.ndarray) else a for a in arguments]
    buffers = [
        Buffer(a.ctypes.data, a.nbytes, names[n] if names else f"argument{n}", n not in uninitialised)
        for n, a in enumerate(copies)
        if isinstance(a, np.ndarray)
    ]
    config = LaunchConfig(harness.dim3(grid), harness.dim3(block), smem)
    try:
        prepare(kernel.ptx, kernel.key, kernel.entry, config)(kernel.pack(copies), buffers, 1)
    finally:
        for a, copy in zip(arguments, copies, strict=True):
            if isinstance(a, np.ndarray):
                harness.assert_guards(copy)
                a[...] = copy


def findings_of(*arguments: Any, **options: Any) -> list[Finding]:
    """The findings of `launch` under the sanitizer; none if it is silent."""
    try:
        with sanitize():
            launch(*arguments, **options)
    except SanitizerError as error:
        assert error.findings
        assert all(isinstance(f, Finding) for f in error.findings)
        assert all(f.message in str(error) for f in error.findings[:10])
        return [f for f in error.findings if isinstance(f, Finding)]
    return []


def line_of(source: str, mark: str) -> int:
    (line,) = [n for n, text in enumerate(source.splitlines(), 1) if text.rstrip().endswith(mark)]
    return line


@dataclass(frozen=True)
class Fault:
    """A kernel k(float* o, const float* x, int n) with a fault in the line marked BAD, and the same without it.

    `o` and `x` have `elements` floats. `repair` is what replaces `broken` in the source.
    """

    name: str
    check: str
    source: str
    broken: str
    repair: str
    says: str  # a pattern of the message
    grid: Dim = 2
    block: Dim = 64
    elements: int = 128
    n: int = 128
    smem: int = 0
    at: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None  # block, thread
    argument: str | None = None
    index: int | None = None
    uninitialised: tuple[int, ...] = field(default=())

    def arguments(self) -> tuple[Any, ...]:
        x = np.arange(1, self.elements + 1, dtype=np.float32)
        return np.zeros(self.elements, np.float32), x, self.n


FAULTS = [
    Fault(
        "out of bounds by one, read", "memcheck",
        """__global__ void k(float* o, const float* x, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            float v = i < n
                ? x[i + 1] // BAD
                : 0.f;
            o[i] = v;
        }""",
        "x[i + 1]", "x[i]", r"x\[128\], but x has 128 elements of 4 bytes",
        at=((1, 0, 0), (63, 0, 0)),
    ),
    Fault(
        "out of bounds by one, write", "memcheck",
        """__global__ void k(float* o, const float* x, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i <= n)
                o[i] = 1.f; // BAD
        }""",
        "i <= n", "i < n", r"writes 4 bytes at o\[100\], but o has 100 elements",
        elements=100, n=100, at=((1, 0, 0), (36, 0, 0)),
    ),
    Fault(
        "negative index", "memcheck",
        """__global__ void k(float* o, const float* x, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            o[i] =
                x[i - 1]; // BAD
        }""",
        "x[i - 1]", "x[max(i - 1, 0)]", r"reads 4 bytes at x\[-1\]", at=((0, 0, 0), (0, 0, 0)),
    ),
    Fault(
        "misaligned float4", "memcheck",
        """__global__ void k(float* o, const float* x, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i >= n / 4 - 1) return;
            float4 v =
                *(const float4*)(x + 4 * i + 1); // BAD
            o[i] = v.x + v.y + v.z + v.w;
        }""",
        "4 * i + 1", "4 * i", r"reads 16 bytes .* not a multiple of 16 bytes", at=((0, 0, 0), (0, 0, 0)),
        argument="x",
    ),
    Fault(
        "missing first __syncthreads", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            s[t] = x[i]; // OTHER
            // SYNC
            o[i] = s[63 - t]; // BAD
        }""",
        "// SYNC", "__syncthreads();", r"reads shared\[\d+\] .* in a race with", argument="shared",
    ),
    Fault(
        "missing second __syncthreads", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            float sum = 0.f;
            #pragma unroll 1
            for (int round = 0; round < 2; round++) {
                s[t] = x[i] + round; // BAD
                __syncthreads();
                sum += s[63 - t]; // OTHER
                // SYNC
            }
            o[i] = sum;
        }""",
        "// SYNC", "__syncthreads();", r"writes shared\[\d+\] .* in a race with", argument="shared",
    ),
    Fault(
        "race between warps, plain writes", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[32];
            int t = threadIdx.x;
            if (t < 32) s[t] = 0.f;
            __syncthreads();
            s[t % 32] = x[t]; // BAD
            __syncthreads();
            o[blockIdx.x * blockDim.x + t] = s[t % 32];
        }""",
        "s[t % 32] = x[t];", "if (t < 32) s[t] = x[t];", r"writes shared\[0\] .* in a race with thread \(0, 0, 0\)",
        at=((0, 0, 0), (32, 0, 0)), argument="shared", index=0,
    ),
    Fault(
        "race between blocks, read and write", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            if (threadIdx.x == 0) {
                float v = x[blockIdx.x];
                o[0] = v; // BAD
            }
        }""",
        "o[0]", "o[blockIdx.x]", r"writes o\[0\] in a race with block \(0, 0, 0\)", at=((1, 0, 0), (0, 0, 0)),
        argument="o", index=0,
    ),
    Fault(
        "race between blocks, one reads what another wrote", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            int b = blockIdx.x;
            if (threadIdx.x == 0) {
                o[b] = x[b]; // OTHER
                o[64 + b] =
                    ((volatile float*)o)[b ^ 1]; // BAD
            }
        }""",
        "b ^ 1", "b", r"reads o\[0\] in a race with block \(0, 0, 0\)", at=((1, 0, 0), (0, 0, 0)),
        argument="o", index=0,
    ),
    Fault(
        "same-value race between blocks", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            if (threadIdx.x == 0)
                o[5] = 1.f; // BAD
        }""",
        "threadIdx.x == 0", "threadIdx.x == 0 && blockIdx.x == 0", r"writes o\[5\] in a race with block \(0, 0, 0\)",
        at=((1, 0, 0), (0, 0, 0)), argument="o", index=5,
    ),
    Fault(
        "same-value race in shared memory", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[4];
            s[2] = 1.f; // BAD
            __syncthreads();
            o[blockIdx.x * blockDim.x + threadIdx.x] = s[2];
        }""",
        "s[2] = 1.f;", "if (threadIdx.x == 0) s[2] = 1.f;", r"writes shared\[8\]", argument="shared", index=8,
    ),
    Fault(
        "uninitialised shared read", "initcheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            if (t != 40) s[t] = x[i];
            __syncthreads();
            o[i] =
                s[63 - t]; // BAD
        }""",
        "t != 40", "t >= 0", r"reads 4 bytes shared\[160\] .* which nothing has written",
        at=((0, 0, 0), (23, 0, 0)), argument="shared", index=160,
    ),
    Fault(
        "uninitialised output read", "initcheck",
        """__global__ void k(float* o, const float* x, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            o[i] // NOTHING
                += x[i]; // BAD
        }""",
        "+= x[i]", "= x[i]", r"reads 4 bytes o\[0\], which nothing has written", uninitialised=(0,),
        at=((0, 0, 0), (0, 0, 0)), argument="o", index=0,
    ),
    Fault(
        "divergent barrier", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            s[t] = x[i];
            if (t % 32 < 16)
                __syncthreads(); // BAD
            o[i] = s[t];
        }""",
        "if (t % 32 < 16)", "if (n > 16)", r"in divergent code is not reached by every thread",
    ),
    Fault(
        "shared memory, out of bounds", "memcheck",
        """extern __shared__ float s[];
        __global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            s[t] = x[i];
            __syncthreads();
            o[i] =
                s[t + 1]; // BAD
        }""",
        "s[t + 1]", "s[(t + 1) % 64]", r"shared\[256\] \(bytes\), but the block has 256 bytes", smem=256,
        at=((0, 0, 0), (63, 0, 0)),
    ),
    Fault(
        "unordered exchange in a warp", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            s[t] = x[i]; // OTHER
            // SYNC
            o[i] = ((volatile float*)s)[t ^ 1]; // BAD
        }""",
        "// SYNC", "__syncwarp();", r"reads shared\[\d+\] .* in a race with thread", argument="shared",
    ),
    Fault(
        "__syncwarp where warps exchange", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            s[t] = x[i]; // OTHER
            __syncwarp();
            o[i] = s[t ^ 32]; // BAD
        }""",
        "__syncwarp();", "__syncthreads();", r"reads shared\[\d+\] .* in a race with thread", argument="shared",
    ),
    Fault(
        "atomic and plain access to a word", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ int s;
            if (threadIdx.x == 0) s = 0;
            __syncthreads();
            atomicAdd(&s, 1); // OTHER
            // SYNC
            o[blockIdx.x * blockDim.x + threadIdx.x] =
                *(volatile int*)&s; // BAD
        }""",
        "// SYNC", "__syncthreads();", r"reads shared\[0\] .* in a race with", argument="shared", index=0,
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
def test_fault_is_found_where_it_is(fault: Fault) -> None:
    assert fault.source.count(fault.broken) == 1
    kernel = harness.cuda(fault.source)
    found = findings_of(
        kernel, fault.grid, fault.block, *fault.arguments(), smem=fault.smem, names=("o", "x", "n"),
        uninitialised=fault.uninitialised,
    )  # fmt: skip
    line = line_of(fault.source, BAD)
    here = [f for f in found if f.line == line and f.check == fault.check]
    assert here, found
    assert {f.check for f in found} == {fault.check}
    first = here[0]
    assert first.kernel == "k"
    assert first.message.startswith(f"k: {first.file}:{line}: ")
    assert re.search(fault.says, first.message), first.message
    if fault.at is not None:
        assert (first.block, first.thread) == fault.at
    if fault.check != "synccheck":
        assert f"block {first.block}, thread {first.thread}" in first.message
    if fault.argument is not None:
        assert first.argument == fault.argument
    if fault.index is not None:
        assert first.index == fault.index
    if OTHER in fault.source:
        assert any(re.search(rf" at {re.escape(f.file)}:{line_of(fault.source, OTHER)}\b", f.message) for f in here)


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
def test_repaired_kernel_is_silent(fault: Fault) -> None:
    kernel = harness.cuda(fault.source.replace(fault.broken, fault.repair))
    assert not findings_of(
        kernel, fault.grid, fault.block, *fault.arguments(), smem=fault.smem, names=("o", "x", "n"),
        uninitialised=fault.uninitialised,
    )  # fmt: skip
