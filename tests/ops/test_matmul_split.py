"""Products whose sum is made in parts: few outputs, a long sum."""

from __future__ import annotations

import pytest
import torch

import cudaops
from cudaops.launch import launch_counts, spec_of
from cudaops.ops.matmul_plan import plan_product
from cudaops.plan import TensorSpec
from tests.ops.matmul_reference import check, matrix, random


def product(m: int, n: int, k: int, dtype: str = "float32", batch: tuple[int, ...] = ()) -> list[str]:
    """The kernels that make it."""

    def spec(*shape: int) -> TensorSpec:
        return spec_of(torch.empty(*batch, *shape, dtype=getattr(torch, dtype), device="meta"))

    return [plan.source.entry for plan in plan_product(spec(m, k), spec(k, n), arch="sm_80").launches]


@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [(64, 64, 4096, True), (64, 64, 1000, False), (4096, 4096, 4096, False), (1, 64, 1 << 20, False)],
    ids=["few outputs", "a short sum", "many outputs", "few rows"],
)
def test_which_sums_are_made_in_parts(m: int, n: int, k: int, parts: bool) -> None:
    assert ("matmul_split_sum" in product(m, n, k)) is parts


def test_parts_take_no_more_than_64_mb() -> None:
    for dtype in ("float32", "bfloat16", "complex128", "int8"):
        for n in (256, 512, 1000, 1024, 1500):
            a = TensorSpec((n, 1 << 20), (1 << 20, 1), dtype, 16)
            made = plan_product(a, TensorSpec((1 << 20, n), (n, 1), dtype, 16), arch="sm_90")
            if made.workspace is not None:
                partial, count = made.workspace
                assert count * getattr(torch, partial).itemsize <= 64 << 20


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int16, torch.complex64]
)
@pytest.mark.parametrize(("left", "right"), [("rows", "rows"), ("columns", "columns")])
def test_matmul_in_parts(dtype: torch.dtype, left: str, right: str, rng: torch.Generator) -> None:
    """Parts that are whole, and a last one that is not."""
    for k in (2048, 1300):
        a, b = matrix(40, k, dtype, rng, left), matrix(k, 24, dtype, rng, right)
        before = launch_counts().get("matmul_split_sum", 0)
        out = cudaops.matmul(a, b)
        assert launch_counts()["matmul_split_sum"] == before + 1
        check(out, a, b)
        assert torch.equal(out, cudaops.matmul(a, b))


def test_batches_in_parts(rng: torch.Generator) -> None:
    a, b = random((2, 1, 20, 1200), torch.float32, rng), random((3, 1200, 17), torch.float32, rng)
    with cudaops.sanitize():
        check(cudaops.matmul(a, b), a, b)


def test_conjugates_in_parts(rng: torch.Generator) -> None:
    a, b = random((20, 1200), torch.complex64, rng), random((17, 1200), torch.complex64, rng)
    check(cudaops.matmul(a.conj(), b.mH), a.conj(), b.mH)


def test_what_finishes_the_sum(rng: torch.Generator) -> None:
    x, w = random((20, 1500), torch.float64, rng), random((33, 1500), torch.float64, rng)
    bias, residual = random((33,), torch.float64, rng), random((20, 33), torch.float64, rng)
    for activation in (None, "relu", "gelu"):
        out = cudaops.linear(x, w, bias, activation=activation, residual=residual)
        check(out, x, w.T, bias, residual=residual, activation=activation)
