"""Any product: random shapes, layouts, dtypes and batches, under the sanitizer, against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import cudaops
from cudaops.launch import total_launches
from cudaops.ops.linear import linear
from cudaops.ops.matmul import matmul
from tests.ops.matmul_reference import ACTIVATIONS, check, random
from tests.ops.test_matmul import DTYPE, INTEGERS, poisoned  # noqa: F401  (a fixture)

# Sizes at which something changes: none, one, a lane's worth, a pack, a warp, a tile, and one more than each.
SIZES = st.one_of(
    st.integers(0, 9), st.sampled_from((16, 17, 31, 32, 33, 63, 64, 65, 72, 127, 128, 129, 136)), st.integers(10, 150)
)


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """A tensor of that shape: its dimensions in any order in memory, with gaps, from any start, some broadcast."""
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.sampled_from((1, 1, 1, 2, 3)))
    gap, start = draw(st.integers(0, 8)), draw(st.integers(0, 4))
    broadcast = draw(st.lists(st.integers(0, len(shape) - 1), max_size=1)) if shape else []
    strides, next_stride = [0] * len(shape), step
    for dim in order:
        strides[dim] = 0 if dim in broadcast else next_stride
        if dim not in broadcast:
            next_stride = next_stride * max(shape[dim], 1) + gap
    count = start + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    x = random((count,), dtype, rng).as_strided(shape, strides, start)
    return x.conj() if dtype.is_complex and draw(st.booleans()) else x


@st.composite
def products(draw: st.DrawFn, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands that torch.matmul takes."""
    dtype = draw(st.sampled_from(DTYPE))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    small = st.lists(st.integers(0, 3), max_size=3 if m * n * k < 10_000 else 1)
    batch = draw(st.one_of(st.just([]), small))
    left, right = ([size if draw(st.integers(0, 3)) else 1 for size in batch] for _ in range(2))
    left, right = left[draw(st.integers(0, len(left))) :], right[draw(st.integers(0, len(right))) :]
    vector = draw(st.sampled_from(("", "", "", "", "left", "right", "both")))
    a = (k,) if vector in ("left", "both") else (*left, m, k)
    b = (k,) if vector in ("right", "both") else (*right, k, n)
    return draw(tensors(a, dtype, rng)), draw(tensors(b, dtype, rng))


def compare(data: st.DataObject, rng: torch.Generator) -> None:
    input, other = data.draw(products(rng))
    before = total_launches()
    with cudaops.sanitize():
        out = matmul(input, other)
    assert out.shape == torch.matmul(*(x.to("meta").float() for x in (input, other))).shape
    assert total_launches() == before + (out.numel() > 0 and input.shape[-1] > 0)
    check(out, input, other)


def compare_linear(data: st.DataObject, rng: torch.Generator) -> None:
    input, turned = data.draw(products(rng).filter(lambda pair: pair[1].dim() <= 2 and not pair[0].is_complex()))
    shape = (*input.shape[:-1], *turned.shape[1:])
    added: list[Any] = []
    for _ in range(2):
        own = tuple(size if data.draw(st.booleans()) else 1 for size in shape)[data.draw(st.integers(0, len(shape))) :]
        added.append(data.draw(st.one_of(st.none(), tensors(own, input.dtype, rng))))
    names = [None, "relu"] if input.dtype in INTEGERS else list(ACTIVATIONS)
    activation = data.draw(st.sampled_from(names))
    with cudaops.sanitize():
        out = linear(input, turned.t(), added[0], residual=added[1], activation=activation)
    check(out, input, turned, *added, activation=activation)


# A failure is not made smaller: each try may compile a kernel.
QUIET: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": (Phase.generate,)}


@given(data=st.data())
@settings(max_examples=20, **QUIET)
def test_matmul_of_anything(data: st.DataObject, rng: torch.Generator) -> None:
    compare(data, rng)


@given(data=st.data())
@settings(max_examples=8, **QUIET)
def test_linear_of_anything(data: st.DataObject, rng: torch.Generator) -> None:
    compare_linear(data, rng)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=200, **QUIET)
def test_matmul_of_anything_at_length(data: st.DataObject, rng: torch.Generator) -> None:
    compare(data, rng)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60, **QUIET)
def test_linear_of_anything_at_length(data: st.DataObject, rng: torch.Generator) -> None:
    compare_linear(data, rng)
