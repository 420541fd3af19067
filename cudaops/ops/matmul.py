"""`matmul`: every shape torch.matmul takes, on the kernels/matmul_*.cu that matmul_plan.py chooses among."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudaops.launch import arch_of, launch, spec_of
from cudaops.ops import library
from cudaops.ops.matmul_configs import MATMUL_CONFIGS
from cudaops.ops.matmul_plan import Product, plan_matmul, plan_product
from cudaops.ops.matmul_problem import MAX_BATCH_DIMS, problem_of, result_shape
from cudaops.plan import TensorSpec

__all__ = ["MATMUL_CONFIGS", "matmul", "plan_matmul"]


def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The matrix product, as `torch.matmul`.

    Arguments:
        input: `(K)`, `(M, K)` or `(*, M, K)`, any strides.
        other: `(K)`, `(K, N)` or `(*, K, N)`; leading dimensions broadcast, and a 1-d side adds no dimension to the
            result. Both of one dtype, on one device: float16, bfloat16, float32, float64, complex64, complex128, int8,
            uint8, int16, int32 or int64.

    Returns:
        A new contiguous tensor. Halves are added up in float32 and rounded once; the order is one that only shapes and
        strides decide. Integers wrap: those narrower than 32 bits are added up in 32, of which the low ones are kept.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: no kernel for the dtype or the device.
    """
    if not (isinstance(input, torch.Tensor) and isinstance(other, torch.Tensor)):
        library.check_tensors("matmul", input=input, other=other)
    if library.plain(input, other):
        return _kernel(input, other)
    if library.transforms_active():
        return _TransformedMatmul.apply(input, other)
    return _op(input, other)


# ---- run ----


_MOST_KNOWN = 4096
_known: dict[tuple[Any, ...], tuple[tuple[int, ...], Product | None]] = {}  # result's shape; None: nothing to add up


def _kernel(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    conjugate, negative = (False, False), False
    if input.is_conj() or other.is_conj() or input.is_neg() or other.is_neg():
        input, other, conjugate, negative = _without_views(input, other)
    tf32, arch = library.reads_tf32(input), arch_of(input.device)
    key = (library.layout_of(input), library.layout_of(other), arch, conjugate, negative, tf32)
    known = _known.get(key)
    if known is None:
        library.check_together("matmul", input, other)
        fewer = few_batch_dims(input, other)
        known = _planned(spec_of(fewer[0]), spec_of(fewer[1]), arch, conjugate, negative, tf32)
        if fewer[0] is input and fewer[1] is other:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = known
        input, other = fewer
    shape, product = known
    out = torch.empty(shape, dtype=input.dtype, device=input.device)
    if product is None:
        return out.zero_()
    run(product, out, input, other)
    return out


def run(
    product: Product,
    out: torch.Tensor,
    input: torch.Tensor,
    other: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Launch what makes a product."""
    bias, residual = out if bias is None else bias, out if residual is None else residual
    if product.workspace is None:
        launch(product.launches[0], (out, input, other, bias, residual))
        return
    dtype, count = product.workspace
    parts = torch.empty(count, dtype=getattr(torch, dtype), device=out.device)
    launch(product.launches[0], (parts, input, other, parts, parts))
    launch(product.launches[1], (out, parts, bias, residual))


def _planned(
    input: TensorSpec, other: TensorSpec, arch: str, conjugate: tuple[bool, bool], negative: bool, tf32: bool
) -> tuple[tuple[int, ...], Product | None]:
    """The result's shape, and the plan unless there is nothing to add up."""
    shape = result_shape(input.shape, other.shape)
    if 0 in shape or input.shape[-1] == 0:
        return shape, None
    alpha = -1 if negative else 1
    return shape, plan_product(input, other, arch=arch, conjugate=conjugate, alpha=alpha, tf32=tf32)


def _without_views(
    input: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[bool, bool], bool]:
    """The operands as they lie in memory; which of them is to be conjugated; whether the product is to be negated."""
    conjugate = input.is_conj(), other.is_conj()
    input, other = (x.conj() if x.is_conj() else x for x in (input, other))
    if input.is_complex():  # a negative complex view is rare: it is copied
        return input.resolve_neg(), other.resolve_neg(), conjugate, False
    negative = input.is_neg() != other.is_neg()
    input, other = (torch._neg_view(x) if x.is_neg() else x for x in (input, other))
    return input, other, conjugate, negative


def few_batch_dims(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands, copied where they broadcast in more dimensions than the kernel's addressing has."""
    if max(input.dim(), other.dim()) - 2 <= MAX_BATCH_DIMS or input.dim() < 3 or other.dim() < 3:
        return input, other
    if 0 in input.shape or 0 in other.shape or len(problem_of(spec_of(input), spec_of(other)).sizes) <= MAX_BATCH_DIMS:
        return input, other
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    return (
        input.expand(*batch, *input.shape[-2:]).contiguous(),
        other.expand(*batch, *other.shape[-2:]).contiguous(),
    )


# ---- fake ----


def _fake(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    library.check_together("matmul", input, other)
    return input.new_empty(result_shape(input.shape, other.shape))


# ---- autograd ----


class _Matmul(torch.autograd.Function):
    """The product at the Autograd key."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, other)
        with library.below_autograd():
            return _op(input, other)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return _gradients(ctx, grad)


class _TransformedMatmul(torch.autograd.Function):
    """The product under torch.func transforms, which want the context set up apart, and a rule for vmap.

    There is no jvp, so forward-mode AD raises.
    """

    @staticmethod
    def forward(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _op(input, other)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return _gradients(ctx, grad)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], input: torch.Tensor, other: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        return matmul_batched(matmul, in_dims, input, other), 0


def _autograd(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if library.needs_autograd(input, other):
        return _Matmul.apply(input, other)
    with library.below_autograd():
        return _op(input, other)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    input, other = ctx.saved_tensors
    return (
        gradient_of_left(grad, input, other) if ctx.needs_input_grad[0] else None,
        gradient_of_right(grad, input, other) if ctx.needs_input_grad[1] else None,
    )


def gradient_of_left(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The gradient of a product's left operand, in its shape, and in its strides where that is a transposed matrix."""
    grad, left_2d, right_2d = _as_matrices(grad, left, right)
    return _reduced(grad, right_2d.mT.conj(), left_2d, columns_first=_is_transposed(left)).reshape(left.shape)


def gradient_of_right(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The gradient of a product's right operand, likewise."""
    grad, left_2d, right_2d = _as_matrices(grad, left, right)
    return _reduced(left_2d.mT.conj(), grad, right_2d, columns_first=_is_transposed(right)).reshape(right.shape)


def _as_matrices(
    grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if right.dim() == 1:
        grad, right = grad.unsqueeze(-1), right.unsqueeze(-1)
    if left.dim() == 1:
        grad, left = grad.unsqueeze(-2), left.unsqueeze(-2)
    return grad, left, right


def _is_transposed(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.stride(0) == 1 and tensor.stride(1) != 1


def _reduced(a: torch.Tensor, b: torch.Tensor, like: torch.Tensor, columns_first: bool) -> torch.Tensor:
    """`a @ b` summed over the batch dimensions that `like` was broadcast along.

    Where `like` is one matrix the sum is part of the product: (batch, k) is one long k.
    """
    if like.dim() == 2 and max(a.dim(), b.dim()) > 2:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        rows, columns = a.shape[-2], b.shape[-1]
        a = a.expand(*batch, *a.shape[-2:]).movedim(-2, 0).reshape(rows, -1)
        b = b.expand(*batch, *b.shape[-2:]).reshape(-1, columns)
    if columns_first:
        return matmul(b.mT, a.mT).mT
    product = matmul(a, b)
    return product if product.shape == like.shape else product.sum_to_size(like.shape)


def matmul_batched(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    in_dims: tuple[int | None, int | None],
    input: torch.Tensor,
    other: torch.Tensor,
) -> torch.Tensor:
    """The product under vmap, whose dimension comes first in the result.

    It is one more batch dimension, broadcast where a side has none.
    """
    vector_left = input.dim() - (in_dims[0] is not None) == 1
    vector_right = other.dim() - (in_dims[1] is not None) == 1
    input = input.movedim(in_dims[0], 0) if in_dims[0] is not None else input.unsqueeze(0)
    other = other.movedim(in_dims[1], 0) if in_dims[1] is not None else other.unsqueeze(0)
    input = input.unsqueeze(-2) if vector_left else input
    other = other.unsqueeze(-1) if vector_right else other
    rank = max(input.dim(), other.dim())
    input = input.reshape(input.shape[0], *(1,) * (rank - input.dim()), *input.shape[1:])
    other = other.reshape(other.shape[0], *(1,) * (rank - other.dim()), *other.shape[1:])
    out = product(input, other)
    out = out.squeeze(-1) if vector_right else out
    return out.squeeze(-1 if vector_right else -2) if vector_left else out


def _vmap(
    info: Any, in_dims: tuple[int | None, int | None], input: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, int]:
    return matmul_batched(_op, in_dims, input, other), 0


_op = library.define(
    "matmul(Tensor input, Tensor other) -> Tensor",
    kernel=_kernel,
    fake=_fake,
    autograd=_autograd,
    vmap=_vmap,
    autocast=True,
    views=True,
)
