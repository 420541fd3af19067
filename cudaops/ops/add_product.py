"""`add_product`: beta residual + alpha input other, in one kernel; what torch.addmm, addmv, baddbmm and addbmm are."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from cudaops.launch import arch_of, spec_of
from cudaops.ops import library
from cudaops.ops.matmul import few_batch_dims, gradient_of_left, gradient_of_right, matmul, matmul_batched, run
from cudaops.ops.matmul_plan import Product, plan_product
from cudaops.ops.matmul_problem import result_shape
from cudaops.plan import TensorSpec

__all__ = ["add_product"]

Number = int | float | complex


def add_product(
    residual: torch.Tensor, input: torch.Tensor, other: torch.Tensor, *, beta: Number = 1, alpha: Number = 1
) -> torch.Tensor:
    """`beta residual + alpha (input @ other)`, as torch.addmm and its relatives, in one kernel.

    Arguments:
        residual: anything that broadcasts to the result; not read where beta is 0.
        input, other: as `matmul` takes them.
        beta, alpha: for integers the whole part counts, as torch has it.

    Returns:
        A new contiguous tensor.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: shapes, dtypes or devices do not fit together; a factor that is not of the tensors' kind.
        UnsupportedError: no kernel for the dtype or the device.
    """
    if not all(isinstance(x, torch.Tensor) for x in (residual, input, other)):
        library.check_tensors("add_product", residual=residual, input=input, other=other)
    if library.plain(residual, input, other):
        return _kernel(residual, input, other, beta=beta, alpha=alpha)
    if library.transforms_active():
        _result_shape(residual, input, other)
        return _composed(residual, matmul(input, other), *_factors(input, beta, alpha))
    return _op(residual, input, other, beta=beta, alpha=alpha)


def _composed(residual: torch.Tensor, product: torch.Tensor, beta: Number, alpha: Number) -> torch.Tensor:
    """The same of ops that know torch.func's transforms, and for complex factors, which the kernels do not have."""
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (residual if beta == 1 else residual * beta)


def _factors(input: torch.Tensor, *factors: Number) -> list[Number]:
    """As numbers of the tensor's kind.

    Raises:
        RuntimeError: there is no such number.
    """
    if input.is_complex():
        return list(factors)
    if any(isinstance(factor, complex) and factor.imag for factor in factors):
        raise RuntimeError(f"add_product: a complex factor cannot be converted to {input.dtype} without overflow")
    real = [factor.real if isinstance(factor, complex) else factor for factor in factors]
    return [*real] if input.is_floating_point() else [int(factor) for factor in real]


def _result_shape(residual: torch.Tensor, input: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    """The shape of the result; sizes may be symbolic.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    library.check_together("add_product", input, other, residual)
    shape = result_shape(input.shape, other.shape, "add_product")
    leading = len(shape) - residual.dim()
    if leading < 0 or any(r != 1 and r != s for r, s in zip(residual.shape, shape[leading:], strict=True)):
        raise RuntimeError(
            f"add_product: the expanded size of the tensor must match the existing size: {tuple(residual.shape)} "
            f"cannot be broadcast to the result, which is {tuple(shape)}"
        )
    return shape


# ---- run ----


@lru_cache(maxsize=4096)
def _plan(
    residual: TensorSpec | None,
    input: TensorSpec,
    other: TensorSpec,
    beta: int | float,
    alpha: int | float,
    arch: str,
    tf32: bool,
) -> Product:
    return plan_product(input, other, None, residual, arch=arch, beta=beta, alpha=alpha, tf32=tf32, op="add_product")


def _kernel(
    residual: torch.Tensor, input: torch.Tensor, other: torch.Tensor, *, beta: Number = 1, alpha: Number = 1
) -> torch.Tensor:
    shape = _result_shape(residual, input, other)
    beta, alpha = _factors(input, beta, alpha)
    out = input.new_empty(shape)
    if 0 in shape:
        return out
    if input.shape[-1] == 0 or alpha == 0:  # nothing to add up
        return out.zero_() if beta == 0 else out.copy_(residual).mul_(beta)
    if isinstance(beta, complex) or isinstance(alpha, complex):
        return _composed(residual, matmul(input, other), beta, alpha)
    input, other = few_batch_dims(input, other)
    added = None if beta == 0 else spec_of(residual)
    arch, tf32 = arch_of(input.device), library.reads_tf32(input)
    product = _plan(added, spec_of(input), spec_of(other), beta, alpha, arch, tf32)
    run(product, out, input, other, residual=None if added is None else residual)
    return out


# ---- fake ----


def _fake(
    residual: torch.Tensor, input: torch.Tensor, other: torch.Tensor, *, beta: Number = 1, alpha: Number = 1
) -> torch.Tensor:
    _factors(input, beta, alpha)
    return input.new_empty(_result_shape(residual, input, other))


# ---- autograd ----


class _AddProduct(torch.autograd.Function):
    """The op at the Autograd key."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, input: torch.Tensor, other: torch.Tensor, beta: Number, alpha: Number
    ) -> torch.Tensor:
        ctx.save_for_backward(input, other)
        ctx.factors, ctx.residual_shape = (beta, alpha), residual.shape
        with library.below_autograd():
            return _op(residual, input, other, beta=beta, alpha=alpha)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, other = ctx.saved_tensors
        of_residual, of_product = (grad if f == 1 else grad * f.conjugate() for f in ctx.factors)
        return (
            of_residual.sum_to_size(ctx.residual_shape) if ctx.needs_input_grad[0] else None,
            gradient_of_left(of_product, input, other) if ctx.needs_input_grad[1] else None,
            gradient_of_right(of_product, input, other) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _autograd(
    residual: torch.Tensor, input: torch.Tensor, other: torch.Tensor, *, beta: Number = 1, alpha: Number = 1
) -> torch.Tensor:
    if library.needs_autograd(residual, input, other):
        return _AddProduct.apply(residual, input, other, beta, alpha)
    with library.below_autograd():
        return _op(residual, input, other, beta=beta, alpha=alpha)


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    residual: torch.Tensor,
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> tuple[torch.Tensor, int]:
    residual_dim, input_dim, other_dim = in_dims
    if input_dim is None and other_dim is None:
        product = torch.ops.cudaops.matmul.default(input, other).unsqueeze(0)
    else:
        product = matmul_batched(torch.ops.cudaops.matmul.default, (input_dim, other_dim), input, other)
    residual = residual.unsqueeze(0) if residual_dim is None else residual.movedim(residual_dim, 0)
    residual = residual.reshape(residual.shape[0], *(1,) * (product.dim() - residual.dim()), *residual.shape[1:])
    out = _composed(residual, product, *_factors(input, beta, alpha))
    return out.expand(info.batch_size, *out.shape[1:]), 0


_op = library.define(
    "add_product(Tensor residual, Tensor input, Tensor other, *, Scalar beta=1, Scalar alpha=1) -> Tensor",
    kernel=_kernel,
    fake=_fake,
    autograd=_autograd,
    vmap=_vmap,
    autocast=True,
)
