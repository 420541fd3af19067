"""`conv2d`: as torch's, on kernels/conv_implicit_gemm.cu, forward and both gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from cudaops.launch import arch_of, launch, spec_of
from cudaops.ops import library
from cudaops.ops.conv_plan import (
    CONV_CONFIGS,
    CONV_DTYPES,
    ConvPlan,
    plan_conv2d,
    plan_conv2d_input,
    plan_conv2d_weight,
)
from cudaops.ops.conv_shapes import check_grad, dense_strides, is_dense, output_shape, suggests_channels_last
from cudaops.plan import TensorSpec

__all__ = ["CONV_CONFIGS", "conv2d", "plan_conv2d", "plan_conv2d_input", "plan_conv2d_weight"]

Ints = int | Sequence[int]

# Fused into the kernel's store.
_FUSED = {None: "", "relu": "relu"}
# Applied after it.
_APPLIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """The 2-d convolution (cross-correlation), as `torch.nn.functional.conv2d`.

    Arguments:
        input: `(N, C, H, W)` or `(C, H, W)`, any strides; read where it lies, NCHW or channels last.
        weight: `(K, C / groups, R, S)`, any strides.
        bias: `(K)` or None.
        stride, padding, dilation: a number, or one for height and one for width. padding also `'valid'`, none, or
            `'same'`, as much as keeps the size (stride 1 only; an odd rest goes to the bottom and right).
        groups: C and K fall into as many parts, each filter sees its own part.
        activation: None, `'relu'`, `'gelu'`, `'gelu_tanh'`, `'silu'`, `'sigmoid'` or `'tanh'`.

    float32, float64, int32 or int64, all the same, on one device. Integers wrap.

    Returns:
        A new `(N, K, P, Q)` tensor, or `(K, P, Q)`; channels last if input or weight is.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: shapes, dtypes or devices do not fit together; torch's words.
        ValueError: an unknown activation.
        UnsupportedError: no kernel for the dtype or the device.
    """
    library.check_tensors("conv2d", **({"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})))
    if input.dim() not in (3, 4):
        raise RuntimeError(
            f"Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: {list(input.shape)}"
        )
    if activation not in _FUSED and activation not in _APPLIED:
        names = ", ".join(repr(name) for name in (*_FUSED, *_APPLIED))
        raise ValueError(f"conv2d: activation must be one of {names}, got {activation!r}")
    if not isinstance(groups, int | torch.SymInt) or isinstance(groups, bool):
        raise TypeError(f"conv2d(): argument 'groups' must be int, not {type(groups).__name__}")
    strides, dilations = _pair("stride", stride), _pair("dilation", dilation)
    pads = _padding(padding, weight, strides, dilations)
    batched = input if input.dim() == 4 else input.unsqueeze(0)
    out = _call_conv2d(batched, weight, bias, strides, pads, dilations, groups, _FUSED.get(activation, ""))
    if activation in _APPLIED:
        out = _APPLIED[activation](out)
    return out if batched is input else out.squeeze(0)


def _pair(name: str, value: Ints) -> list[int]:
    """Read a number or two as torch's own parser does.

    Raises:
        TypeError: not numbers.
        RuntimeError: not one or two of them.
    """
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    numbers: list[int] = []
    for number in given:
        if isinstance(number, torch.SymInt):
            numbers.append(number)
            continue
        try:
            if isinstance(number, bool):
                raise TypeError
            numbers.append(operator.index(number))
        except TypeError:
            kind = type(number).__name__
            raise TypeError(
                f"conv2d(): argument '{name}' must be int or tuple of ints, got {kind} in {value!r}"
            ) from None
    if len(numbers) not in (1, 2):
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 2 values to match the convolution dimensions, "
            f"but got {name}={list(given)}"
        )
    return numbers * (2 // len(numbers))


def _padding(padding: Ints | str, weight: torch.Tensor, stride: list[int], dilation: list[int]) -> list[int]:
    """Top, left, bottom, right.

    Raises:
        TypeError, RuntimeError: as `_pair`; an unknown word, or `'same'` with a stride.
    """
    if not isinstance(padding, str):
        return _pair("padding", padding) * 2
    if padding == "valid":
        return [0, 0, 0, 0]
    if padding != "same":
        raise RuntimeError(f"Invalid padding string: {padding!r}; it is 'valid', 'same', or numbers")
    if stride != [1, 1]:
        raise RuntimeError(f"padding='same' is not supported for strided convolutions, got stride={stride}")
    total = [d * (taps - 1) for d, taps in zip(dilation, weight.shape[2:4], strict=False)]
    before = [size // 2 for size in total]
    return before + [size - half for size, half in zip(total, before, strict=True)]


# ---- kernels ----


def _run(plan: ConvPlan, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = a.new_empty_strided(plan.output.shape, plan.output.strides)
    if not plan.launches:
        return out.zero_()
    bias = b if bias is None else bias  # then it is not read
    if plan.workspace:
        workspace = a.new_empty(plan.workspace)
        launch(plan.launches[0], (workspace, a, b, bias))
        launch(plan.launches[1], (out, workspace, bias))
    else:
        launch(plan.launches[0], (out, a, b, bias))
    return out


def _conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
) -> torch.Tensor:
    _check_together("conv2d", input, weight, bias)
    plan = plan_conv2d(
        spec_of(input),
        spec_of(weight),
        bias is not None,
        *_geometry(stride, padding, dilation),
        groups,
        activation,
        arch_of(input.device),
    )
    return _run(plan, weight, input, None if bias is None else bias.contiguous())


def _conv2d_input(
    grad: torch.Tensor,
    weight: torch.Tensor,
    input_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    library.check_together("conv2d_input", grad, weight, dtypes=CONV_DTYPES)
    plan = plan_conv2d_input(
        spec_of(grad),
        spec_of(weight),
        tuple(input_size),
        *_geometry(stride, padding, dilation),
        groups,
        arch_of(grad.device),
    )
    return _run(plan, weight, grad)


def _conv2d_weight(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight_size: list[int],
    weight_stride: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    library.check_together("conv2d_weight", grad, input, dtypes=CONV_DTYPES)
    specs = spec_of(grad), spec_of(input)
    weight = TensorSpec(tuple(weight_size), tuple(weight_stride), specs[0].dtype, 16)
    plan = plan_conv2d_weight(*specs, weight, *_geometry(stride, padding, dilation), groups, arch_of(grad.device))
    return _run(plan, grad, input)


def _geometry(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> tuple[Any, Any, Any]:
    return tuple(stride), tuple(padding), tuple(dilation)


def _check_together(op: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        library.check_together(op, input, weight, dtypes=CONV_DTYPES)
        return
    library.check_together(op, input, weight, bias, dtypes=CONV_DTYPES)
    if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
        raise RuntimeError(
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with {weight.shape[0]} "
            f"elements, but got bias of size {list(bias.shape)} instead"
        )


# ---- fake ----


def _fake_conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
) -> torch.Tensor:
    _check_together("conv2d", input, weight, bias)
    shape = output_shape("conv2d", input.shape, weight.shape, stride, padding, dilation, groups)
    return input.new_empty_strided(shape, dense_strides(shape, _channels_last(input, weight)))


def _fake_conv2d_input(
    grad: torch.Tensor,
    weight: torch.Tensor,
    input_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    library.check_together("conv2d_input", grad, weight, dtypes=CONV_DTYPES)
    shape = output_shape("conv2d_input", input_size, weight.shape, stride, padding, dilation, groups)
    check_grad("conv2d_input", grad.shape, shape)
    return grad.new_empty_strided(tuple(input_size), dense_strides(input_size, _channels_last(grad, weight)))


def _fake_conv2d_weight(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight_size: list[int],
    weight_stride: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    library.check_together("conv2d_weight", grad, input, dtypes=CONV_DTYPES)
    shape = output_shape("conv2d_weight", input.shape, weight_size, stride, padding, dilation, groups)
    check_grad("conv2d_weight", grad.shape, shape)
    return grad.new_empty_strided(tuple(weight_size), tuple(weight_stride))


def _channels_last(*operands: torch.Tensor) -> bool:
    return any(suggests_channels_last(operand.shape, operand.stride()) for operand in operands)


# ---- autograd: the convolution and its two gradients are each other's gradients ----


def _save_conv2d(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, _, *geometry, activation = inputs
    need_input, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(
        input if need_weight else None, weight if need_input else None, output if activation else None
    )
    ctx.input_size, ctx.weight_layout, ctx.geometry = input.shape, _layout(weight), geometry


def _conv2d_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight, output = ctx.saved_tensors
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    if output is not None:
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    return (
        _call_input(grad, weight, ctx.input_size, *ctx.geometry) if need_input else None,
        _call_weight(grad, input, *ctx.weight_layout, *ctx.geometry) if need_weight else None,
        grad.sum((0, 2, 3)) if need_bias else None,
        *(None,) * 5,
    )


def _save_input(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, weight, _, *geometry = inputs
    need_grad, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(grad if need_weight else None, weight if need_grad else None)
    ctx.weight_layout, ctx.geometry = _layout(weight), geometry


def _input_gradients(ctx: Any, grad_input: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad, weight = ctx.saved_tensors
    need_grad, need_weight = ctx.needs_input_grad[:2]
    return (
        _call_conv2d(grad_input, weight, None, *ctx.geometry, "") if need_grad else None,
        _call_weight(grad, grad_input, *ctx.weight_layout, *ctx.geometry) if need_weight else None,
        *(None,) * 5,
    )


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, input, _, _, *geometry = inputs
    need_grad, need_input = ctx.needs_input_grad[:2]
    ctx.save_for_backward(grad if need_input else None, input if need_grad else None)
    ctx.input_size, ctx.geometry = input.shape, geometry


def _weight_gradients(ctx: Any, grad_weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad, input = ctx.saved_tensors
    need_grad, need_input = ctx.needs_input_grad[:2]
    return (
        _call_conv2d(input, grad_weight, None, *ctx.geometry, "") if need_grad else None,
        _call_input(grad, grad_weight, ctx.input_size, *ctx.geometry) if need_input else None,
        *(None,) * 6,
    )


def _layout(weight: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """The sizes and strides of a weight's gradient: the weight's own strides where no two elements share a place."""
    if is_dense(weight.shape, weight.stride()):
        return weight.shape, weight.stride()
    return weight.shape, dense_strides(weight.shape, channels_last=False)


# ---- vmap: a batch of inputs is a larger batch, a batch of weights is more groups ----


def _vmap_conv2d(
    call: Callable[..., torch.Tensor],
    info: Any,
    in_dims: tuple[int | None, ...],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
) -> tuple[torch.Tensor, int]:
    size = info.batch_size
    if in_dims[1] is None and in_dims[2] is None:
        input = input.movedim(in_dims[0], 0)  # type: ignore[arg-type]
        out = call(input.flatten(0, 1), weight, bias, stride, padding, dilation, groups, activation)
        return torch.unflatten(out, 0, (size, -1)), 0
    out = call(
        _into_channels(input, in_dims[0], size),
        _into_filters(weight, in_dims[1], size),
        None if bias is None else _into_filters(bias, in_dims[2], size),
        *(stride, padding, dilation, groups * size, activation),
    )
    return torch.unflatten(out, 1, (size, -1)), 1


def _vmap_input(
    call: Callable[..., torch.Tensor],
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: torch.Tensor,
    weight: torch.Tensor,
    input_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> tuple[torch.Tensor, int]:
    size = info.batch_size
    batch, channels, *image = input_size
    geometry = stride, padding, dilation
    if in_dims[1] is None:
        grad = grad.movedim(in_dims[0], 0)  # type: ignore[arg-type]
        out = call(grad.flatten(0, 1), weight, [size * batch, channels, *image], *geometry, groups)
        return torch.unflatten(out, 0, (size, batch)), 0
    grad, weight = _into_channels(grad, in_dims[0], size), _into_filters(weight, in_dims[1], size)
    out = call(grad, weight, [batch, size * channels, *image], *geometry, groups * size)
    return torch.unflatten(out, 1, (size, channels)), 1


def _vmap_weight(
    call: Callable[..., torch.Tensor],
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: torch.Tensor,
    input: torch.Tensor,
    weight_size: list[int],
    weight_stride: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> tuple[torch.Tensor, int]:
    size = info.batch_size
    filters, *rest = weight_size
    shape = [size * filters, *rest]
    grad, input = _into_channels(grad, in_dims[0], size), _into_channels(input, in_dims[1], size)
    out = call(grad, input, shape, dense_strides(shape, False), stride, padding, dilation, groups * size)
    return torch.unflatten(out, 0, (size, filters)), 0


def _into_channels(image: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """`(N, C, H, W)`, batched or not, as `(N, size * C, H, W)`."""
    image = image.unsqueeze(1).expand(-1, size, -1, -1, -1) if dim is None else image.movedim(dim, 1)
    return image.flatten(1, 2)


def _into_filters(weight: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """`(K, ...)`, batched or not, as `(size * K, ...)`."""
    weight = weight.expand(size, *weight.shape) if dim is None else weight.movedim(dim, 0)
    return weight.flatten(0, 1)


# ---- registration ----


def _differentiable(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None],
    gradients: Callable[..., Any],
    batched: Callable[..., Any],
) -> Callable[..., torch.Tensor]:
    """Register an op, and return the function that calls it wherever autograd or a torch.func transform may be running.

    Arguments:
        save: puts what `gradients` needs on the context, from the inputs and the output.
        gradients: one for each input, built of the registered ops, so that it can be differentiated again.
        batched: the rule for vmap; its first argument is what to call.
    """

    class AtAutogradKey(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with library.below_autograd():
                output = op(*inputs)
            save(ctx, inputs, output)
            return output

        backward = staticmethod(gradients)

    class Transformed(torch.autograd.Function):
        """torch.func wants the context set up apart, and a rule for vmap. There is no jvp: forward-mode AD raises."""

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        setup_context = staticmethod(save)
        backward = staticmethod(gradients)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
            return batched(call, info, in_dims, *inputs)

    def autograd(*inputs: Any) -> Any:
        if library.needs_autograd(*(each for each in inputs if isinstance(each, torch.Tensor))):
            return AtAutogradKey.apply(*inputs)
        with library.below_autograd():
            return op(*inputs)

    def call(*inputs: Any) -> Any:
        return Transformed.apply(*inputs) if library.transforms_active() else op(*inputs)

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return batched(op, info, in_dims, *inputs)  # for who calls the op itself

    op = library.define(schema, kernel=kernel, fake=fake, autograd=autograd, vmap=vmap)
    return call


_GEOMETRY = "SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups"
_call_conv2d = _differentiable(
    f"conv2d(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}, str activation) -> Tensor",
    _conv2d,
    _fake_conv2d,
    _save_conv2d,
    _conv2d_gradients,
    _vmap_conv2d,
)
_call_input = _differentiable(
    f"conv2d_input(Tensor grad, Tensor weight, SymInt[4] input_size, {_GEOMETRY}) -> Tensor",
    _conv2d_input,
    _fake_conv2d_input,
    _save_input,
    _input_gradients,
    _vmap_input,
)
_call_weight = _differentiable(
    f"conv2d_weight(Tensor grad, Tensor input, SymInt[4] weight_size, SymInt[4] weight_stride, {_GEOMETRY}) -> Tensor",
    _conv2d_weight,
    _fake_conv2d_weight,
    _save_weight,
    _weight_gradients,
    _vmap_weight,
)
