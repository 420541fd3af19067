"""Many small matrices, several of them a block."""

from __future__ import annotations

import pytest
import torch

import cudaops
from cudaops.launch import spec_of
from cudaops.ops.matmul_plan import plan_matmul
from cudaops.plan import DTYPES
from tests.ops.matmul_reference import check, random

DTYPE = [getattr(torch, name) for name in DTYPES]
SIZES = [(4, 4, 4), (3, 5, 1), (17, 30, 33), (64, 64, 8), (1, 9, 7), (8, 64, 12)]


def entry(batch: int, m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> str:
    a, b = torch.empty(batch, m, k, dtype=dtype, device="meta"), torch.empty(batch, k, n, dtype=dtype, device="meta")
    return plan_matmul(spec_of(a), spec_of(b), arch="sm_80").source.entry


def test_where_it_is_chosen() -> None:
    assert entry(100, 16, 16, 16) == entry(100, 64, 64, 64) == entry(8, 9, 9, 9) == "matmul_batched"
    assert entry(100, 16, 16, 16, torch.bfloat16) == "matmul_batched"
    assert entry(100, 64, 64, 64, torch.bfloat16) == "matmul_mma"
    assert entry(100, 65, 16, 16) == entry(2, 16, 16, 16) == "matmul_simt"


@pytest.mark.parametrize("dtype", DTYPE, ids=str)
def test_every_dtype(dtype: torch.dtype, rng: torch.Generator) -> None:
    for m, n, k in SIZES if dtype == torch.float32 else SIZES[2:3]:
        for transposed in (False, True) if dtype == torch.float32 else (True,):
            a = random((11, m, k), dtype, rng)
            b = random((11, n, k), dtype, rng).mT if transposed else random((11, k, n), dtype, rng)
            with cudaops.sanitize():
                check(cudaops.matmul(a, b), a, b)


def test_layouts_and_broadcast_batches(rng: torch.Generator) -> None:
    a, b = random((3, 1, 20, 12), torch.float32, rng), random((4, 12, 28), torch.float32, rng)
    for left in (a, a.mT.contiguous().mT, a.repeat_interleave(2, -1)[..., ::2]):
        for right in (b, b.mT.contiguous().mT):
            check(cudaops.matmul(left, right), left, right)


def test_a_conjugate_and_the_same_bits_as_the_tiles(rng: torch.Generator) -> None:
    z = random((9, 6, 7), torch.complex64, rng)
    check(cudaops.matmul(z, z.mH), z, z.mH)
    a, b = random((9, 20, 33), torch.float32, rng), random((9, 33, 20), torch.float32, rng)
    assert torch.equal(cudaops.matmul(a, b)[0], cudaops.matmul(a[0], b[0]))
