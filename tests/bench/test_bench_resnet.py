"""A whole model on our kernels beside the same model by torch, and what a converted layer costs when it is tiny."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torchvision import models

import cudaops

Against = Callable[..., None]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_bench_resnet18_forward(against_torch: Against, rng: torch.Generator) -> None:
    """One image of 3 x 224 x 224, fp32."""
    torchs = models.resnet18(weights=None).eval()
    ours = cudaops.convert(copy.deepcopy(torchs), strict=True)
    image = torch.randn(1, 3, 224, 224, generator=rng)
    expected = torchs(image)
    assert (ours(image) - expected).abs().max() <= 1e-4 * expected.abs().max()
    against_torch(lambda: ours(image), lambda: torchs(image), target=6.0)
    assert [row.name for row in cudaops.report(ours) if row.calls == 0] == []


TINY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 8), (4, 8)),
    "Conv2d": (lambda: nn.Conv2d(2, 2, 1), (1, 2, 4, 4)),
}


@pytest.mark.parametrize(("make", "shape"), TINY.values(), ids=TINY)
def test_bench_converted_layer_host_path(
    make: Callable[[], nn.Module], shape: tuple[int, ...], against_torch: Against, rng: torch.Generator
) -> None:
    """A layer so small that only what a call costs before and after the kernel is seen."""
    torchs = make()
    ours = cudaops.convert(copy.deepcopy(torchs))
    x = torch.randn(shape, generator=rng)
    torch.testing.assert_close(ours(x), torchs(x))
    against_torch(lambda: ours(x), lambda: torchs(x), target=60.0)
