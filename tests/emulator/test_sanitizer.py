"""Every kind of fault is found at its line, with block, thread and element named; its repaired twin is silent."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from cudaops.emulator import Buffer, Finding, prepare, sanitize
from cudaops.emulator.access import Accesses
from cudaops.errors import EmulatorError, LaunchError, SanitizerError
from cudaops.kernel import RawKernel
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
    raised = None
    try:
        with sanitize():
            launch(*arguments, **options)
    except SanitizerError as error:
        raised = error
    if raised is None:
        return []
    found = [f for f in raised.findings if isinstance(f, Finding)]
    assert found
    assert len(found) == len(raised.findings)
    assert all(f.message in str(raised) for f in found[:10])
    return found


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
    uninitialised: tuple[int, ...] = ()
    also: frozenset[str] = frozenset()  # checks that have a finding as well

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
        also=frozenset({"initcheck"}),  # the first warp reads what the second one writes later
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
            s[n / 64] = (float)n; // BAD
            __syncthreads();
            o[blockIdx.x * blockDim.x + threadIdx.x] = s[n / 64];
        }""",
        "s[n / 64] = (float)n;", "if (threadIdx.x == 0) s[n / 64] = (float)n;", r"writes shared\[8\]",
        argument="shared", index=8,
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
            o[i] += x[i]; // BAD
        }""",
        "+=", "=", r"reads 4 bytes o\[0\], which nothing has written", uninitialised=(0,),
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
        "warps at different barriers", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            if (t < 32) {
                o[i] = x[i];
                __syncthreads(); // OTHER
                o[i] += 1;
            } else {
                __syncthreads(); // BAD
                o[i] = -x[i];
            }
        }""",
        "t < 32", "n < 32", r"warp 1 waits at bar.* while warp 0 waits at bar", at=((0, 0, 0), (32, 0, 0)),
    ),
    Fault(
        "shuffle from an inactive lane", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            float v = x[i];
            if (t % 32 < 17)
                v += __shfl_down_sync(0x1FFFFu, v, 1); // BAD
            o[i] = v;
        }""",
        "v, 1)", "v, 1, 1)", r"shfl\.sync\.down\.b32 the value of lane 17, which does not take part",
        at=((0, 0, 0), (16, 0, 0)),
    ),
    Fault(
        "shuffle from a lane that does not exist", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x;
            float v = x[t];
            v += __shfl_sync(0xFFFFFFFFu, v, n + (t & 1)); // BAD
            o[t + 40 * blockIdx.x] = v;
        }""",
        "n + (t & 1)", "n / 9 + (t & 1)", r"the value of lane 8, which", block=40, n=7, at=((0, 0, 0), (33, 0, 0)),
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
        also=frozenset({"initcheck"}),
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
    Fault(
        "a copy that nobody waits for", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x;
            unsigned to = (unsigned)__cvta_generic_to_shared(s + t);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(x + t) : "memory"); // OTHER
            asm volatile("cp.async.commit_group;" ::: "memory");
            // WAIT
            __syncthreads();
            o[blockIdx.x * blockDim.x + t] =
                s[63 - t]; // BAD
        }""",
        "// WAIT", 'asm volatile("cp.async.wait_group 0;" ::: "memory");',
        r"reads 4 bytes shared\[252\] \(bytes\), which cp\.async.* is still to bring", argument="shared", index=252,
    ),
    Fault(
        "a copy that each thread but not the block waits for", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x;
            unsigned to = (unsigned)__cvta_generic_to_shared(s + t);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(x + t) : "memory"); // OTHER
            asm volatile("cp.async.wait_all;" ::: "memory");
            // SYNC
            o[blockIdx.x * blockDim.x + t] =
                s[t ^ 1]; // BAD
        }""",
        "// SYNC", "__syncthreads();", r"reads shared\[4\] .* in a race with", argument="shared",
    ),
    Fault(
        "uninitialised local read", "initcheck",
        """__global__ void k(float* o, const float* x, int n) {
            float a[8];
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            #pragma unroll 1
            for (int j = 0; j < n / 32; j++) a[j * 3 & 7] = x[j];
            o[i] =
                a[(i + n) & 7]; // BAD
        }""",
        "n / 32", "n / 16", r"reads 4 bytes of its local memory, which nothing has written",
        at=((0, 0, 0), (2, 0, 0)),
    ),
    Fault(
        "uninitialised local read, all lanes at one place", "initcheck",
        """__global__ void k(float* o, const float* x, int n) {
            double a[8];
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            #pragma unroll 1
            for (int j = 0; j < n / 32; j++)
                if (i != 77 || j != 1) a[j] = x[j];
            o[i] =
                (float)a[n / 128]; // BAD
        }""",
        "i != 77 || j != 1", "i != 77 || j != 2", r"reads 8 bytes of its local memory, which nothing has written",
        at=((1, 0, 0), (13, 0, 0)),
    ),
    Fault(
        "local memory of the block before", "initcheck",
        """__global__ void k(float* o, const float* x, int n) {
            float a[8];
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (blockIdx.x == 0)
                a[i & 7] = x[i];
            o[i] =
                a[(i + n) & 7]; // BAD
        }""",
        "blockIdx.x == 0", "i >= 0", r"reads 4 bytes of its local memory", at=((1, 0, 0), (0, 0, 0)),
    ),
    Fault(
        "shuffle with a member missing", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            float v = x[i];
            if (t % 32 < 16)
                v += __shfl_xor_sync(0x1FFFFu, v, 1); // BAD
            o[i] = v;
        }""",
        "0x1FFFFu", "0xFFFFu", r"names lane 16 as a member of shfl\.sync\.\S*, which that lane does not execute",
        at=((0, 0, 0), (0, 0, 0)),
    ),
    Fault(
        "vote without being a member", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            unsigned members = 0xFFFFFFFFu >> n / 128; // all but lane 31
            o[i] =
                (float)__ballot_sync(members, x[i] > 3); // BAD
        }""",
        "n / 128", "n / 256", r"executes vote\.sync\.\S* without being in its own member mask",
        at=((0, 0, 0), (31, 0, 0)),
    ),
    Fault(
        "match with a member missing", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            if (t & 1)
                o[i] = (float)__match_any_sync(0xFFFFFFFFu, t >> 2); // BAD
            o[i] += x[i];
        }""",
        "0xFFFFFFFFu", "0xAAAAAAAAu", r"names lane 0 as a member of match\.\S*,", at=((0, 0, 0), (1, 0, 0)),
    ),
    Fault(
        "redux with a member missing", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            if (t % 32 >= 8)
                o[i] = (float)__reduce_add_sync(0xFFFFFF80u, t); // BAD
            o[i] += x[i];
        }""",
        "0xFFFFFF80u", "0xFFFFFF00u", r"names lane 7 as a member of redux\.\S*,",
        at=((0, 0, 0), (8, 0, 0)),
    ),
    Fault(
        "__syncwarp with a member missing", "synccheck",
        """__global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            o[i] = x[i];
            if (t % 32 < 31) {
                __syncwarp(); // BAD
                o[i] += x[i ^ 1];
            }
            o[i] *= 2;
        }""",
        "__syncwarp()", "__syncwarp(0x7FFFFFFFu)", r"names lane 31 as a member of bar\.warp\.sync,",
        at=((0, 0, 0), (0, 0, 0)),
    ),
    Fault(
        "race between blocks, by a pointer to shared memory or a buffer", "racecheck",
        """__global__ void k(float* o, const float* x, int n) {
            __shared__ float s[64];
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
            s[t] = 0;
            float* where = x[i] > n ? s + t : o + (i & ~blockDim.x); // shared, or a buffer
            *where = x[i]; // BAD
        }""",
        "i & ~blockDim.x", "i", r"writes o\[0\] in a race with block \(0, 0, 0\)", at=((1, 0, 0), (0, 0, 0)),
        argument="o", index=0, n=1000,
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
    assert {f.check for f in found} == {fault.check} | fault.also
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


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
def test_finding_is_the_same_lane_by_lane(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at whole hulls of granules finds the same as what looks at each lane's."""
    kernel = harness.cuda(fault.source)
    found = []
    for by_lanes in (False, True):
        if by_lanes:
            monkeypatch.setattr(Accesses, "hull_known", lambda *_: False)
            kernel = replace(kernel, key=kernel.key + " by lanes")
        found.append(
            findings_of(
                kernel, fault.grid, fault.block, *fault.arguments(), smem=fault.smem, names=("o", "x", "n"),
                uninitialised=fault.uninitialised,
            )
        )  # fmt: skip
    assert found[0] == found[1]


def sizes(values: int) -> tuple[Any, ...]:
    return np.zeros(values, np.float32), np.random.default_rng().standard_normal(values).astype(np.float32)


CLEAN = {
    "tree reduction": """__global__ void k(float* o, const float* x) {
        __shared__ float s[256];
        int t = threadIdx.x;
        s[t] = x[blockIdx.x * 256 + t];
        __syncthreads();
        for (int k = 128; k; k /= 2) {
            if (t < k) s[t] += s[t + k];
            __syncthreads();
        }
        if (t == 0) o[blockIdx.x] = s[0];
    }""",
    "chars of one word by different threads": """__global__ void k(float* o, const float* x) {
        __shared__ unsigned char s[256];
        int t = threadIdx.x, i = blockIdx.x * 256 + t;
        s[t] = (unsigned char)(7 * t);
        ((unsigned char*)o)[i] = s[t];
        __syncthreads();
        ((unsigned char*)o)[1024 + i] = s[255 - t];
    }""",
    "shorts of one word by different threads": """__global__ void k(float* o, const float* x) {
        __shared__ short s[256];
        int t = threadIdx.x, i = blockIdx.x * 256 + t;
        s[t ^ 1] = (short)x[i];
        ((short*)o)[i] = s[t ^ 1];
        s[t ^ 1] = 3;
    }""",
    "chars of one word by different blocks": """__global__ void k(float* o, const float* x) {
        if (threadIdx.x == 0) {
            ((unsigned char*)o)[blockIdx.x] = 1;
            ((unsigned char*)o)[blockIdx.x] += 1;
        }
    }""",
    "atomics of all threads on one word": """__global__ void k(float* o, const float* x) {
        __shared__ int s;
        if (threadIdx.x == 0) s = 0;
        __syncthreads();
        atomicAdd(&s, 2);
        atomicMax(&s, 1);
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(o, (float)s);
        atomicAdd(o + 1, x[threadIdx.x]);
    }""",
    "exchange in a warp, ordered": """__global__ void k(float* o, const float* x) {
        __shared__ float s[256];
        int t = threadIdx.x, i = blockIdx.x * 256 + t;
        s[t] = x[i];
        __syncwarp();
        float v = s[t ^ 1];
        __syncwarp();
        s[t] = v;
        __syncwarp();
        o[i] = v + s[t ^ 7];
    }""",
    "exchange in a warp by shuffles": """__global__ void k(float* o, const float* x) {
        int i = blockIdx.x * 256 + threadIdx.x;
        float v = x[i];
        for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
        o[i] = v;
    }""",
    "all read one word": """__global__ void k(float* o, const float* x) {
        __shared__ float s[2];
        int t = threadIdx.x;
        for (int n = 0; n < 3; n++) {
            if (t == n) s[n & 1] = x[n];
            __syncthreads();
            o[blockIdx.x * 256 + t] = s[n & 1] + x[0];
        }
    }""",
    "blocks read what all of them read": """__global__ void k(float* o, const float* x) {
        float sum = 0;
        for (int n = 0; n < 32; n++) sum += x[n];
        o[blockIdx.x * 256 + threadIdx.x] = sum;
    }""",
    "a padded struct, copied in local memory": """struct S { char c; double d; float f; };
    __global__ void k(float* o, const float* x) {
        S a[12], b[12];
        int t = threadIdx.x, i = blockIdx.x * 256 + t;
        for (int j = 0; j < 12; j++) {
            S& s = a[(j + t) % 12];
            s.c = j;
            s.d = x[i];
            s.f = 2;
        }
        memcpy(b, a, sizeof b);
        S s = b[t * 5 % 12];
        b[(t + 1) % 12] = s;
        o[i] = (float)s.d + s.c + b[t % 12].f;
    }""",
    "collectives of the lanes that are there": """__global__ void k(float* o, const float* x) {
        int i = blockIdx.x * 256 + threadIdx.x;
        unsigned here = __activemask();
        if (x[i] > 0) {
            unsigned some = __activemask();
            o[i] = __shfl_sync(some, x[i], __ffs(some) - 1) + __popc(__match_any_sync(some, i & 3));
            __syncwarp(some);
        }
        if (threadIdx.x % 32 > 20) return;
        o[i] += (float)__popc(__ballot_sync(here, x[i] < 0)) + (float)__reduce_max_sync(0xFFFFFFFFu, i);
    }""",
    "more barriers than the clock counts": """__global__ void k(float* o, const float* x) {
        __shared__ float s[256];
        int t = threadIdx.x, i = blockIdx.x * 256 + t;
        s[t] = x[i];
        __syncthreads();
        float sum = s[t ^ 64];
        if (blockIdx.x == 0 && t < 32) {
            for (int n = 0; n < (1 << 20) + 5; n++) {
                __syncwarp();
                sum += *(volatile float*)(s + (t ^ (n & 31)));
            }
        }
        __syncthreads();
        s[t ^ 32] = sum;
        __syncthreads();
        o[i] = s[t];
    }""",
    "each thread its own local array": """__global__ void k(float* o, const float* x) {
        float a[8];
        int i = blockIdx.x * 256 + threadIdx.x;
        for (int n = 0; n < 8; n++) a[n] = x[i] * n;
        float sum = 0;
        for (int n = 0; n < 8; n++) sum += a[(n * (i | 1)) & 7];
        o[i] = sum;
    }""",
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_kernel_is_silent(name: str) -> None:
    assert not findings_of(harness.cuda(CLEAN[name]), 4, 256, *sizes(1024))


def test_barriers_of_a_block_of_one_warp_count() -> None:
    source = """__global__ void k(float* o, const float* x) {
        __shared__ float s[32];
        int t = threadIdx.x;
        s[t] = x[t];
        __syncthreads();
        o[t] = s[31 - t];
    }"""
    assert not findings_of(harness.cuda(source), 1, 32, *sizes(32))
    found = findings_of(harness.cuda(source.replace("__syncthreads();", "")), 1, 32, *sizes(32))
    assert {f.check for f in found} == {"racecheck"}


LAST_BLOCK = """__global__ void k(float* o, float* part, unsigned* done) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        part[blockIdx.x] = (float)blockIdx.x;
        __threadfence();
        last = atomicAdd(done, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0;
        for (int i = 0; i < gridDim.x; i++)
            sum += ((volatile float*)part)[i]; // BAD
        o[0] = sum;
    }
}"""


def test_race_is_found_when_the_clock_has_started_again() -> None:
    source = """__global__ void k(float* o, const float* x) {
        __shared__ float s[64];
        int t = threadIdx.x;
        s[t] = x[t]; // OTHER
        if (t < 32) {
            for (int n = 0; n < (1 << 20) + 5; n++) __syncwarp();
            s[t] = x[t + 1];
        }
        o[t] = s[t ^ 32]; // BAD
    }"""
    found = findings_of(harness.cuda(source), 1, 64, *sizes(128), names=("o", "x"))
    assert {(f.check, f.line, f.argument) for f in found} == {
        ("initcheck", line_of(source, BAD), "shared"),  # the first warp reads what the second one writes later
        ("racecheck", line_of(source, OTHER), "shared"),
        ("racecheck", line_of(source, BAD), "shared"),
    }


def test_buffers_that_overlap_are_one_memory() -> None:
    source = """__global__ void k(float* a, float* b) {
        if (threadIdx.x) return;
        if (blockIdx.x == 0) a[9] = 1; // OTHER
        else b[1] = 2; // BAD
    }"""
    kernel, both = harness.cuda(source), np.zeros(16, np.float32)
    a, b = both[:12], both[8:]
    for second, racy in ((b, True), (b[3:], False)):
        buffers = [Buffer(v.ctypes.data, v.nbytes, name) for v, name in ((a, "a"), (second, "b"))]
        found: list[object] = []
        try:
            with sanitize():
                config = LaunchConfig((2, 1, 1), (32, 1, 1), 0)
                prepare(kernel.ptx, kernel.key, kernel.entry, config)(kernel.pack((a, second)), buffers, 1)
        except SanitizerError as error:
            found = error.findings
        assert [(f.check, f.line) for f in found if isinstance(f, Finding)] == (
            [("racecheck", line_of(source, BAD))] if racy else []
        )


def test_printing_from_local_memory_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    source = """__global__ void k(float* o) {
        char c = 'x';
        printf("%c %d %f|", c, (int)threadIdx.x, 1.5);
    }"""
    assert not findings_of(harness.cuda(source), 1, 2, np.zeros(1, np.float32))
    assert capsys.readouterr().out == "x 0 1.500000|x 1 1.500000|"


def test_last_block_done_is_silent() -> None:
    o, part, done = np.zeros(1, np.float32), np.zeros(9, np.float32), np.zeros(1, np.uint32)
    assert not findings_of(harness.cuda(LAST_BLOCK), 9, 64, o, part, done)
    assert o[0] == 36


def test_last_block_done_without_a_fence_is_a_race() -> None:
    source = LAST_BLOCK.replace("__threadfence();", "")
    arrays = np.zeros(1, np.float32), np.zeros(9, np.float32), np.zeros(1, np.uint32)
    found = findings_of(harness.cuda(source), 9, 64, *arrays, names=("o", "part", "done"))
    assert [(f.check, f.line, f.argument) for f in found] == [("racecheck", line_of(source, BAD), "part")]


def test_a_release_orders_like_a_fence() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *flag, int *data, int *out) {
        int t = threadIdx.x, v;
        if (blockIdx.x == 0) {
            data[t] = 3 * t;
            __syncthreads();
            if (t == 0) asm volatile("st.release.gpu.b32 [%0], 1;" :: "l"(flag) : "memory");
        } else {
            if (t == 0) do asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (!v);
            __syncthreads();
            out[t] = data[t];
        }
    }""")
    out = np.zeros(64, np.int32)
    assert not findings_of(kernel, 2, 64, np.zeros(1, np.int32), np.zeros(64, np.int32), out)
    np.testing.assert_array_equal(out, 3 * np.arange(64))


def test_a_volatile_flag_in_shared_memory_that_lanes_poll_is_no_race() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *out) {
        __shared__ volatile int turn;
        __shared__ int sum;
        int t = threadIdx.x;
        if (t == 0) { turn = 0; sum = 0; }
        __syncthreads();
        bool done = false;
        while (!done)
            if (turn == t) { sum += t; out[t] = sum; __threadfence_block(); turn = t + 1; done = true; }
    }""")
    out = np.zeros(40, np.int32)
    assert not findings_of(kernel, 1, 40, out)
    np.testing.assert_array_equal(out, np.cumsum(np.arange(40)))


def test_a_plain_load_before_a_compare_and_swap_is_no_race() -> None:
    """As the CUDA programming guide writes atomics of one's own."""
    kernel = harness.cuda("""
    struct Pair { int n; float v; };
    __device__ void add(float *at, float v) {
        int *p = (int *)at, old = *p, assumed;
        do {
            assumed = old;
            old = atomicCAS(p, assumed, __float_as_int(v + __int_as_float(assumed)));
        } while (assumed != old);
    }
    __global__ void k(float *x, Pair *pairs) {
        __shared__ float s;
        __shared__ unsigned short count;
        int t = threadIdx.x;
        if (t == 0) { s = 0; count = 0; }
        __syncthreads();
        add(&s, 1);
        unsigned short old = count, assumed;
        do { assumed = old; old = atomicCAS(&count, assumed, (unsigned short)(assumed + 1)); } while (assumed != old);
        add(&pairs[t % 2].v, 2);
        __syncthreads();
        if (t == 0) add(x, s + count);
    }""")
    x, pairs = np.zeros(1, np.float32), np.zeros(4, np.float32)
    assert not findings_of(kernel, 3, 66, x, pairs)
    assert x[0] == 3 * 2 * 66
    np.testing.assert_array_equal(pairs, [0, 198, 0, 198])


def test_chars_of_one_word_overlapping_are_a_race() -> None:
    source = """__global__ void k(float* o, const float* x) {
        __shared__ unsigned char s[256];
        int t = threadIdx.x;
        s[t == 77 ? 78 : t] = (unsigned char)t; // BAD
        __syncthreads();
        o[t] = s[t == 77 ? 78 : t];
    }"""
    found = findings_of(harness.cuda(source), 1, 256, *sizes(256))
    assert {(f.check, f.line, f.argument, f.index) for f in found} == {
        ("racecheck", line_of(source, BAD), "shared", 78)
    }


def test_launch_ends_before_it_raises_and_bad_lanes_do_nothing() -> None:
    source = "__global__ void k(int* o, int n) { int i = blockIdx.x * 64 + threadIdx.x; o[i] = i + 1; }"
    o = np.zeros(100, np.int32)
    found = findings_of(harness.cuda(source), 2, 64, o, 100, names=("o", "n"))
    assert [(f.check, f.block, f.thread) for f in found] == [("memcheck", (1, 0, 0), (36, 0, 0))]
    np.testing.assert_array_equal(o, np.arange(1, 101))


def test_several_faults_are_all_listed() -> None:
    source = """__global__ void k(float* o, const float* x) {
        __shared__ float s[64];
        int t = threadIdx.x;
        if (t < 63) s[t] = x[t]; // OTHER
        o[t] = s[63 - t]; // BAD
        o[t + 1] = 2; // LAST
    }"""
    found = findings_of(harness.cuda(source), 1, 64, *sizes(64), names=("o", "x"))
    assert {(f.check, f.line) for f in found} == {
        ("racecheck", line_of(source, OTHER)),
        ("racecheck", line_of(source, BAD)),
        ("initcheck", line_of(source, BAD)),
        ("memcheck", line_of(source, "// LAST")),
    }


def test_thread_of_a_3d_block_is_named() -> None:
    source = """__global__ void k(int* o) {
        int t = threadIdx.x + 5 * (threadIdx.y + 3 * threadIdx.z);
        o[t == 44 && blockIdx.z == 1 && blockIdx.y == 2 ? -1 : t] // BAD
            ; if (blockIdx.x == 0 && blockIdx.y == 2 && blockIdx.z == 1)
            o[t == 44 ? -3 : t] = 1; // OTHER
    }"""
    o = np.zeros(60, np.int32)
    (found,) = findings_of(harness.cuda(source), (2, 3, 2), (5, 3, 4), o, names=("o",))
    assert (found.check, found.line) == ("memcheck", line_of(source, OTHER))
    assert (found.block, found.thread) == ((0, 2, 1), (4, 2, 2))
    assert "o[-3]" in found.message


def test_global_variables_are_known_by_name() -> None:
    source = """__device__ int table[10];
    __global__ void k(int* o, int n) {
        o[threadIdx.x] =
            table[threadIdx.x + n]; // BAD
    }"""
    (found,) = findings_of(harness.cuda(source), 1, 8, np.zeros(8, np.int32), 3)
    assert (found.check, found.line, found.thread) == ("memcheck", line_of(source, BAD), (7, 0, 0))
    assert "table[10], but table has 10 elements" in found.message
    assert not findings_of(harness.cuda(source), 1, 8, np.zeros(8, np.int32), 2)


def test_local_array_out_of_bounds() -> None:
    source = """__global__ void k(int* o, int n) {
        int a[4];
        for (int i = 0; i < 4; i++) a[i] = o[i];
        o[threadIdx.x] =
            a[o[threadIdx.x] + n]; // BAD
    }"""
    kernel = harness.cuda(source)
    (found,) = findings_of(kernel, 1, 4, np.arange(4, dtype=np.int32), 1000000)
    assert (found.check, found.line) == ("memcheck", line_of(source, BAD))
    assert "outside its local memory" in found.message
    assert not findings_of(kernel, 1, 4, np.arange(4, dtype=np.int32), 0)


def test_too_much_shared_memory_is_refused_before_anything_runs() -> None:
    source = 'extern "C" __global__ void k(float* o) { extern __shared__ float s[]; s[0] = 1; o[0] = s[0]; }'
    kernel, o = RawKernel(source, "k"), torch.zeros(1)
    with sanitize():
        with pytest.raises(LaunchError, match=r"shared memory"):
            kernel((1,), (32,), (o,), shared_mem=1 << 20)
        assert o[0] == 0
        with pytest.raises(SanitizerError, match=r"racecheck: k: "):  # all lanes write s[0]
            kernel((1,), (32,), (o,), shared_mem=1 << 10)
        kernel((1,), (1,), (o,), shared_mem=1 << 10)
    assert o[0] == 1


def test_what_is_in_force_at_the_launch_counts() -> None:
    """A kernel is prepared once; that it ran without checks before, or with them, changes nothing."""
    kernel = RawKernel('extern "C" __global__ void k(float* o) { o[0] = 1; }', "k")
    o = torch.zeros(1)
    for _ in range(2):
        kernel((2,), (1,), (o,))
        with sanitize(), pytest.raises(SanitizerError, match="racecheck"):
            kernel((2,), (1,), (o,))


def test_environment_variable_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = next(f for f in FAULTS if f.name == "missing first __syncthreads")
    kernel = harness.cuda(fault.source)
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("CUDAOPS_SANITIZE", value)
        try:
            launch(kernel, 2, 64, *fault.arguments())
            raised = False
        except SanitizerError:
            raised = True
        assert raised is expected, value


def test_outside_of_sanitize_only_bounds_are_checked() -> None:
    race = next(f for f in FAULTS if f.name == "same-value race between blocks")
    launch(harness.cuda(race.source), race.grid, race.block, *race.arguments())
    bad = next(f for f in FAULTS if f.name == "negative index")
    with pytest.raises(EmulatorError, match=r"argument1\[-1\]"):
        launch(harness.cuda(bad.source), bad.grid, bad.block, *bad.arguments())


def test_a_trap_is_reported() -> None:
    source = """__global__ void k(int* o) {
        if (o[0] == 7)
            asm volatile("trap;"); // BAD
        o[0] = 1;
    }"""
    (found,) = findings_of(harness.cuda(source), 1, 1, np.full(1, 7, np.int32))
    assert found.line == line_of(source, BAD)
    assert "trap" in found.message


# -- random kernels ---------------------------------------------------------------------------------------------------
THREADS = 128


def random_kernel(rng: random.Random, steps: int) -> tuple[str, list[int]]:
    """A clean kernel of steps that end in a barrier, and the lines of barriers that are needed.

    Each step writes an array of shared memory by a permutation of the threads, which the next one reads by another.
    """
    lines = ["__global__ void k(float* o, const float* x) {", f"__shared__ float a[{THREADS}], b[{THREADS}];"]
    lines += ["int t = threadIdx.x; float v = x[t];"]
    needed = []
    for step in range(steps):
        target = "ab"[step % 2]
        put, take = (rng.choice((1, 32, 64, 65, 33, 96)) for _ in range(2))
        if rng.random() < 0.3:
            lines.append(f"if (t < {rng.randrange(1, THREADS)}) v += 1;")
        lines.append(f"{target}[t ^ {put}] = v;")
        lines.append("__syncthreads();")
        # The one who reads is another warp than the one who wrote.
        if (put ^ take) & ~31:
            needed.append(len(lines))
        lines.append(f"v = {rng.choice(('v +', 'v -', ''))} {target}[t ^ {take}];")
    lines.append("o[t] = v; }")
    return "\n".join(lines), needed


@pytest.mark.parametrize("_", range(4))
def test_random_clean_kernel_is_silent_and_without_a_barrier_is_not(seed: int, _: int) -> None:
    rng = random.Random(seed)
    source, needed = random_kernel(rng, rng.randrange(3, 8))
    arrays = sizes(THREADS)
    plain, checked = arrays[0].copy(), arrays[0].copy()
    launch(harness.cuda(source), 1, THREADS, plain, arrays[1])
    assert not findings_of(harness.cuda(source), 1, THREADS, checked, arrays[1]), source
    np.testing.assert_array_equal(plain, checked)
    if needed:
        lines = source.splitlines()
        lines[rng.choice(needed) - 1] = ""
        found = findings_of(harness.cuda("\n".join(lines)), 1, THREADS, *arrays)
        assert any(f.check == "racecheck" and f.argument == "shared" for f in found), "\n".join(lines)
