"""What a product is to a kernel: its shape rules, and two matrices with their batch dimensions merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudaops.plan import TensorSpec

MAX_BATCH_DIMS = 3  # that a kernel's addressing takes


def result_shape(input: Sequence[Any], other: Sequence[Any], op: str = "matmul") -> tuple[Any, ...]:
    """The shape of the product; sizes may be symbolic.

    Raises:
        RuntimeError: they cannot be multiplied.
    """
    if not input or not other:
        raise RuntimeError(
            f"both arguments to {op} need to be at least 1D, but they are {len(input)}D and {len(other)}D; "
            "multiply by a scalar with torch.mul"
        )
    inner = other[-2] if len(other) > 1 else other[0]
    if input[-1] != inner:
        rows = input[-2] if len(input) > 1 else 1
        columns = other[-1] if len(other) > 1 else 1
        raise RuntimeError(
            f"{op}: mat1 and mat2 shapes cannot be multiplied ({rows}x{input[-1]} and {inner}x{columns}), from "
            f"{tuple(input)} and {tuple(other)}: the last size of the first must be the "
            f"{'second to last' if len(other) > 1 else 'only'} size of the second"
        )
    batch = _broadcast(input[:-2], other[:-2], op)
    return (*batch, *input[-2:-1], *(other[-1:] if len(other) > 1 else ()))


def _broadcast(left: Sequence[Any], right: Sequence[Any], op: str) -> tuple[Any, ...]:
    rank = max(len(left), len(right))
    left, right = (1,) * (rank - len(left)) + tuple(left), (1,) * (rank - len(right)) + tuple(right)
    for dim, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b and a != 1 and b != 1:
            raise RuntimeError(
                f"{op}: the size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton batch "
                f"dimension {dim}; batch dimensions are equal, or one of them is 1"
            )
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, slots=True)
class Operand:
    """One matrix of the product: `outer` is M or N. Strides in elements, 0 where the size is 1 or broadcast."""

    outer: int
    outer_stride: int
    k_stride: int
    batch: tuple[int, ...]
    alignment: int

    def allows(self, width: int, extent: int, slow_stride: int, width_bytes: int) -> bool:
        """Whether `width` neighbours can be read at once: aligned in all lines and batches, and a divisor of a line."""
        return self.alignment >= width_bytes and not any(n % width for n in (extent, slow_stride, *self.batch))


@dataclass(frozen=True, slots=True)
class Residual:
    """What is added to the product. Strides in elements, 0 where it is broadcast."""

    m_stride: int
    n_stride: int
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A product, its batch dimensions merged as far as strides allow; c is contiguous, or transposed."""

    a: Operand
    b: Operand
    k: int
    sizes: tuple[int, ...]  # of the batch dimensions
    c_m: int
    c_n: int
    residual: Residual | None = None
    k_total: int = 0  # of a split sum, of which `k` is a part's share

    @property
    def extent(self) -> int:
        """Elements of k that an operand has from its first one on."""
        return self.k_total or self.k

    def split(self, parts: int, k: int) -> Problem:
        """The sums of `parts` parts of the products, `k` in each but the last: one more batch dimension, the last."""
        a, b = (replace(x, batch=(*x.batch, k * x.k_stride)) for x in (self.a, self.b))
        return replace(self, a=a, b=b, k=k, sizes=(*self.sizes, parts), residual=None, k_total=self.k)

    @property
    def batches(self) -> int:
        """All batch dimensions' product."""
        return math.prod(self.sizes)

    def swapped(self) -> Problem:
        """The transposed product, c^T = b^T a^T."""
        r = self.residual
        turned = None if r is None else Residual(r.n_stride, r.m_stride, r.batch)
        return Problem(self.b, self.a, self.k, self.sizes, self.c_n, self.c_m, turned, self.k_total)

    def scalars(self, bias_stride: int, *, c_n: bool = True, k_total: bool = True) -> tuple[int, ...]:
        """What follows the pointers in the kernels' arguments, in their order; `c_n`, `k_total` where they take it."""
        fill = (0,) * (MAX_BATCH_DIMS - len(self.sizes))
        sizes = (1,) * (MAX_BATCH_DIMS - len(self.sizes)) + self.sizes
        r = self.residual or Residual(0, 0, (0,) * len(self.sizes))
        return (
            *(self.a.outer_stride, self.a.k_stride, self.b.k_stride, self.b.outer_stride, self.c_m),
            *((self.c_n,) if c_n else ()),
            *(bias_stride, r.m_stride, r.n_stride),
            *(*fill, *self.a.batch),
            *(*fill, *self.b.batch),
            *(*fill, *r.batch),
            self.a.outer * self.b.outer,
            *sizes[1:],
            self.batches,
            *(self.a.outer, self.b.outer, self.k),
            *((self.extent,) if k_total else ()),
        )

    @property
    def largest(self) -> int:
        """The largest size or stride inside a batch: what an index of the kernel must hold."""
        r = self.residual or Residual(0, 0, ())
        return max(
            *(self.a.outer, self.b.outer, self.extent, self.batches, self.c_m, self.c_n, r.m_stride, r.n_stride),
            *(self.a.outer_stride, self.a.k_stride, self.b.k_stride, self.b.outer_stride),
        )


def problem_of(input: TensorSpec, other: TensorSpec, op: str = "matmul", residual: TensorSpec | None = None) -> Problem:
    """The product of two tensors as torch.matmul reads them, and what is added to it, broadcast.

    Raises:
        RuntimeError: they cannot be multiplied, or the residual does not broadcast to the result.
    """
    shape = result_shape(input.shape, other.shape, op)
    a_shape, a_strides = input.shape, input.strides
    b_shape, b_strides = other.shape, other.strides
    r_strides = _expanded(residual, shape, op)
    if len(b_shape) == 1:
        b_shape, b_strides = (*b_shape, 1), (*b_strides, 0)
        r_strides = (*r_strides, 0)
    if len(a_shape) == 1:
        a_shape, a_strides = (1, *a_shape), (0, *a_strides)
        r_strides = (*r_strides[:-1], 0, *r_strides[-1:])
    sizes = _broadcast(a_shape[:-2], b_shape[:-2], op)
    a_batch = _batch_strides(a_shape[:-2], a_strides[:-2], len(sizes))
    b_batch = _batch_strides(b_shape[:-2], b_strides[:-2], len(sizes))
    batch = [dim for dim in zip(sizes, a_batch, b_batch, r_strides[:-2], strict=True) if dim[0] != 1]
    (m, k), n = a_shape[-2:], b_shape[-1]
    a_m, r_m = (a_strides[-2], r_strides[-2]) if m > 1 else (0, 0)
    # Batches that share b and continue a's rows are more rows: one larger product, with b read once.
    while batch and batch[-1][2] == 0 and (m == 1 or (batch[-1][1] == m * a_m and batch[-1][3] == m * r_m)):
        size, stride, _, r_stride = batch.pop()
        a_m, r_m = (a_m, r_m) if m > 1 else (stride, r_stride)
        m *= size
    merged = _merged(batch)
    a = Operand(m, a_m, a_strides[-1] if k > 1 else 0, tuple(dim[1] for dim in merged), input.alignment)
    b_n, b_k = b_strides[-1] if n > 1 else 0, b_strides[-2] if k > 1 else 0
    b = Operand(n, b_n, b_k, tuple(dim[2] for dim in merged), other.alignment)
    added = None
    if residual is not None:
        added = Residual(r_m, r_strides[-1] if n > 1 else 0, tuple(dim[3] for dim in merged))
    return Problem(a, b, k, tuple(dim[0] for dim in merged), n, 1, added)


def _expanded(residual: TensorSpec | None, shape: tuple[int, ...], op: str) -> tuple[int, ...]:
    """The strides of the residual as a tensor of `shape`; zeros where there is none."""
    if residual is None:
        return (0,) * len(shape)
    own = residual.shape
    leading = len(shape) - len(own)
    if leading < 0 or any(r not in (1, s) for r, s in zip(own, shape[leading:], strict=True)):
        raise RuntimeError(
            f"{op}: what is added, of shape {own}, cannot be broadcast to the result, which is {shape}; "
            "sizes are equal, or 1"
        )
    strides = (0 if size == 1 else stride for size, stride in zip(own, residual.strides, strict=True))
    return (*(0,) * leading, *strides)


def _batch_strides(shape: tuple[int, ...], strides: tuple[int, ...], rank: int) -> tuple[int, ...]:
    own = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return (0,) * (rank - len(own)) + own


def _merged(batch: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """(size, stride in each tensor) of the dimensions, joined where all tensors step evenly over neighbours."""
    merged: list[tuple[int, ...]] = []
    for size, *strides in reversed(batch):
        if merged:
            inner_size, *inner = merged[-1]
            if all(stride == inner_size * step for stride, step in zip(strides, inner, strict=True)):
                merged[-1] = (size * inner_size, *inner)
                continue
        merged.append((size, *strides))
    merged.reverse()
    return merged
