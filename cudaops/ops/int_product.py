"""`int_product`: int8 or uint8 products in int32, as torch._int_mm."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from cudaops.errors import UnsupportedError
from cudaops.launch import arch_of, launch, spec_of
from cudaops.ops import library
from cudaops.ops.matmul import few_batch_dims, matmul, matmul_batched
from cudaops.ops.matmul_plan import plan_matmul
from cudaops.ops.matmul_problem import result_shape
from cudaops.plan import Plan, TensorSpec

__all__ = ["int_product"]

_DTYPES = ("int8", "uint8")


def int_product(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The matrix product of int8 or uint8 in int32, nothing cut off, as `torch._int_mm`.

    Arguments:
        input, other: as `matmul` takes them, both int8 or both uint8.

    Returns:
        A new contiguous int32 tensor.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: another dtype.
    """
    if not (isinstance(input, torch.Tensor) and isinstance(other, torch.Tensor)):
        library.check_tensors("int_product", input=input, other=other)
    return _op(input, other)


@lru_cache(maxsize=4096)
def _plan(input: TensorSpec, other: TensorSpec, arch: str) -> Plan | None:
    try:
        return plan_matmul(input, other, arch=arch, out="int32", op="int_product")
    except UnsupportedError:  # no tensor cores for them
        return None


def _kernel(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    out = _fake(input, other)
    if out.numel() == 0 or input.shape[-1] == 0:
        return out.zero_()
    input, other = few_batch_dims(input, other)
    plan = _plan(spec_of(input), spec_of(other), arch_of(input.device))
    if plan is None:
        return matmul(input.int(), other.int())
    launch(plan, (out, input, other, out, out))
    return out


def _fake(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    library.check_together("int_product", input, other, dtypes=_DTYPES)
    return input.new_empty(result_shape(input.shape, other.shape, "int_product"), dtype=torch.int32)


def _autograd(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    with library.below_autograd():  # integers have no gradient
        return _op(input, other)


def _vmap(
    info: Any, in_dims: tuple[int | None, int | None], input: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, int]:
    return matmul_batched(_op, in_dims, input, other), 0


_op = library.define(
    "int_product(Tensor input, Tensor other) -> Tensor",
    kernel=_kernel,
    fake=_fake,
    autograd=_autograd,
    vmap=_vmap,
)
