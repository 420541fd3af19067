"""Shapes and memory formats of convolutions; sizes may be symbolic."""

from __future__ import annotations

from collections.abc import Sequence


def output_shape(
    op: str,
    input: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[int, int, int, int]:
    """The shape of a convolution's output, all sizes checked. `padding` is (top, left, bottom, right).

    Raises:
        RuntimeError: what does not fit, in torch's words.
    """
    if len(weight) != 4:
        raise RuntimeError(
            f"{op}: expected a 4D weight (out_channels, in_channels / groups, height, width), "
            f"but got one of size {list(weight)}"
        )
    if len(input) != 4:
        raise RuntimeError(
            f"{op}: expected a 4D input (batch, channels, height, width), but got one of size {list(input)}"
        )
    for what, values, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
        ("groups", (groups,), 1),
    ):
        if any(value < least for value in values):
            raise RuntimeError(
                f"{'negative' if least == 0 else 'non-positive'} {what} is not supported: got {list(values)}, "
                f"at least {least} is needed"
            )
    batch, channels, *image = input
    filters, channels_each, *taps = weight
    given = f"Given groups={groups}"
    if filters < groups:
        raise RuntimeError(
            f"{given}, expected weight to be at least {groups} at dimension 0, but got weight of size {list(weight)} "
            "instead"
        )
    if filters % groups:
        raise RuntimeError(
            f"{given}, expected weight to be divisible by {groups} at dimension 0, "
            f"but got weight of size {list(weight)} instead"
        )
    if channels != channels_each * groups:
        raise RuntimeError(
            f"{given}, weight of size {list(weight)}, expected input{list(input)} to have {channels_each * groups} "
            f"channels, but got {channels} channels instead"
        )
    if any(size < 1 for size in taps):
        raise RuntimeError(f"{op}: the kernel size must be at least (1 x 1), but got weight of size {list(weight)}")
    top, left, bottom, right = padding
    padded = (image[0] + top + bottom, image[1] + left + right)
    window = (dilation[0] * (taps[0] - 1) + 1, dilation[1] * (taps[1] - 1) + 1)
    if padded[0] < window[0] or padded[1] < window[1]:
        raise RuntimeError(
            f"Calculated padded input size per channel: ({padded[0]} x {padded[1]}). "
            f"Kernel size: ({window[0]} x {window[1]}). Kernel size can't be greater than actual input size"
        )
    # torch gives an input without channels an output without channels, whatever the weight says
    return (
        batch,
        filters if channels else 0,
        (padded[0] - window[0]) // stride[0] + 1,
        (padded[1] - window[1]) // stride[1] + 1,
    )


def dense_strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """The strides torch gives a new (N, C, H, W) tensor in one of its two memory formats."""
    strides = [0] * len(shape)
    step = 1
    for axis in (1, 3, 2, 0) if channels_last else (3, 2, 1, 0):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def suggests_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """What torch's `suggest_memory_format` reads from the strides of a 4-d tensor; in doubt, NCHW."""
    least = 0
    if strides[1] == 0:
        return False
    for axis in (1, 3, 2, 0):
        if shape[axis] == 0 or strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(1, shape[axis])
    return True


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """The elements fill one stretch of memory, in any order of axes, each once."""
    if 0 in shape:
        return True
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def check_grad(op: str, grad: Sequence[int], output: Sequence[int]) -> None:
    """Refuse a gradient that is not of the output's shape.

    Raises:
        RuntimeError: it is not.
    """
    if list(grad) != list(output):
        raise RuntimeError(f"{op}: expected grad of size {list(output)}, the size of the output, but got {list(grad)}")
