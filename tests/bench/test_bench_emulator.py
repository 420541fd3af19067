"""What the emulator itself costs: compiling, reloading, launching, checking; memory, and a second thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import cudaops
from cudaops.compile import compile_kernel
from cudaops.emulator import native, runtime
from cudaops.emulator.lanes import Geometry
from cudaops.emulator.options import Checks
from cudaops.launch import DEFAULT_ARCH
from cudaops.ops.conv import conv2d
from cudaops.ops.matmul import matmul
from cudaops.plan import KernelSource

Figure = Callable[..., None]

# A tile of 64 x 64 by 64 threads, 8 x 8 each, unrolled over BK: the way most kernels that people tune are written.
TILE = r"""extern "C" __global__ void tile(float* c, const float* a, const float* b, int n, int depth) {
    __shared__ __align__(16) float s[BK][64], t[BK][64];
    int x = threadIdx.x % 8 * 8, y = threadIdx.x / 8 * 8;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < depth; k0 += BK) {
        #pragma unroll
        for (int i = threadIdx.x; i < BK * 16; i += 64) {
            ((float4*)s)[i] = *(const float4*)(a + (k0 + i / 16) * n + blockIdx.y * 64 + i % 16 * 4);
            ((float4*)t)[i] = *(const float4*)(b + (k0 + i / 16) * n + blockIdx.x * 64 + i % 16 * 4);
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < BK; k++) {
            float u[8], v[8];
            #pragma unroll
            for (int i = 0; i < 8; i++) { u[i] = s[k][y + i]; v[i] = t[k][x + i]; }
            #pragma unroll
            for (int i = 0; i < 8; i++)
                #pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += u[i] * v[j];
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < 8; i++)
        #pragma unroll
        for (int j = 0; j < 8; j += 4)
            *(float4*)(c + (blockIdx.y * 64 + y + i) * n + blockIdx.x * 64 + x + j) =
                make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
}"""


def generated(bk: int) -> runtime.Generated:
    compiled = compile_kernel(KernelSource(None, "tile", text=TILE, options=(f"-DBK={bk}",)), DEFAULT_ARCH)
    return runtime.generate(compiled.ptx, compiled.key, "tile", Geometry((64, 1, 1), True), 0)


@pytest.mark.parametrize(("bk", "instructions", "seconds"), [(16, 1500, 0.7), (64, 5000, 2.0)])
def test_bench_llvm_time(
    bk: int, instructions: int, seconds: float, figure: Figure, best: Callable[..., float]
) -> None:
    info = generated(bk)
    assert abs(info.instructions - instructions) <= instructions / 10, info.instructions
    figure(best(lambda: native.machine_code(info.ir), rounds=3), "s", most=seconds)


def test_bench_reload_from_disk(figure: Figure, best: Callable[..., float], cache_dir: Path) -> None:
    """The machine code of a kernel of 1500 instructions, from the cache to where it can be called."""
    compiled = compile_kernel(KernelSource(None, "tile", text=TILE, options=("-DBK=16",)), DEFAULT_ARCH)

    def load() -> None:
        runtime._codes.clear()
        runtime._code(compiled.ptx, compiled.key, "tile", Geometry((64, 1, 1), True), 0, Checks.BOUNDS)

    load()
    compilations = runtime.compilations
    figure(1e3 * best(load), "ms", most=20)
    assert runtime.compilations == compilations


def test_bench_empty_launch(figure: Figure, best: Callable[..., float]) -> None:
    kernel = cudaops.RawKernel('extern "C" __global__ void k(float* out) {}', "k")
    out = torch.zeros(8)
    figure(1e6 * best(lambda: kernel((1,), (32,), (out,)), calls=200), "us", most=30)


def test_bench_vector_add(figure: Figure, best: Callable[..., float], one_thread: None) -> None:
    """16 M floats, both on one thread into memory that is there."""
    n = 1 << 24
    x, y, out = torch.rand(n), torch.rand(n), torch.zeros(n)
    kernel = cudaops.RawKernel(
        'extern "C" __global__ void add(float* out, const float* x, const float* y, int n) {'
        "int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = x[i] + y[i]; }",
        "add",
    )
    numpys = np.zeros(n, np.float32)
    ours, theirs = best(
        lambda: kernel((n // 256,), (256,), (out, x, y, n)), lambda: np.add(x.numpy(), y.numpy(), out=numpys)
    )
    assert np.array_equal(out.numpy(), numpys)
    figure(ours / theirs, "x NumPy", most=2)


CHECKED: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
    "matmul": lambda: (lambda a, b: lambda: matmul(a, b))(*torch.rand(2, 1024, 1024)),
    "conv": lambda: (lambda x, w: lambda: conv2d(x, w, padding=1))(torch.rand(1, 64, 56, 56), torch.rand(64, 64, 3, 3)),
}


@pytest.mark.parametrize("make", CHECKED.values(), ids=CHECKED)
def test_bench_bounds_checks(
    make: Callable[[], Callable[[], torch.Tensor]], figure: Figure, best: Callable[..., float], one_thread: None
) -> None:
    run = make()

    def unchecked() -> None:
        with cudaops.emulation(bounds=False):
            run()

    checked, plain = best(run, unchecked)
    figure(checked / plain, "x unchecked", most=1.3)


def test_bench_second_thread(figure: Figure, best: Callable[..., float], one_thread: None) -> None:
    a, b = torch.rand(2, 1024, 1024)

    def on(threads: int) -> None:
        torch.set_num_threads(threads)
        matmul(a, b)

    one, two = best(lambda: on(1), lambda: on(2), rounds=25)
    figure(one / two, "x one thread", least=1.7)


MEMORY = """
import pathlib, re, torch, cudaops
from cudaops import emulator
from cudaops.ops.matmul import matmul
def kilobytes(what):
    return int(re.search(what + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
a, b = torch.rand(2, 2048, 2048)
emulator.describe()  # LLVM is there
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kilobytes("VmRSS")
out = matmul(a, b)
print(kilobytes("VmHWM") - before - out.nbytes // 1024)
"""


def test_bench_memory(figure: Figure, cache_dir: Path) -> None:
    """How far a product of 2048^3 takes the peak of a new process beyond its tensors, compiling included."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}  # cache_dir is in it already
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    figure(int(done.stdout) / 1024, "MB", most=100)
