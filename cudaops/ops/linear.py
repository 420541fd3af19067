"""`linear`: input weight^T + bias with an activation, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from cudaops.launch import arch_of, spec_of
from cudaops.ops import library
from cudaops.ops.matmul import (
    few_batch_dims,
    gradient_of_left,
    gradient_of_right,
    matmul,
    matmul_batched,
    run,
)
from cudaops.ops.matmul_plan import Product, plan_matmul, plan_product
from cudaops.ops.matmul_problem import result_shape
from cudaops.plan import Plan, TensorSpec

__all__ = ["linear", "plan_linear"]

_APPLIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
# Their gradients, from the output; those of the others need what went in.
_BACKWARD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda grad, out: torch.ops.aten.threshold_backward(grad, out, 0),
    "sigmoid": torch.ops.aten.sigmoid_backward,
    "tanh": torch.ops.aten.tanh_backward,
}


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`activation(input weight^T + bias + residual)`, as `torch.nn.functional.linear`, in one kernel.

    Arguments:
        input: `(*, in_features)`, any strides; dtypes as `matmul`'s.
        weight: `(out_features, in_features)`, or `(in_features)`, then the last dimension is dropped from the result.
        bias: `(out_features)`, or anything that broadcasts to the result.
        activation: None, `'relu'`, `'gelu'`, `'gelu_tanh'`, `'silu'`, `'sigmoid'` or `'tanh'`, applied before the
            result is rounded to its dtype. Where gradients are wanted through gelu, gelu_tanh or silu, torch applies it
            to the kernel's result, which backward needs.
        residual: anything that broadcasts to the result.

    Returns:
        A new contiguous tensor `(*, out_features)`.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: no such activation.
        RuntimeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: no kernel for the dtype or the device, or no such activation for integers or complex numbers.
    """
    if activation is not None and activation not in _APPLIED:
        raise ValueError(f"linear: activation must be None or one of {', '.join(_APPLIED)}, got {activation!r}")
    if not (isinstance(input, torch.Tensor) and isinstance(weight, torch.Tensor)):
        library.check_tensors("linear", input=input, weight=weight)
    for name, extra in (("bias", bias), ("residual", residual)):
        if not (extra is None or isinstance(extra, torch.Tensor)):
            library.check_tensors("linear", input=input, weight=weight, **{name: extra})
    if library.plain(input, weight, bias, residual):
        return _kernel(input, weight, bias, residual, activation=activation)
    if library.transforms_active():
        return _composed(input, weight, bias, residual, activation)
    if activation is not None and activation not in _BACKWARD and library.needs_autograd(input, weight, bias, residual):
        return _APPLIED[activation](_op(input, weight, bias, residual))
    return _op(input, weight, bias, residual, activation=activation)


def _composed(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """The same of ops that know torch.func's transforms; the products are still ours."""
    _result_shape(input, weight, bias, residual)
    return _finished(matmul(input, weight.t()), bias, residual, activation)


def _finished(
    out: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    for extra in (bias, residual):
        out = out if extra is None else out + extra
    return out if activation is None else _APPLIED[activation](out)


# ---- shapes ----


def _result_shape(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> tuple[Any, ...]:
    """The shape of the result; sizes may be symbolic.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
    """
    extras = [extra for extra in (bias, residual) if extra is not None]
    library.check_together("linear", input, weight, *extras)
    if weight.dim() > 2:
        raise RuntimeError(
            f"linear: weight must be (out_features, in_features), got {weight.dim()}D {tuple(weight.shape)}"
        )
    shape = result_shape(input.shape, tuple(reversed(weight.shape)), "linear")
    for name, extra in (("bias", bias), ("residual", residual)):
        if extra is not None:
            _check_added(name, extra.shape, shape)
    return shape


def _check_added(name: str, added: torch.Size, shape: tuple[Any, ...]) -> None:
    leading = len(shape) - len(added)
    if leading < 0 or any(b != 1 and b != s for b, s in zip(added, shape[leading:], strict=True)):
        raise RuntimeError(
            f"linear: {name} of shape {tuple(added)} does not match the result, which is {tuple(shape)}; "
            f"{'bias is (out_features)' if name == 'bias' else 'it must broadcast to it'}"
        )


def _is_row(bias: torch.Tensor) -> bool:
    """Whether `bias` is the same for every row, so that the kernel can add it."""
    return all(size == 1 for size in bias.shape[:-1])


# ---- plan ----


def plan_linear(
    input: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None = None,
    residual: TensorSpec | None = None,
    *,
    arch: str,
    activation: str | None = None,
    tf32: bool = False,
    config: str | None = None,
) -> Plan:
    """Plan one launch: tensors (out, input, weight, bias, residual). Arguments and errors as `plan_matmul`'s, weight as
    `linear`'s."""
    return plan_matmul(
        input, _turned(weight), bias, residual, arch=arch, activation=activation, tf32=tf32, config=config, op="linear"
    )


def _turned(weight: TensorSpec) -> TensorSpec:
    return TensorSpec(weight.shape[::-1], weight.strides[::-1], weight.dtype, weight.alignment)


# ---- run ----


_MOST_KNOWN = 4096
_known: dict[tuple[Any, ...], tuple[tuple[int, ...], Product]] = {}  # the result's shape, for what one launch does


def _kernel(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    tf32, arch = library.reads_tf32(input), arch_of(input.device)
    layouts = (None if x is None else library.layout_of(x) for x in (input, weight, bias, residual))
    key = (*layouts, activation, tf32, arch)
    known = _known.get(key)
    if known is None:
        shape = _result_shape(input, weight, bias, residual)
        if 0 in shape:
            return input.new_empty(shape)
        if input.shape[-1] == 0:  # nothing to add up: torch's elementwise ops finish
            return _finished(input.new_zeros(shape), bias, residual, activation)
        if bias is not None and not _is_row(bias):
            return _kernel(input, weight, None, bias if residual is None else bias + residual, activation=activation)
        fewer = few_batch_dims(input, weight)
        if fewer[0] is not input:
            return _kernel(*fewer, bias, residual, activation=activation)
        extras = [None if x is None else spec_of(x) for x in (bias, residual)]
        turned = _turned(spec_of(weight))
        known = (
            shape,
            plan_product(spec_of(input), turned, *extras, arch=arch, activation=activation, tf32=tf32, op="linear"),
        )
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    shape, product = known
    out = torch.empty(shape, dtype=input.dtype, device=input.device)
    run(product, out, input, weight, bias, residual)
    return out


# ---- fake ----


def _fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    return input.new_empty(_result_shape(input, weight, bias, residual))


# ---- autograd ----


class _Linear(torch.autograd.Function):
    """The op at the Autograd key."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        with library.below_autograd():
            out = _op(input, weight, bias, residual, activation=activation)
        ctx.save_for_backward(input, weight, None if activation is None else out)
        ctx.activation = activation
        ctx.shapes = tuple(None if extra is None else extra.shape for extra in (bias, residual))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, out = ctx.saved_tensors
        if out is not None:
            grad = _BACKWARD[ctx.activation](grad, out)
        return (
            gradient_of_left(grad, input, weight.t()) if ctx.needs_input_grad[0] else None,
            gradient_of_right(grad, input, weight.t()).t() if ctx.needs_input_grad[1] else None,
            *(
                grad.sum_to_size(shape) if needed else None
                for shape, needed in zip(ctx.shapes, ctx.needs_input_grad[2:4], strict=True)
            ),
            None,
        )


def _autograd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    if library.needs_autograd(input, weight, bias, residual):
        if activation is not None and activation not in _BACKWARD:
            return _APPLIED[activation](_Linear.apply(input, weight, bias, residual, None))
        return _Linear.apply(input, weight, bias, residual, activation)
    with library.below_autograd():
        return _op(input, weight, bias, residual, activation=activation)


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[torch.Tensor, int]:
    input_dim, weight_dim, bias_dim, residual_dim = (*in_dims, None, None)[:4]
    if weight_dim is None and bias_dim is None and residual is None and input_dim is not None:
        # one weight for all: vmap's dimension is one more of input's
        return _op(input.movedim(input_dim, 0), weight, bias, activation=activation), 0
    if weight_dim is not None:
        weight = weight.movedim(weight_dim, 0)
    turned = weight.mT if weight.dim() - (weight_dim is not None) == 2 else weight
    product = torch.ops.cudaops.matmul.default
    out = matmul_batched(product, (input_dim, None if weight_dim is None else 0), input, turned)

    def added(extra: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        if extra is None:
            return None
        extra = extra.unsqueeze(0) if dim is None else extra.movedim(dim, 0)
        return extra.reshape(extra.shape[0], *(1,) * (out.dim() - extra.dim()), *extra.shape[1:])

    return _finished(out, added(bias, bias_dim), added(residual, residual_dim), activation), 0


_op = library.define(
    "linear(Tensor input, Tensor weight, Tensor? bias=None, Tensor? residual=None, *, str? activation=None) -> Tensor",
    kernel=_kernel,
    fake=_fake,
    autograd=_autograd,
    vmap=_vmap,
    autocast=True,
)
