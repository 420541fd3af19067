"""`linear`: input weight^T + bias with an activation, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from cudaops.errors import UnsupportedError
from cudaops.launch import arch_of, launch, spec_of
from cudaops.ops import library
from cudaops.ops.matmul import (
    few_batch_dims,
    gradient_of_left,
    gradient_of_right,
    matmul,
    matmul_batched,
)
from cudaops.ops.matmul_plan import plan_matmul
from cudaops.ops.matmul_problem import result_shape
from cudaops.plan import Plan, TensorSpec

__all__ = ["linear", "plan_linear"]

_FUSED = ("relu",)  # in the kernel's store
_APPLIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # after it, by torch's elementwise op
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`activation(input weight^T + bias)`, as `torch.nn.functional.linear`.

    Arguments:
        input: `(*, in_features)`, any strides.
        weight: `(out_features, in_features)`, or `(in_features)`, then the last dimension is dropped from the result.
        bias: `(out_features)`, or anything that broadcasts to the result.
        activation: None, `'relu'`, which the kernel applies, or `'gelu' 'gelu_tanh' 'silu' 'sigmoid' 'tanh'`, which
            torch applies to its result.
        residual: not supported yet.

    Returns:
        A new contiguous tensor `(*, out_features)`.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: no such activation.
        RuntimeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: no kernel for the dtype or the device; a residual.
    """
    if activation is not None and activation not in _FUSED:
        if activation not in _APPLIED:
            known = ", ".join((*_FUSED, *_APPLIED))
            raise ValueError(f"linear: activation must be None or one of {known}, got {activation!r}")
        return _APPLIED[activation](linear(input, weight, bias, residual=residual))
    if residual is not None:
        raise UnsupportedError("linear: residual is not in the kernel yet, got one; add it to the result")
    if not (isinstance(input, torch.Tensor) and isinstance(weight, torch.Tensor)):
        library.check_tensors("linear", input=input, weight=weight)
    if not (bias is None or isinstance(bias, torch.Tensor)):
        library.check_tensors("linear", input=input, weight=weight, bias=bias)
    if library.transforms_active():
        return _composed(input, weight, bias, activation)
    return _op(input, weight, bias, activation=activation)


def _composed(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """The same of ops that know torch.func's transforms; the products are still ours."""
    _result_shape(input, weight, bias)
    out = matmul(input, weight.t())
    out = out if bias is None else out + bias
    return torch.relu(out) if activation == "relu" else out


# ---- shapes ----


def _result_shape(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Any, ...]:
    """The shape of the result; sizes may be symbolic.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    library.check_together("linear", input, weight, *(() if bias is None else (bias,)))
    if weight.dim() > 2:
        raise RuntimeError(
            f"linear: weight must be (out_features, in_features), got {weight.dim()}D {tuple(weight.shape)}"
        )
    shape = result_shape(input.shape, tuple(reversed(weight.shape)), "linear")
    if bias is not None:
        _check_bias(bias.shape, shape)
    return shape


def _check_bias(bias: torch.Size, shape: tuple[Any, ...]) -> None:
    leading = len(shape) - len(bias)
    if leading < 0 or any(b != 1 and b != s for b, s in zip(bias, shape[leading:], strict=True)):
        raise RuntimeError(
            f"linear: bias of shape {tuple(bias)} does not match the result, which is {tuple(shape)}; "
            "bias is (out_features)"
        )


def _is_row(bias: torch.Tensor) -> bool:
    """Whether `bias` is the same for every row, so that the kernel can add it."""
    return all(size == 1 for size in bias.shape[:-1])


# ---- plan ----


def plan_linear(
    input: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None = None,
    *,
    arch: str,
    activation: str | None = None,
    config: str | None = None,
) -> Plan:
    """Plan one launch: tensors (out, input, weight, bias). Arguments and errors as `plan_matmul`'s, weight as
    `linear`'s."""
    transposed = TensorSpec(weight.shape[::-1], weight.strides[::-1], weight.dtype, weight.alignment)
    return plan_matmul(input, transposed, bias, arch=arch, activation=activation, config=config, op="linear")


# ---- run ----


@lru_cache(maxsize=4096)
def _plan(input: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, activation: str | None, arch: str) -> Plan:
    return plan_linear(input, weight, bias, arch=arch, activation=activation)


def _kernel(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    shape = _result_shape(input, weight, bias)
    out = input.new_empty(shape)
    if out.numel() == 0:
        return out
    if input.shape[-1] == 0 or (bias is not None and not _is_row(bias)):
        # nothing to add up, or an addition of whole matrices: torch's elementwise ops finish
        out = out.zero_() if input.shape[-1] == 0 else _kernel(input, weight)
        out = out if bias is None else out.add_(bias)
        return out.relu_() if activation == "relu" else out
    input, weight = few_batch_dims(input, weight)
    specs = spec_of(input), spec_of(weight), None if bias is None else spec_of(bias)
    plan = _plan(*specs, activation, arch_of(input.device))
    launch(plan, (out, input, weight, input if bias is None else bias))
    return out


# ---- fake ----


def _fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    return input.new_empty(_result_shape(input, weight, bias))


# ---- autograd ----


class _Linear(torch.autograd.Function):
    """The op at the Autograd key."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
    ) -> torch.Tensor:
        with library.below_autograd():
            out = _op(input, weight, bias, activation=activation)
        ctx.save_for_backward(input, weight, out if activation == "relu" else None)
        ctx.bias_shape = None if bias is None else bias.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, out = ctx.saved_tensors
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        return (
            gradient_of_left(grad, input, weight.t()) if ctx.needs_input_grad[0] else None,
            gradient_of_right(grad, input, weight.t()).t() if ctx.needs_input_grad[1] else None,
            grad.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[2] else None,
            None,
        )


def _autograd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    if library.needs_autograd(input, weight, bias):
        return _Linear.apply(input, weight, bias, activation)
    with library.below_autograd():
        return _op(input, weight, bias, activation=activation)


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[torch.Tensor, int]:
    input_dim, weight_dim, bias_dim = (*in_dims, None)[:3]
    if weight_dim is None and bias_dim is None and input_dim is not None:
        # one weight for all: vmap's dimension is one more of input's
        return _op(input.movedim(input_dim, 0), weight, bias, activation=activation), 0
    if weight_dim is not None:
        weight = weight.movedim(weight_dim, 0)
    transposed = weight.mT if weight.dim() - (weight_dim is not None) == 2 else weight
    out = matmul_batched(
        torch.ops.cudaops.matmul.default, (input_dim, None if weight_dim is None else 0), input, transposed
    )
    if bias is not None:
        bias = bias.unsqueeze(0) if bias_dim is None else bias.movedim(bias_dim, 0)
        out = out + bias.reshape(bias.shape[0], *(1,) * (out.dim() - bias.dim()), *bias.shape[1:])
    return torch.relu(out) if activation == "relu" else out, 0


_op = library.define(
    "linear(Tensor input, Tensor weight, Tensor? bias=None, *, str? activation=None) -> Tensor",
    kernel=_kernel,
    fake=_fake,
    autograd=_autograd,
    vmap=_vmap,
)
