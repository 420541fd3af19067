"""Bad accesses are errors that say where, nothing outside the buffers changes, and the process goes on.

Threads, forks and the caller's floating-point mode change no result.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cudaops.errors import EmulatorError
from tests.emulator import harness


@dataclass(frozen=True)
class Fault:
    """A kernel (out, a, p), what it does wrong on the line with the word BAD, and what the message says."""

    name: str
    code: str
    message: str
    block: int = 64
    grid: int = 1

    @property
    def line(self) -> int:
        return next(n for n, line in enumerate(self.code.split("\n"), 1) if "BAD" in line)


OUT, A = 64, 64  # elements of the two arrays

FAULTS = [
    Fault(
        "read one behind the end, by neighbours",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n out[i] = a[i + 1]; // BAD\n}",
        r"thread \(63, 0, 0\) reads 4 bytes at argument1\[64\], but argument1 has 64 elements",
    ),
    Fault(
        "write one behind the end, by neighbours",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n out[i + 1] = a[i]; // BAD\n}",
        r"thread \(63, 0, 0\) writes 4 bytes at argument0\[64\], but argument0 has 64 elements",
    ),
    Fault(
        "negative index of one thread",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n out[i] = a[i - 1]; // BAD\n}",
        r"thread \(0, 0, 0\) reads 4 bytes at argument1\[-1\]",
    ),
    Fault(
        "one index for all",
        "__global__ void k(float* out, const float* a, int p) {\n out[threadIdx.x] = a[p]; // BAD\n}",
        r"thread \(0, 0, 0\) reads 4 bytes at argument1\[64\]",
    ),
    Fault(
        "one place for all",
        "__global__ void k(float* out, const float* a, int p) {\n out[p] = a[0]; // BAD\n}",
        r"writes 4 bytes at argument0\[64\]",
    ),
    Fault(
        "an index without a pattern",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n"
        " int j = i * i % 67;\n out[i] = a[j]; // BAD\n}",
        r"thread \(\d+, 0, 0\) reads 4 bytes at argument1\[6[4-6]\]",
    ),
    Fault(
        "scattered writes",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n"
        " out[i * i % 67] = 1; // BAD\n}",
        r"writes 4 bytes at argument0\[6[4-6]\]",
    ),
    Fault(
        "the last vector of four reaches over the end",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n"
        " if (i < 17) ((float4*)out)[i] = make_float4(1, 2, 3, 4); // BAD\n}",
        r"thread \(16, 0, 0\) writes 16 bytes at argument0\[16\], but argument0 has 16 elements of 16 bytes",
    ),
    Fault(
        "half of an element inside",
        "__global__ void k(float* out, const float* a, int p) {\n"
        " if (threadIdx.x == 5) out[0] = *(const float*)((const char*)a + 254); // BAD\n}",
        r"thread \(5, 0, 0\) reads 4 bytes at .*argument1",
    ),
    Fault(
        "in one lane of divergent code",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n"
        " if (i % 3 == 1) {\n  for (int j = 0; j < i; j++) out[i] = a[j * 2]; // BAD\n }\n}",
        r"thread \((34|37|40|43|46|49|52|55|58|61), 0, 0\) reads 4 bytes at argument1\[\d+\]",
    ),
    Fault(
        "another block",
        "__global__ void k(float* out, const float* a, int p) {\n int i = blockIdx.x * 16 + threadIdx.x;\n"
        " out[i] = 1; // BAD\n}",
        r"block \(4, 0, 0\), thread \(0, 0, 0\) writes 4 bytes at argument0\[64\]",
        block=16, grid=6,
    ),
    Fault(
        "null pointer from memory",
        "__global__ void k(float* out, const float* a, int p) {\n float* q = ((float* const*)a)[0];\n"
        " q[threadIdx.x] = 1; // BAD\n}",
        r"writes 4 bytes at address 0x[0-9a-f]+",
    ),
    Fault(
        "before the null pointer, by an address from memory",
        "__global__ void k(float* out, const float* a, int p) {\n const float* q = ((const float* const*)a)[0];\n"
        " out[threadIdx.x] = q[-1]; // BAD\n}",
        r"reads 4 bytes at address 0xfffffffffffffffc",
    ),
    Fault(
        "an address that is no one's",
        "__global__ void k(float* out, const float* a, int p) {\n const float* q = (const float*)0x123456789000;\n"
        " out[threadIdx.x] = q[threadIdx.x]; // BAD\n}",
        r"reads 4 bytes at address 0x123456789",
    ),
    Fault(
        "far behind",
        "__global__ void k(float* out, const float* a, int p) {\n"
        " out[threadIdx.x] = a[(1ll << 40) + threadIdx.x]; // BAD\n}",
        r"reads 4 bytes at",
    ),
    Fault(
        "shared, one behind the end",
        "__global__ void k(float* out, const float* a, int p) {\n __shared__ float s[64];\n int i = threadIdx.x;\n"
        " s[i] = a[i]; __syncthreads();\n out[i] = s[i + p - 63]; // BAD\n}",
        r"thread \(63, 0, 0\) reads 4 bytes at shared\[256\] \(bytes\), but the block has 256 bytes",
    ),
    Fault(
        "shared, negative",
        "__global__ void k(float* out, const float* a, int p) {\n __shared__ float s[64];\n int i = threadIdx.x;\n"
        " s[i - p + 63] = a[i]; // BAD\n __syncthreads(); out[i] = s[i]; }",
        r"thread \(0, 0, 0\) writes 4 bytes at shared\[-4\]",
    ),
    Fault(
        "shared, without a pattern",
        "__global__ void k(float* out, const float* a, int p) {\n __shared__ float s[64];\n int i = threadIdx.x;\n"
        " s[i * i % 67] = a[i]; // BAD\n __syncthreads(); out[i] = s[i]; }",
        r"writes 4 bytes at shared\[(256|260|264)\]",
    ),
    Fault(
        "misaligned vectors of neighbours",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n if (i > 14) return;\n"
        " float4 v = *(const float4*)(a + 4 * i + p - 63); // BAD\n out[i] = v.x + v.y + v.z + v.w;\n}",
        r"thread \(0, 0, 0\) reads 16 bytes byte 4 of argument1, which is not a multiple of 16 bytes away",
        block=40,
    ),
    Fault(
        "misaligned vector that all read",
        "__global__ void k(float* out, const float* a, int p) {\n"
        " float2 v = *(const float2*)(a + p / 2 - 1); // BAD\n out[threadIdx.x] = v.x + v.y;\n}",
        r"thread \(0, 0, 0\) reads 8 bytes byte 124 of argument1, which is not a multiple of 8 bytes away",
    ),
    Fault(
        "one misaligned vector, without a pattern",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n"
        " *(float2*)(out + (i * i % 29 & ~1) + (i == 37)) = make_float2(1, 2); // BAD\n}",
        r"thread \(37, 0, 0\) writes 8 bytes byte \d+ of argument0, which is not a multiple of 8 bytes away",
    ),
    Fault(
        "misaligned vectors at a stride",
        "__global__ void k(float* out, const float* a, int p) {\n int i = threadIdx.x;\n"
        " if (i < 20) *(float2*)(out + 3 * i) = make_float2(1, 2); // BAD\n}",
        r"thread \(1, 0, 0\) writes 8 bytes byte 12 of argument0, which is not a multiple of 8 bytes away",
    ),
    Fault(
        "misaligned vectors in shared memory",
        "__global__ void k(float* out, const float* a, int p) {\n __shared__ __align__(16) float s[65];\n"
        " int i = threadIdx.x; s[i] = a[i]; if (i == 0) s[64] = 1; __syncthreads();\n"
        " if (i < 16) ((float4*)out)[i] = *(float4*)(s + 4 * i + 1); // BAD\n}",
        r"thread \(0, 0, 0\) reads 16 bytes shared\[4\] \(bytes\), which is not a multiple of 16 bytes away",
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_bad_access_says_where(fault: Fault) -> None:
    kernel = harness.cuda(fault.code)
    out, a = harness.guarded(np.full(OUT, -1, np.float32)), harness.guarded(np.zeros(A, np.float32))
    with pytest.raises(EmulatorError, match=fault.message) as caught:
        kernel(fault.grid, fault.block, out, a, 64)
    harness.assert_guards(out)
    harness.assert_guards(a)
    assert not a.any()
    assert re.match(rf"k: .*k\.cu:{fault.line}: block \(\d+, 0, 0\), thread ", str(caught.value))
    # And on with the same kernel, and with the same arrays.
    harness.run(harness.cuda("__global__ void k(float* out) { out[threadIdx.x] = 3; }"), 1, OUT, out)
    assert (out == 3).all()


def test_aligned_vectors_are_no_fault() -> None:
    """Also where the lanes that would be misaligned do not take part, and where the address is known only at run time."""
    kernel = harness.cuda(
        """__global__ void k(float* out, const float* a, int p) {
        __shared__ __align__(16) float s[68]; int i = threadIdx.x; s[i % 64] = a[i % 64]; __syncthreads();
        float x = 0;
        if (i % 3 == 0) { float2 v = *(const float2*)(a + i % 29 / 6 * 6 + (i % 3)); x += v.x; }
        if (p % 2) x += ((const float2*)(a + p))->x;
        if (i % 4 == 0) { float4 v = *(float4*)(s + i); x += v.w; }
        float4 u = *(const float4*)(a + 4 * (i * i % 13)); x += u.y;
        float2 w = *(const float2*)(a + p - 4); out[i] = x + w.y; }"""
    )
    a = np.arange(64, dtype=np.float32)
    out = np.zeros(40, np.float32)
    harness.run(kernel, 1, 40, out, a, 64)
    i = np.arange(40)
    expected = np.where(i % 3 == 0, i % 29 // 6 * 6, 0) + np.where(i % 4 == 0, i + 3, 0) + 4 * (i * i % 13) + 1 + 61
    np.testing.assert_array_equal(out, expected)


def test_null_pointer_as_an_argument() -> None:
    kernel = harness.cuda("__global__ void k(float* out, const float* a) {\n out[threadIdx.x] = a[threadIdx.x]; }")
    with pytest.raises(EmulatorError, match=r"k\.cu:2: .*thread \(0, 0, 0\) reads 4 bytes at address 0x0\b"):
        kernel(1, 32, np.zeros(32, np.float32), 0)
    with pytest.raises(EmulatorError, match=r"k\.cu:2: .*thread \(0, 0, 0\) writes 4 bytes at address 0x0\b"):
        kernel(1, 32, 0, np.zeros(32, np.float32))


def test_lanes_that_are_right_still_write() -> None:
    """Only the bad lanes are left out; the launch then raises."""
    kernel = harness.cuda("__global__ void k(int* out, int shift) { out[threadIdx.x + shift] = threadIdx.x; }")
    for shift in (1, 5, -3):
        out = harness.guarded(np.full(32, -1, np.int32))
        with pytest.raises(EmulatorError):
            kernel(1, 32, out, shift)
        harness.assert_guards(out)
        expected = np.arange(32) - shift
        inside = (expected >= 0) & (expected < 32)
        assert np.array_equal(out[inside], expected[inside])
        assert (out[~inside] == -1).all()


def test_a_load_outside_gives_zero_and_never_touches_memory() -> None:
    """A page behind the array that may not be read: a wide load of neighbouring lanes must not reach into it."""
    import ctypes
    import mmap

    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    array = np.frombuffer(memory, np.float32, count=24, offset=page - 96)
    try:
        array[:] = np.arange(24)
        kernel = harness.cuda(
            "__global__ void k(float* out, const float* a, int n) { int i = threadIdx.x; if (i < n) out[i] = a[i] * 2; }"
        )
        out = np.zeros(32, np.float32)
        kernel(1, 32, out, array, 24)  # lanes 24 to 31 are masked off
        assert out[:24].tolist() == [2.0 * i for i in range(24)]
        with pytest.raises(EmulatorError, match=r"argument1\[24\]"):
            kernel(1, 32, out, array, 32)
        stores = harness.cuda("__global__ void k(float* out, int n) { int i = threadIdx.x; if (i < n) out[i] = i; }")
        stores(1, 32, array, 24)
        with pytest.raises(EmulatorError, match=r"argument0\[24\]"):
            stores(1, 32, array, 32)
    finally:
        libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 3)
        del array


def test_what_a_kernel_does_not_write_stays_as_it_was() -> None:
    kernel = harness.cuda("__global__ void k(float* out) { if (threadIdx.x % 2) out[threadIdx.x] = 1; }")
    out = harness.poisoned(64, np.float32)
    kernel(1, 64, out)
    assert np.isnan(out[::2]).all()
    assert (out[1::2] == 1).all()


def test_shared_memory_begins_as_poison_in_every_block() -> None:
    kernel = harness.cuda(
        """__global__ void k(float* out) { __shared__ float s[32]; int i = threadIdx.x;
        if (i % 2) s[i] = 1; __syncthreads(); out[blockIdx.x * 32 + i] = s[i]; }"""
    )
    out = np.zeros(128, np.float32)
    harness.run(kernel, 4, 32, out)
    assert np.isnan(out[::2]).all()
    assert (out[1::2] == 1).all()


def test_the_lowest_block_at_fault_is_reported_for_any_number_of_threads() -> None:
    kernel = harness.cuda(
        "__global__ void k(int* out) { int i = blockIdx.x * 32 + threadIdx.x; out[i < 4000 ? i : i + 5000] = 1; }"
    )
    for threads in (1, 2, 4):
        for _ in range(3):
            out = harness.guarded(np.zeros(8000, np.int32))
            with pytest.raises(EmulatorError, match=r"block \((\d+), 0, 0\)"):
                kernel(250, 32, out, threads=threads)
            harness.assert_guards(out)


# -- threads, forks, floating-point mode ------------------------------------------------------------------------------------
SUMS = """__global__ void k(float* out, const float* a, int n) {
    __shared__ float s[64]; int i = threadIdx.x; float x = 0;
    for (int j = blockIdx.x * 64 + i; j < n; j += 64 * gridDim.x) x += a[j] * 1.0001f + sinf(a[j]);
    s[i] = x; __syncthreads();
    for (int d = 32; d; d /= 2) { if (i < d) s[i] += s[i + d]; __syncthreads(); }
    if (i == 0) out[blockIdx.x] = s[0]; }"""


def test_results_are_the_same_bits_for_any_number_of_threads() -> None:
    kernel = harness.cuda(SUMS)
    a = np.random.standard_normal(100_000).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 8, 1):
        out = harness.poisoned(120, np.float32)
        kernel(120, 64, out, a, a.size, threads=threads)
        results.append(out.tobytes())
    assert len(set(results)) == 1


def test_launches_from_many_python_threads() -> None:
    """Several kernels, prepared for the first time by many threads at once, each launch on arrays of its own."""
    codes = [
        f"__global__ void k(int* out, const int* a) {{ int i = blockIdx.x * 64 + threadIdx.x; out[i] = a[i] * {n} + i; }}"
        for n in range(4)
    ]
    kernels = [harness.cuda(code) for code in codes]
    start = threading.Barrier(8)

    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        start.wait()
        for turn in range(12):
            n = (seed + turn) % 4
            a = rng.integers(-1000, 1000, 640).astype(np.int32)
            out = harness.poisoned(640, np.int32)
            kernels[n](10, 64, out, a, threads=1 + turn % 2)
            harness.assert_guards(out)
            if not np.array_equal(out, a * n + np.arange(640)):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_faults_in_many_python_threads_belong_to_their_own_launch() -> None:
    kernel = harness.cuda("__global__ void k(int* out, int n) { if (threadIdx.x == 7) out[n] = 1; else out[0] = 2; }")

    def work(n: int) -> str:
        out = np.zeros(4, np.int32)
        try:
            kernel(1, 32, out, n)
        except EmulatorError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        for n, message in enumerate(pool.map(work, range(20))):
            assert message == "" if n < 4 else f"argument0[{n}]" in message


def test_launches_after_a_fork() -> None:
    """As in a DataLoader worker: the parent has launched on several threads before, and goes on afterwards."""
    kernel = harness.cuda(SUMS)
    a = np.random.standard_normal(50_000).astype(np.float32)
    before = harness.poisoned(60, np.float32)
    for _ in range(3):
        kernel(60, 64, before, a, a.size, threads=2)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that the process has threads: it is what is tested
        child = os.fork()
    if child == 0:
        code = 1
        try:
            out = np.zeros(60, np.float32)
            for _ in range(3):
                kernel(60, 64, out, a, a.size, threads=2)
            fresh = harness.cuda("__global__ void k(int* out) { out[threadIdx.x] = threadIdx.x * 7; }")
            more = np.zeros(32, np.int32)
            fresh(1, 32, more)
            os.write(write, out.tobytes() + more.tobytes())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert data[:240] == before.tobytes()
    assert np.frombuffer(data[240:], np.int32).tolist() == [7 * i for i in range(32)]
    after = harness.poisoned(60, np.float32)
    kernel(60, 64, after, a, a.size, threads=2)
    assert after.tobytes() == before.tobytes()


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        raise AssertionError("this CPU cannot flush subnormals: x86-64 always can")
    yield None
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_flush_denormal_mode_changes_nothing(threads: int, flush_denormal: None) -> None:
    kernel = harness.cuda(
        """__global__ void k(float* out, const float* a, double* wide) { int i = blockIdx.x * 64 + threadIdx.x;
        out[i] = a[i] * 0.5f + a[i]; wide[i] = (double)a[i] * 1e-300; }"""
    )
    bits = np.random.randint(1, 0x7FFFFF, 12_800).astype(np.int32)  # subnormal
    a = bits.view(np.float32)
    out, wide = np.zeros(12_800, np.float32), np.zeros(12_800)
    for _ in range(3):
        harness.run(kernel, 200, 64, out, a, wide, threads=threads)
    words = out.view(np.int32)
    assert (words >= bits).all()
    assert np.array_equal(words, [_half_more(int(b)) for b in bits])
    # The caller's own mode is still what it was.
    assert (torch.from_numpy(a.copy()) * 1.0 == 0).all()


def _half_more(b: int) -> int:
    """b * 0.5 + b on the grid of subnormals, rounded once: an fma."""
    twice = 3 * b
    return twice // 2 + (1 if twice & 1 and twice // 2 & 1 else 0)


def test_the_callers_mode_is_kept_on_a_launch_that_fails(flush_denormal: None) -> None:
    kernel = harness.cuda("__global__ void k(float* out) { out[threadIdx.x] = 1; }")
    with pytest.raises(EmulatorError):
        kernel(1, 64, np.zeros(32, np.float32))
    tiny = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    assert (tiny * 1.0).item() == 0
