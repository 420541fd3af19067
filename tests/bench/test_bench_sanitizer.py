"""What the sanitizer costs: the same launch with every check, beside it with bounds checks alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cudaops import sanitize
from cudaops.ops.conv import conv2d
from cudaops.ops.matmul import matmul
from tests.ops.matmul_reference import random

Against = Callable[..., None]
Call = Callable[[], object]
TARGET = 12.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Launches that are checked run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def checked(call: Call) -> Call:
    def run() -> object:
        with sanitize():
            return call()

    return run


def test_bench_sanitizer_matmul(against_plain: Against, rng: torch.Generator) -> None:
    """Rows of lanes in shared memory: nearly all accesses are hulls."""
    input, other = (random((256, 256), torch.float32, rng) for _ in range(2))

    def plain() -> object:
        return matmul(input, other)

    against_plain(checked(plain), plain, target=TARGET)


def test_bench_sanitizer_conv(against_plain: Against, rng: torch.Generator) -> None:
    """Addresses taken apart by divisions: many are seen lane by lane."""
    input, weight = random((1, 64, 56, 56), torch.float32, rng), random((64, 64, 3, 3), torch.float32, rng)

    def plain() -> object:
        return conv2d(input, weight, padding=1)

    against_plain(checked(plain), plain, target=TARGET)
