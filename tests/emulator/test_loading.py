"""Machine code: for a CPU without AVX-512, and from a cache that somebody damaged."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from cudaops import cache
from cudaops.emulator import native, prepare, runtime
from cudaops.emulator.lanes import Geometry
from cudaops.emulator.options import Checks
from cudaops.errors import EmulatorError
from cudaops.plan import LaunchConfig
from tests.emulator import harness

HASWELL = (
    "haswell",
    "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16,"
    "-avx512f,-avx512bw,-avx512dq,-avx512vl,-avx512cd",
)
KERNELS = {
    "matrix product": """__global__ void k(float* c, const float* a, const float* b, int n) {
        __shared__ float as[16][16], bs[16][17];
        int x = threadIdx.x % 16, y = threadIdx.x / 16, col = blockIdx.x * 16 + x, row = blockIdx.y * 16 + y;
        float sum = 0;
        for (int k0 = 0; k0 < n; k0 += 16) {
            as[y][x] = row < n && k0 + x < n ? a[row * n + k0 + x] : 0;
            bs[y][x] = col < n && k0 + y < n ? b[(k0 + y) * n + col] : 0;
            __syncthreads();
            for (int k = 0; k < 16; k++) sum += as[y][k] * bs[k][x];
            __syncthreads();
        }
        if (row < n && col < n) c[row * n + col] = sum;
    }""",
    "a loop past the end": """__global__ void k(float* c, const float* a, const float* b, int n) {
        n = n * n - 5; // the last warp's whole row of lanes lies outside, and its live lanes are kept over a call
        for (int i = threadIdx.x; i < n; i += blockDim.x) c[i] = a[i] * b[i] + a[i / 2];
    }""",
    "divergent loops, integers": """__global__ void k(float* c, const float* a, const float* b, int n) {
        int i = threadIdx.x, s = 0;
        for (u32 x = i + 1; x != 1 && s < n; s++) x = x & 1 ? 3 * x + 1 : x / 2;
        c[i] = s + __popc(i) + (i * 7) % (n + 1) + __shfl_xor_sync(~0u, i, 5);
    }""",
    "math, double, atomics": """__global__ void k(float* c, const float* a, const float* b, int n) {
        int i = threadIdx.x;
        double d = a[i];
        atomicAdd(c, (float)(sqrt(d * d + 1) + exp(d)) + expf(a[i]) + sinf(b[i]) + (float)(long long)(d * 1e10));
        atomicMax((int*)c + 1, n + i);
    }""",
    "halves": """#include <cuda_fp16.h>
    __global__ void k(float* c, const float* a, const float* b, int n) {
        __half2 x = __floats2half2_rn(a[threadIdx.x], b[threadIdx.x]);
        x = __hfma2(x, x, __hmul2(x, __float2half2_rn(0.5f)));
        c[threadIdx.x] = __low2float(x) + __high2float(x);
    }""",
}


@pytest.fixture
def fresh(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a new process: nothing compiled, an empty cache; returns its folder."""
    forget(monkeypatch)
    return cache_dir


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_codes", {})
    monkeypatch.setattr(runtime, "_prepared", {})


@pytest.mark.parametrize("checks", [Checks.NONE, Checks.SANITIZER])
def test_llvm_takes_code_for_avx2_with_any_checks(checks: Checks) -> None:
    kernel = harness.cuda(KERNELS["divergent loops, integers"])
    made = runtime.generate(kernel.ptx, kernel.key, kernel.entry, Geometry((256, 1, 1), True), 0, checks)
    assert native.machine_code(made.ir, HASWELL).startswith(b"\x7fELF")


def test_results_of_avx2_code_are_the_same(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The support functions are made for it as well: how vectors are passed differs."""
    n = 16
    rng = np.random.default_rng()
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))

    def results() -> list[np.ndarray]:
        found = []
        for source in KERNELS.values():
            c = np.zeros(n * n, np.float32)
            harness.run(harness.cuda(source), 1, 256, c, a, b, n)
            found.append(c)
        return found

    here = results()
    np.testing.assert_allclose(here[0].reshape(n, n), a @ b, rtol=1e-3, atol=1e-4)
    forget(monkeypatch)
    monkeypatch.setattr(native, "host", lambda: HASWELL)
    monkeypatch.setattr(native, "identity", lambda: "for another CPU")
    monkeypatch.setattr(runtime, "_support", functools.cache(runtime._support.__wrapped__))
    before = runtime.compilations
    there = results()
    assert runtime.compilations == before + len(KERNELS)
    for x, y in zip(here, there, strict=True):
        np.testing.assert_array_equal(x, y)


SOURCE = "__global__ void k(int* o, int n) { o[threadIdx.x] = threadIdx.x * n + 1; }"


def works(kernel: harness.Kernel) -> None:
    o = harness.poisoned(40, np.int32)
    harness.run(kernel, 1, 40, o, 7)
    np.testing.assert_array_equal(o, np.arange(40) * 7 + 1)


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "emulator").iterdir())


def test_a_kernel_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, before = harness.cuda(SOURCE), runtime.compilations
    works(kernel)
    assert runtime.compilations == before + 1
    works(kernel)
    forget(monkeypatch)
    works(kernel)
    assert runtime.compilations == before + 1


@pytest.mark.parametrize("damage", ["truncated", "emptied", "a bit flipped", "replaced by text"])
def test_a_damaged_file_is_a_miss(damage: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, before = harness.cuda(SOURCE), runtime.compilations
    works(kernel)
    files = entries(fresh)
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        half = data[: len(data) // 2]
        path.write_bytes(
            {"truncated": half, "emptied": b"", "a bit flipped": data, "replaced by text": b"hello"}[damage]
        )
    forget(monkeypatch)
    works(kernel)
    assert runtime.compilations == before + 2
    assert [path.stat().st_size for path in entries(fresh)] == [path.stat().st_size for path in files]
    forget(monkeypatch)
    works(kernel)
    assert runtime.compilations == before + 2


@pytest.mark.parametrize("cut", ["code", "everything behind the notes", "the notes"])
def test_an_object_that_is_none_is_a_miss(cut: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a good checksum, as a broken program might have stored it: never a crash."""
    kernel = harness.cuda(SOURCE)
    works(kernel)
    for path in entries(fresh):
        key = path.name.split(".")[0]
        data = cache.load("emulator", key)
        assert data is not None
        size = int.from_bytes(data[:8], "little")
        notes, code = data[8 : 8 + size], data[8 + size :]
        wrong = {
            "code": data[: 8 + size] + b"\x7fELF" + bytes(len(code)),
            "everything behind the notes": data[: 8 + size],
            "the notes": len(b"{}").to_bytes(8, "little") + b"{}" + code,
        }[cut]
        assert notes
        cache.store("emulator", key, wrong)
    forget(monkeypatch)
    before = runtime.compilations
    works(kernel)
    assert runtime.compilations == before + 1


def test_another_block_shape_is_another_object(fresh: Path) -> None:
    kernel = harness.cuda(SOURCE)
    for block in (32, 40, 64):
        prepare(kernel.ptx, kernel.key, kernel.entry, LaunchConfig((1, 1, 1), (block, 1, 1)))
    assert len(entries(fresh)) == 3


def test_unwritable_cache_costs_time_only(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.write_text("not a folder")
    works(harness.cuda(SOURCE))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 99.9\n.target sm_80\n.address_size 64\n.visible .entry k() { .reg .b32 %r; frobnicate.b32 %r; }",
         "frobnicate"),
        (".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { .reg .b32 %r; add.u32 %r, %r", "."),
        (".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry other() { ret; }", "kernels there: other"),
    ],
)  # fmt: skip
def test_text_that_is_no_kernel_of_ours_is_an_error(text: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        prepare(text, text, "k", LaunchConfig((1, 1, 1), (32, 1, 1)))
