"""mma.sync, ldmatrix and cp.async: a bf16 product by a kernel of the usual form beside torch's in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import cudaops

SIZE, TILE = 1024, 128


def test_bench_bf16_matmul_on_tensor_cores(against_torch: Callable[..., None], rng: torch.Generator) -> None:
    """1024^3. Torch multiplies as many numbers in fp32: its own bf16 may have instructions that few CPUs have."""
    kernel = cudaops.RawKernel(Path(__file__).with_name("matmul_tensor_core.cu").read_text(), "matmul_tensor_core")
    wide = [torch.randn(SIZE, SIZE, generator=rng) for _ in range(2)]
    a, b = (x.bfloat16() for x in wide)
    c = torch.full_like(a, torch.nan)
    grid = (SIZE // TILE, SIZE // TILE)

    def ours() -> None:
        kernel(grid, (128,), (c, a, b, SIZE, SIZE, SIZE))

    ours()
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    summed = SIZE * 2.0**-24 / (1 - SIZE * 2.0**-24) * size  # for f32 sums in any order
    assert ((c.double() - exact).abs() <= summed + 2.0**-8 * (exact.abs() + summed)).all()
    against_torch(ours, lambda: torch.matmul(*wide), target=8.0)
