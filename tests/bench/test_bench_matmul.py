from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from cudaops.ops.linear import linear
from cudaops.ops.matmul import matmul
from tests.ops.matmul_reference import check, matrix, random

Against = Callable[..., None]

# target: what a run may take beside torch's own, on the same threads; with the reason the shape is here
MATMUL = {
    "1024^3": ((1024, 1024, 1024), "rows", "rows", 3.5),
    "1024^3, right transposed": ((1024, 1024, 1024), "rows", "columns", 8.0),
    "1024^3, left transposed": ((1024, 1024, 1024), "columns", "rows", 8.0),
    "ragged": ((1000, 1003, 1021), "rows", "rows", 8.0),
    "few columns": ((2048, 10, 512), "rows", "rows", 8.0),
}


@pytest.mark.parametrize(("sizes", "left", "right", "target"), MATMUL.values(), ids=MATMUL)
def test_bench_matmul(
    sizes: tuple[int, int, int],
    left: str,
    right: str,
    target: float,
    against_torch: Against,
    rng: torch.Generator,
) -> None:
    m, n, k = sizes
    input, other = matrix(m, k, torch.float32, rng, left), matrix(k, n, torch.float32, rng, right)
    check(matmul(input, other), input, other)
    against_torch(lambda: matmul(input, other), lambda: torch.matmul(input, other), target=target)


def test_bench_matmul_bfloat16_against_float32(against_torch: Against, rng: torch.Generator) -> None:
    """1024^3 on emulated tensor cores, against torch's float32."""
    input, other = (random((1024, 1024), torch.bfloat16, rng) for _ in range(2))
    check(matmul(input, other), input, other)
    left, right = input.float(), other.float()
    against_torch(lambda: matmul(input, other), lambda: torch.matmul(left, right), target=6.0)


def test_bench_matmul_host_path(against_torch: Against, rng: torch.Generator) -> None:
    """A product of 8 x 8: what a call costs before and after the kernel."""
    input, other = random((8, 8), torch.float32, rng), random((8, 8), torch.float32, rng)
    against_torch(lambda: matmul(input, other), lambda: torch.matmul(input, other), target=60.0)


LINEAR = {
    "resnet's last, one image": ((1, 512, 1000), 20.0),
    "resnet's last, 64 images": ((64, 512, 1000), 20.0),
}


@pytest.mark.parametrize(("sizes", "target"), LINEAR.values(), ids=LINEAR)
def test_bench_linear(sizes: tuple[int, int, int], target: float, against_torch: Against, rng: torch.Generator) -> None:
    rows, features, outputs = sizes
    input, weight, bias = (
        random(shape, torch.float32, rng) for shape in ((rows, features), (outputs, features), (outputs,))
    )
    check(linear(input, weight, bias), input, weight.t(), bias)
    against_torch(lambda: linear(input, weight, bias), lambda: functional.linear(input, weight, bias), target=target)
