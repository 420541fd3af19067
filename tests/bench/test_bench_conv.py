from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from cudaops.ops.conv import conv2d
from tests.ops.conv_reference import Case, check_forward, check_input_grad, check_weight_grad, make

Against = Callable[..., None]


def square(channels: int, size: int, filters: int, taps: int, stride: int = 1, batch: int = 1, groups: int = 1) -> Case:
    """A convolution as resnets have them: square, padded by half the filter."""
    return Case(batch, channels, (size, size), filters, (taps, taps), (stride, stride), (taps // 2,) * 4, groups=groups)


# target: what a run may take beside torch's own, on the same threads
RESNET18 = {  # every distinct convolution of resnet18 on one image of 224 x 224
    "stem 7x7 s2": (square(3, 224, 64, 7, 2), 12.0),
    "56x56 3x3": (square(64, 56, 64, 3), 12.0),
    "56x56 3x3 s2": (square(64, 56, 128, 3, 2), 12.0),
    "56x56 1x1 s2": (square(64, 56, 128, 1, 2), 12.0),
    "28x28 3x3": (square(128, 28, 128, 3), 12.0),
    "28x28 3x3 s2": (square(128, 28, 256, 3, 2), 12.0),
    "28x28 1x1 s2": (square(128, 28, 256, 1, 2), 12.0),
    "14x14 3x3": (square(256, 14, 256, 3), 12.0),
    "14x14 3x3 s2": (square(256, 14, 512, 3, 2), 12.0),
    "14x14 1x1 s2": (square(256, 14, 512, 1, 2), 12.0),
    "7x7 3x3": (square(512, 7, 512, 3), 12.0),
}
OTHERS = {
    "8 images": (square(64, 28, 64, 3, batch=8), 12.0),
    "depthwise": (square(128, 28, 128, 3, groups=128), 60.0),  # torch's own kernel is direct, ours a product
}


def padding(case: Case) -> tuple[int, int]:
    return case.padding[0], case.padding[1]


@pytest.mark.parametrize(("case", "target"), (RESNET18 | OTHERS).values(), ids=RESNET18 | OTHERS)
def test_bench_conv2d(case: Case, target: float, against_torch: Against) -> None:
    x, w = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32)
    arguments = x, w, None, case.stride, padding(case), case.dilation, case.groups
    against_torch(lambda: conv2d(*arguments), lambda: functional.conv2d(*arguments), target=target)


def test_bench_conv2d_channels_last(against_torch: Against) -> None:
    case = RESNET18["28x28 3x3"][0]
    x, w = make(case.input_shape, torch.float32, True), make(case.weight_shape, torch.float32, True)
    arguments = x, w, None, case.stride, padding(case)
    against_torch(lambda: conv2d(*arguments), lambda: functional.conv2d(*arguments), target=12.0)


@pytest.mark.parametrize("name", ["28x28 3x3", "56x56 3x3 s2"])
@pytest.mark.parametrize("wanted", ["input", "weight"])
def test_bench_conv2d_gradient(name: str, wanted: str, against_torch: Against) -> None:
    case = RESNET18[name][0]
    x, w = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32)
    grad = torch.randn_like(conv2d(x, w, None, case.stride, padding(case)))
    ops = torch.ops.cudaops

    def ours() -> torch.Tensor:
        if wanted == "input":
            return ops.conv2d_input(grad, w, case.input_shape, *case.geometry)
        return ops.conv2d_weight(grad, x, w.shape, w.stride(), *case.geometry)

    def theirs() -> object:
        mask = [wanted == "input", wanted == "weight", False]
        return torch.ops.aten.convolution_backward(
            grad, x, w, None, case.stride, padding(case), case.dilation, False, [0, 0], case.groups, mask
        )

    against_torch(ours, theirs, target=12.0)


def test_what_is_timed_is_right() -> None:
    """The results of one of them, forward and backward, within the rounding bound."""
    case = RESNET18["7x7 3x3"][0]
    x, w = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32)
    y = conv2d(x, w, None, case.stride, padding(case))
    check_forward(case, y, x, w, None)
    small = square(16, 14, 24, 3, 2)
    x, w = make(small.input_shape, torch.float32), make(small.weight_shape, torch.float32)
    grad = torch.randn_like(conv2d(x, w, None, small.stride, padding(small)))
    ops = torch.ops.cudaops
    check_input_grad(small, ops.conv2d_input(grad, w, small.input_shape, *small.geometry), grad, w)
    check_weight_grad(small, ops.conv2d_weight(grad, x, w.shape, w.stride(), *small.geometry), grad, x)
