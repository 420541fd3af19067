from __future__ import annotations

import itertools
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.nn import functional

from cudaops import UnsupportedError
from cudaops.compile import compile_kernel
from cudaops.launch import launch_counts, spec_of
from cudaops.ops import conv, conv_plan
from cudaops.ops.conv import conv2d, plan_conv2d, plan_conv2d_input, plan_conv2d_weight
from cudaops.ops.conv_plan import CONV_CONFIGS, MASKED_TAPS, ConvConfig
from cudaops.ops.conv_shapes import dense_strides
from cudaops.plan import TensorSpec, check_limits
from cudaops.sources import kernels_dir
from tests.ops.conv_reference import Case, check_forward, check_input_grad, check_weight_grad, make

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
OPS = torch.ops.cudaops

# Each with the reason it is here; sizes as small as the reason allows.
CASES = {
    "one element": Case(),
    "stem: 7x7 stride 2 padding 3, 3 channels": Case(1, 3, (19, 18), 8, (7, 7), (2, 2), (3, 3, 3, 3)),
    "body: 3x3 padding 1, a channel count that is no multiple of the tile": Case(
        2, 20, (9, 11), 70, (3, 3), padding=(1, 1, 1, 1)
    ),
    "down: 1x1 stride 2": Case(1, 33, (8, 7), 65, (1, 1), (2, 2)),
    "last stage: 7x7 image, sum split over blocks": Case(1, 160, (7, 7), 96, (3, 3), padding=(1, 1, 1, 1)),
    "depthwise": Case(2, 13, (12, 10), 13, (3, 3), padding=(1, 1, 1, 1), groups=13),
    "depthwise with a multiplier": Case(1, 5, (9, 9), 15, (3, 3), (2, 2), (1, 1, 1, 1), groups=5),
    "groups": Case(1, 12, (7, 9), 18, (3, 2), groups=3),
    "dilation, unequal in height and width": Case(1, 3, (14, 15), 4, (3, 2), (1, 2), (2, 3, 2, 3), (3, 2)),
    "stride beyond the filter: input elements no window sees": Case(1, 2, (11, 11), 3, (2, 2), (4, 3)),
    "stride and dilation with a common factor: phases of the input gradient that meet no tap": Case(
        1, 2, (15, 17), 3, (3, 2), (4, 2), (1, 2, 1, 2), (2, 4)
    ),
    "patches: stride as large as the filter, beyond 15 rows": Case(1, 3, (33, 32), 5, (16, 16), (16, 16)),
    "padding beyond the filter: windows that see only zeros": Case(1, 2, (3, 3), 3, (2, 2), padding=(4, 5, 4, 5)),
    "padding unequal on opposite sides": Case(1, 2, (5, 6), 3, (2, 4), padding=(0, 1, 1, 2)),
    "filter as large as the image: one output pixel": Case(3, 4, (5, 6), 70, (5, 6)),
    "filter of more than 15 columns: not by bit masks": Case(1, 2, (6, 20), 3, (2, 17), padding=(1, 3, 1, 3)),
    "filter of more than 15 rows, strided": Case(1, 2, (21, 6), 3, (16, 2), (2, 2), (2, 1, 2, 1)),
    "many small images": Case(17, 3, (3, 5), 5, (3, 3), padding=(1, 1, 1, 1)),
}
FORMATS = {
    "nchw": (False, False),
    "channels last": (True, True),
    "only input": (True, False),
    "only weight": (False, True),
}


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, or the largest integer, so that an element no kernel wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run_all(case: Case, dtype: torch.dtype, channels_last: tuple[bool, bool], *, grad_last: bool = False) -> None:
    """The forward and both gradients of fresh operands, against the reference."""
    x = make(case.input_shape, dtype, channels_last[0])
    w = make(case.weight_shape, dtype, channels_last[1])
    b = make((case.filters,), dtype)
    with poisoned():
        y = OPS.conv2d(x, w, b, *case.geometry, "")
        grad = make(tuple(y.shape), dtype, grad_last)
        dx = OPS.conv2d_input(grad, w, x.shape, *case.geometry)
        dw = OPS.conv2d_weight(grad, x, w.shape, w.stride(), *case.geometry)
    check_forward(case, y, x, w, b)
    check_input_grad(case, dx, grad, w)
    check_weight_grad(case, dw, grad, x)
    assert dw.stride() == w.stride()


# ---- results ----


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_conv2d_is_within_the_rounding_bound(case: Case) -> None:
    run_all(case, torch.float32, (False, False))


@pytest.mark.parametrize("name", ["stem", "last stage", "groups", "dilation", "many small images"])
def test_conv2d_of_float64_is_within_the_rounding_bound(name: str) -> None:
    case = next(case for title, case in CASES.items() if title.startswith(name))
    run_all(case, torch.float64, (False, False))


@pytest.mark.parametrize("channels_last", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("name", ["body", "last stage", "depthwise", "dilation", "down"])
def test_conv2d_reads_both_memory_formats(name: str, channels_last: tuple[bool, bool]) -> None:
    case = next(case for title, case in CASES.items() if title.startswith(name))
    run_all(case, torch.float32, channels_last, grad_last=channels_last[0])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_conv2d_of_integers_is_exact_and_wraps(dtype: torch.dtype) -> None:
    run_all(Case(2, 6, (7, 6), 8, (3, 3), (2, 1), (1, 1, 1, 1), groups=2), dtype, (False, False))


SIZES = st.integers(1, 9)
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.integers(0, 3),
    groups=st.sampled_from([1, 1, 2, 3]),
    channels_each=st.integers(1, 6),
    filters_each=st.integers(1, 9),
    image=st.tuples(SIZES, SIZES),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=PAIRS,
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=PAIRS,
    dtype=st.sampled_from([*FLOATS, *INTEGERS]),
    channels_last=st.tuples(st.booleans(), st.booleans()),
    grad_last=st.booleans(),
)
def test_conv2d_holds_for_any_geometry(
    batch: int,
    groups: int,
    channels_each: int,
    filters_each: int,
    image: tuple[int, int],
    taps: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
    channels_last: tuple[bool, bool],
    grad_last: bool,
) -> None:
    case = Case(batch, channels_each * groups, image, filters_each * groups, taps, stride, padding, dilation, groups)
    assume(case.valid)
    run_all(case, dtype, channels_last, grad_last=grad_last)


@pytest.mark.parametrize("mode", ["forward", "input", "weight"])
@pytest.mark.parametrize(
    ("itemsize", "config"),
    list(conv_plan.configurations()),
    ids=lambda v: f"{v.bm}x{v.bn}" if isinstance(v, ConvConfig) else str(v),
)
def test_every_configuration_is_right_in_every_mode(
    itemsize: int, config: ConvConfig, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than one tile in each direction, none of them whole, and more than one step of the sum.
    case = Case(1, 37, (9, 8), 2 * config.bm + 3 if config.bm < 64 else config.bm + 3, (3, 3), padding=(1, 1, 1, 1))
    case = replace(case, batch=-(-(config.bn + 5) // 72))
    monkeypatch.setitem(CONV_CONFIGS, itemsize, (config,))
    clear_plans()
    dtype = torch.float32 if itemsize == 4 else torch.float64
    x, w = make(case.input_shape, dtype), make(case.weight_shape, dtype)
    grad = make((case.batch, case.filters, 9, 8), dtype)
    with poisoned():
        if mode == "forward":
            check_forward(case, OPS.conv2d(x, w, None, *case.geometry, ""), x, w, None)
        elif mode == "input":
            check_input_grad(case, OPS.conv2d_input(grad, w, x.shape, *case.geometry), grad, w)
        else:
            check_weight_grad(case, OPS.conv2d_weight(grad, x, w.shape, w.stride(), *case.geometry), grad, x)


@pytest.fixture(autouse=True)
def plans_afterwards() -> Iterator[None]:
    yield
    clear_plans()


def clear_plans() -> None:
    for plan in (plan_conv2d, plan_conv2d_input, plan_conv2d_weight):
        plan.cache_clear()


@pytest.mark.parametrize(
    ("name", "channels_last"), [("groups", False), ("filter of more than 15 rows", False), ("last stage", True)]
)
def test_offsets_of_64_bits_give_the_same(name: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for title, case in CASES.items() if title.startswith(name))
    monkeypatch.setattr(conv_plan, "_INT_LIMIT", 0)
    clear_plans()
    x, w = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32)
    plan = plan_conv2d(spec_of(x), spec_of(w), False, *case.geometry, "", "sm_80")
    assert ("INDEX", "long long") in plan.launches[0].source.defines
    run_all(case, torch.float32, (channels_last, False))


def test_what_lies_around_a_view_is_not_used() -> None:
    """The kernel may read inside the view's extent wherever it likes, but only the window's elements may count."""
    case = Case(2, 5, (6, 7), 9, (3, 3), (1, 1), (2, 2, 2, 2))
    x = torch.full((2, 8, 9, 12), float("nan"))[:, 2:7, 1:7, 3:10]
    w = torch.full((12, 7, 3, 4), float("inf"))[1:10, 1:6, :, 1:]
    x.copy_(make(case.input_shape, torch.float32))
    w.copy_(make(case.weight_shape, torch.float32))
    y = conv2d(x, w, padding=2)
    check_forward(case, y, x, w, None)
    big = torch.full((2, 20, *y.shape[2:]), float("nan"))[:, ::2][:, :9]
    big.copy_(make(tuple(y.shape), torch.float32))
    check_input_grad(case, OPS.conv2d_input(big, w, x.shape, *case.geometry), big, w)
    check_weight_grad(case, OPS.conv2d_weight(big, x, w.shape, [45, 9, 3, 1], *case.geometry), big, x)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(2, 3),
        lambda x: x.permute(0, 3, 1, 2),
        lambda x: x[:, :1].expand(-1, 6, -1, -1),
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: x[..., ::2],
        lambda x: x[:, :, 1:, 2:],
    ],
    ids=["transposed", "permuted", "one channel expanded", "one image expanded", "every second column", "offset"],
)
def test_any_strides_are_read_where_they_lie(view: Any) -> None:
    x = view(torch.randn(2, 6, 6, 6))
    case = Case(x.shape[0], 6, tuple(x.shape[2:]), 4, (3, 3))
    w = view(torch.randn(4, 6, 6, 6))[:4, :, :3, :3]
    w = w if w.shape[0] == 4 else w[:1].expand(4, -1, -1, -1)
    check_forward(case, conv2d(x, w), x, w, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_special_value_reaches_exactly_the_windows_that_see_it(value: float) -> None:
    """Zeros that pad a tile must not meet it: 0 times infinity is NaN."""
    x, w = torch.randn(1, 3, 6, 6), torch.randn(5, 3, 3, 3)
    x[0, 1, 2, 5] = value
    ours, torchs = conv2d(x, w, padding=1), functional.conv2d(x, w, padding=1)
    assert torch.equal(ours.isfinite(), torchs.isfinite())
    x, w = torch.randn(1, 3, 6, 6), torch.randn(5, 3, 3, 3)
    w[4, 2, 2, 2] = value
    got = conv2d(x, w, padding=1)
    assert torch.equal(got[:, :4], conv2d(x, w[:4], padding=1))
    assert not got[:, 4].isfinite().any()  # the zeros that pad the image do meet it, as everywhere


def test_results_are_repeatable_for_any_thread_count() -> None:
    case = next(case for title, case in CASES.items() if title.startswith("last stage"))
    x, w = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32)
    grad = make((1, case.filters, 7, 7), torch.float32)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(
                (
                    OPS.conv2d(x, w, None, *case.geometry, ""),
                    OPS.conv2d_input(grad, w, x.shape, *case.geometry),
                    OPS.conv2d_weight(grad, x, w.shape, w.stride(), *case.geometry),
                )
            )
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- as torch has it ----


@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (1, 4, 5, 5), (2, 1, 5, 5), (2, 4, 1, 1), (2, 1, 1, 1), (1, 4, 1, 6)])
@pytest.mark.parametrize("layouts", list(itertools.product(["c", "l", "t"], repeat=2)), ids="".join)
@pytest.mark.parametrize("filters", [1, 6])
def test_output_strides_are_torchs(shape: tuple[int, ...], layouts: tuple[str, str], filters: int) -> None:
    def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
        if layout == "l":
            return tensor.to(memory_format=torch.channels_last)
        return tensor.transpose(2, 3).contiguous().transpose(2, 3) if layout == "t" else tensor

    x, w = laid_out(torch.randn(shape), layouts[0]), laid_out(torch.randn(filters, shape[1], 1, 1), layouts[1])
    expected = functional.conv2d(x, w).stride()
    assert conv2d(x, w).stride() == expected
    assert conv2d(x.to("meta"), w.to("meta")).stride() == expected


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("taps", [(3, 3), (2, 4), (1, 5)])
def test_padding_words(padding: str, taps: tuple[int, int]) -> None:
    x, w = torch.randn(2, 3, 6, 11), torch.randn(4, 3, *taps)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same'")
        expected = functional.conv2d(x.double(), w.double(), padding=padding, dilation=(1, 2))
    got = conv2d(x, w, padding=padding, dilation=(1, 2))
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [2, (2,), [2], (2, 2), torch.Size([2, 2])], ids=repr)
def test_numbers_and_pairs_mean_the_same(value: Any) -> None:
    x, w = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 2, 2)
    got = conv2d(x, w, stride=value, padding=value, dilation=value)
    assert torch.equal(got, conv2d(x, w, None, (2, 2), (2, 2), (2, 2)))
    assert got.shape == functional.conv2d(x, w, stride=value, padding=value, dilation=value).shape


def test_an_image_without_a_batch() -> None:
    x, w, b = torch.randn(3, 6, 7), torch.randn(4, 3, 3, 3), torch.randn(4)
    got = conv2d(x, w, b)
    assert got.shape == functional.conv2d(x, w, b).shape
    assert torch.equal(got, conv2d(x[None], w, b)[0])


@pytest.mark.parametrize(
    ("input", "weight"), [((0, 4, 5, 5), (6, 4, 3, 3)), ((2, 0, 5, 5), (6, 0, 3, 3)), ((0, 0, 5, 5), (6, 0, 3, 3))]
)
def test_nothing_to_compute_launches_nothing(input: tuple[int, ...], weight: tuple[int, ...]) -> None:
    x, w = torch.randn(input, requires_grad=True), torch.randn(weight, requires_grad=True)
    before = launch_counts()
    got = conv2d(x, w, torch.randn(6))
    expected = functional.conv2d(x, w, torch.randn(6))
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    got.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.shape == x.shape
    assert torch.equal(w.grad, torch.zeros_like(w))
    assert launch_counts() == before


def test_activations() -> None:
    x, w, b = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    plain = conv2d(x, w, b)
    for name, function in {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
        "silu": functional.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }.items():
        assert torch.equal(conv2d(x, w, b, activation=name), function(plain)), name
    assert torch.equal(conv2d(x.long(), w.long(), activation="relu"), functional.relu(conv2d(x.long(), w.long())))
    with pytest.raises(ValueError, match=r"'relu'.*got 'softplus'"):
        conv2d(x, w, activation="softplus")


def test_relu_keeps_nan_where_the_sum_is_split() -> None:
    case = next(case for title, case in CASES.items() if title.startswith("last stage"))
    x, w, b = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32), torch.randn(case.filters)
    x[0, 0, 0, 0] = float("nan")
    plan = plan_conv2d(spec_of(x), spec_of(w), True, *case.geometry, "relu", "sm_80")
    assert len(plan.launches) == 2
    got, plain = conv2d(x, w, b, padding=1, activation="relu"), conv2d(x, w, b, padding=1)
    assert plain.isnan().any()
    torch.testing.assert_close(got, functional.relu(plain), rtol=0, atol=0, equal_nan=True)


# ---- bad arguments ----

X, W = (2, 4, 5, 5), (6, 4, 3, 3)
BAD: dict[str, tuple[Any, ...]] = {
    # name: input, weight, bias, keyword arguments, what the message must hold
    "channels": ((2, 3, 5, 5), W, None, {}, r"expected input\[2, 3, 5, 5\] to have 4 channels, but got 3 channels"),
    "channels in groups": (X, W, None, {"groups": 2}, "to have 8 channels, but got 4 channels"),
    "groups that do not divide": (X, (5, 2, 3, 3), None, {"groups": 2}, r"divisible by 2 .* \[5, 2, 3, 3\]"),
    "more groups than filters": ((2, 8, 5, 5), (1, 4, 3, 3), None, {"groups": 2}, "at least 2 at dimension 0"),
    "groups 0": (X, W, None, {"groups": 0}, r"non-positive groups .* \[0\]"),
    "input too small": ((2, 4, 2, 2), W, None, {}, r"\(2 x 2\)\. Kernel size: \(3 x 3\)"),
    "dilated window too large": (X, W, None, {"dilation": 3}, r"\(5 x 5\)\. Kernel size: \(7 x 7\)"),
    "stride 0": (X, W, None, {"stride": 0}, r"non-positive stride is not supported: got \[0, 0\]"),
    "stride -1": (X, W, None, {"stride": (1, -1)}, "non-positive stride"),
    "padding -1": (X, W, None, {"padding": -1}, "negative padding is not supported"),
    "dilation 0": (X, W, None, {"dilation": 0}, "non-positive dilation"),
    "5-d input": ((1, 2, 4, 5, 5), W, None, {}, r"3D \(unbatched\) or 4D \(batched\) .* \[1, 2, 4, 5, 5\]"),
    "2-d input": ((5, 5), W, None, {}, r"got input of size: \[5, 5\]"),
    "3-d weight": (X, (6, 4, 3), None, {}, r"\[6, 4, 3\]"),
    "5-d weight": (X, (6, 4, 3, 3, 3), None, {}, r"\[6, 4, 3, 3, 3\]"),
    "2-d bias": (X, W, (6, 1), {}, r"1-dimensional with 6 elements, but got bias of size \[6, 1\]"),
    "bias of another size": (X, W, (5,), {}, r"with 6 elements, but got bias of size \[5\]"),
    "no taps": (X, (6, 4, 0, 3), None, {}, r"\[6, 4, 0, 3\]"),
    "no filters": (X, (0, 4, 3, 3), None, {}, "at least 1 at dimension 0"),
    "three strides": (X, W, None, {"stride": (2, 1, 1)}, r"list of 2 values .* stride=\[2, 1, 1\]"),
    "unknown padding": (X, W, None, {"padding": "sam"}, "Invalid padding string: 'sam'"),
    "'same' with a stride": (X, W, None, {"padding": "same", "stride": 2}, "padding='same' is not supported"),
    "a float for a stride": (X, W, None, {"stride": 1.5}, "'stride' must be int"),
    "None for a stride": (X, W, None, {"stride": None}, "'stride' must be int"),
    "a float for groups": (X, W, None, {"groups": 1.0}, "'groups' must be int"),
}


@pytest.mark.parametrize(("input", "weight", "bias", "arguments", "words"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_arguments_raise_as_torchs_do(
    input: tuple[int, ...], weight: tuple[int, ...], bias: Any, arguments: dict[str, Any], words: str, device: str
) -> None:
    x, w = torch.ones(input, device=device), torch.ones(weight, device=device)
    b = None if bias is None else torch.ones(bias, device=device)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as torchs:
        functional.conv2d(
            x.cpu() if device == "cpu" else torch.ones(input),
            w if device == "cpu" else torch.ones(weight),
            b if b is None or device == "cpu" else torch.ones(bias),
            **arguments,
        )
    with pytest.raises(torchs.type, match=words):
        conv2d(x, w, b, **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64], ids=str)
def test_mixed_dtypes_raise(dtype: torch.dtype) -> None:
    x, w, b = torch.ones(X), torch.ones(W), torch.ones(6)
    for operands in ((x.to(dtype), w, None), (x, w.to(dtype), None), (x, w, b.to(dtype))):
        with pytest.raises(RuntimeError, match=rf"{dtype}"):
            conv2d(*operands)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64, torch.float16, torch.bfloat16], ids=str)
def test_a_dtype_without_a_kernel_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=rf"{dtype}.*float32"):
        conv2d(torch.ones(X).to(dtype), torch.ones(W).to(dtype))


@pytest.mark.parametrize("operand", [[1.0], None, 2.0])
def test_what_is_no_tensor_raises_type_error(operand: Any) -> None:
    with pytest.raises(TypeError, match="'input'"):
        conv2d(operand, torch.ones(W))
    with pytest.raises(TypeError, match="'weight'"):
        conv2d(torch.ones(X), operand)


def test_meta_gives_meta_and_a_mixture_is_refused() -> None:
    x, w, b = torch.ones(X), torch.ones(W), torch.ones(6)
    got = conv2d(x.to("meta"), w.to("meta"), b.to("meta"), padding=1)
    assert (got.device.type, got.shape, got.dtype) == ("meta", (2, 6, 5, 5), torch.float32)
    for chosen in itertools.product([True, False], repeat=3):
        if len(set(chosen)) == 1:
            continue
        operands = [t.to("meta") if meta else t for t, meta in zip((x, w, b), chosen, strict=True)]
        with pytest.raises(RuntimeError, match=r"same device.*meta"):
            conv2d(*operands)
    y = torch.ones(2, 6, 3, 3)
    with pytest.raises(RuntimeError, match=r"same device.*meta"):
        OPS.conv2d_input(y.to("meta"), w, X, [1, 1], [0] * 4, [1, 1], 1)
    with pytest.raises(RuntimeError, match=r"same device.*meta"):
        OPS.conv2d_weight(y, x.to("meta"), W, [36, 9, 3, 1], [1, 1], [0] * 4, [1, 1], 1)


def test_the_gradient_ops_refuse_what_does_not_fit() -> None:
    x, w, y = torch.ones(X), torch.ones(W), torch.ones(2, 6, 3, 4)
    geometry = [1, 1], [0] * 4, [1, 1], 1
    with pytest.raises(RuntimeError, match=r"conv2d_input: expected grad of size \[2, 6, 3, 3\].*\[2, 6, 3, 4\]"):
        OPS.conv2d_input(y, w, X, *geometry)
    with pytest.raises(RuntimeError, match=r"conv2d_weight: expected grad of size \[2, 6, 3, 3\].*\[2, 6, 3, 4\]"):
        OPS.conv2d_weight(y, x, W, w.stride(), *geometry)
    with pytest.raises(RuntimeError, match="not dense"):
        OPS.conv2d_weight(y[..., :3], x, W, [0, 9, 3, 1], *geometry)


# ---- gradients ----


GRADIENT_CASES = {
    "plain": Case(2, 3, (5, 4), 4, (3, 2)),
    "all of it": Case(1, 4, (7, 6), 6, (2, 3), (2, 1), (1, 2, 1, 2), (2, 1), 2),
}


@pytest.mark.parametrize("case", GRADIENT_CASES.values(), ids=GRADIENT_CASES.keys())
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradcheck_to_second_order(case: Case, channels_last: bool) -> None:
    x = make(case.input_shape, torch.float64, channels_last).requires_grad_()
    w = make(case.weight_shape, torch.float64, channels_last).requires_grad_()
    b = make((case.filters,), torch.float64).requires_grad_()

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        top, left = case.padding[:2]
        return conv2d(x, w, b, case.stride, (top, left), case.dilation, case.groups)

    assert torch.autograd.gradcheck(function, (x, w, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, w, b), fast_mode=True)


def test_gradcheck_through_relu_and_same_padding() -> None:
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 5, 5), (3, 2, 2, 4)))

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv2d(x, w, padding="same", activation="relu")

    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=3)), ids=str)
def test_only_the_gradients_asked_for_are_computed(needed: tuple[bool, bool, bool]) -> None:
    x, w, b = (
        torch.randn(s, requires_grad=need) for s, need in zip(((1, 2, 5, 5), (3, 2, 3, 3), (3,)), needed, strict=True)
    )
    before = launch_counts()["conv_implicit_gemm"]
    y = conv2d(x, w, b)
    assert y.requires_grad == any(needed)
    if any(needed):
        y.sum().backward()
    assert launch_counts()["conv_implicit_gemm"] - before == 1 + needed[0] + needed[1]
    assert [t.grad is not None for t in (x, w, b)] == list(needed)


def test_gradients_have_the_parameters_strides() -> None:
    for layout in (torch.channels_last, torch.contiguous_format):
        w = torch.randn(6, 4, 3, 3).to(memory_format=layout).requires_grad_()
        conv2d(torch.randn(2, 4, 5, 5), w).sum().backward()
        assert w.grad is not None
        assert w.grad.stride() == w.stride()
    w = torch.randn(1, 4, 3, 3).expand(6, 4, 3, 3).requires_grad_()  # not dense: as torch, a fresh contiguous one
    conv2d(torch.randn(2, 4, 5, 5), w).sum().backward()
    assert w.grad is not None
    assert w.grad.is_contiguous()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_opcheck() -> None:
    case = Case(2, 4, (6, 5), 6, (3, 2), (2, 1), (1, 0, 1, 1), (1, 2), 2)
    x, w, b = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32), torch.randn(6)
    y = OPS.conv2d(x, w, b, *case.geometry, "")
    for channels_last, grads in itertools.product([False, True], repeat=2):
        layout = torch.channels_last if channels_last else torch.contiguous_format

        def ready(tensor: torch.Tensor, layout: torch.memory_format = layout, grads: bool = grads) -> torch.Tensor:
            return tensor.to(memory_format=layout).detach().requires_grad_(grads)

        torch.library.opcheck(OPS.conv2d.default, (ready(x), ready(w), b.requires_grad_(grads), *case.geometry, "relu"))
        torch.library.opcheck(OPS.conv2d_input.default, (ready(y), ready(w), x.shape, *case.geometry))
        torch.library.opcheck(
            OPS.conv2d_weight.default, (ready(y), ready(x), w.shape, ready(w).stride(), *case.geometry)
        )


def test_torch_compile_has_no_graph_break() -> None:
    x, w = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv2d(x, w, stride=2, padding=1, activation="relu").sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for size in (8, 10):  # another size: shapes become symbolic
        x = torch.randn(2, 3, size, size, requires_grad=True)
        expected = torch.autograd.grad(function(x, w), (x, w))
        got = torch.autograd.grad(compiled(x, w), (x, w))
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


# ---- torch.func and forward mode ----


def test_vmap_and_grad_of_torch_func() -> None:
    x, w, b = torch.randn(3, 2, 4, 6, 6), torch.randn(3, 6, 2, 3, 3), torch.randn(3, 6)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return conv2d(x, w, b, 1, 1, groups=2)

    def close(got: torch.Tensor, expected: list[torch.Tensor]) -> None:
        torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-4)

    vmap, grad = torch.func.vmap, torch.func.grad
    close(vmap(function, (0, None))(x, w[0]), [function(each, w[0]) for each in x])
    close(vmap(function, (None, 0))(x[0], w), [function(x[0], each) for each in w])
    close(vmap(function, (1, 0))(x.movedim(0, 1), w), [function(*each) for each in zip(x, w, strict=True)])
    close(vmap(function)(x, w, b), [function(*each) for each in zip(x, w, b, strict=True)])
    close(vmap(vmap(function, (0, None)), (None, 0))(x, w), [torch.stack([function(i, k) for i in x]) for k in w])
    op = OPS.conv2d.default
    close(vmap(lambda i: op(i, w[0], None, [1, 1], [0] * 4, [1, 1], 2, ""))(x), [conv2d(i, w[0], groups=2) for i in x])

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return function(x, w).square().sum()

    def by_autograd(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(loss(w, x), w)[0]

    close(grad(loss)(w[0], x[0])[None], [by_autograd(w[0], x[0])])
    close(vmap(grad(loss), (None, 0))(w[0], x), [by_autograd(w[0], each) for each in x])

    def second(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad(loss)(w, x).square().sum()

    w0 = w[0].detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(w0, x[0]), w0, create_graph=True)
    expected = torch.autograd.grad(first.square().sum(), w0)[0]
    torch.testing.assert_close(grad(second)(w[0], x[0]), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # torch.func.jvp's own
def test_forward_mode_raises_instead_of_losing_tangents() -> None:
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: conv2d(x, w), (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        conv2d(forward_ad.make_dual(x, torch.ones_like(x)), w)


# ---- nothing but our kernels ----


def test_ours_work_while_torchs_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch's own convolution or product was called")

    case = Case(2, 4, (6, 6), 6, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 2)
    x, w, b = make(case.input_shape, torch.float32), make(case.weight_shape, torch.float32), torch.randn(6)
    for owner, name in [
        *((functional, name) for name in ("conv2d", "linear", "unfold", "fold", "conv_transpose2d")),
        *((torch, name) for name in ("conv2d", "convolution", "matmul", "mm", "bmm", "einsum", "addmm", "tensordot")),
        *((torch.Tensor, name) for name in ("matmul", "__matmul__", "mm", "bmm", "unfold", "addmm")),
    ]:
        monkeypatch.setattr(owner, name, refuse)
    seen: list[str] = []
    with _Dispatched(seen):
        x.requires_grad_()
        w.requires_grad_()
        b.requires_grad_()
        y = conv2d(x, w, b, 2, 1, 1, 2)
        dx, dw, db = torch.autograd.grad(y.square().sum(), (x, w, b), create_graph=True)
        (dx.square().sum() + dw.square().sum() + db.sum()).backward()
    products = ("convolution", "conv2d", "mm", "bmm", "addmm", "matmul", "einsum", "dot", "im2col", "col2im")
    assert not [name for name in seen if name.startswith("aten.") and name.split(".")[1] in products]
    check_forward(case, y, x, w, b)
    check_weight_grad(case, dw, 2 * y.detach(), x)
    check_input_grad(case, dx, 2 * y.detach(), w)


class _Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every operator that runs, whoever calls it."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_stubbed_launcher_leaves_the_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "launch", lambda plan, tensors: None)
    x, w = torch.randn(1, 3, 6, 6, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    with poisoned():
        y = conv2d(x, w, torch.randn(4))
        assert y.isnan().all()
        dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert dx.isnan().all()
    assert dw.isnan().all()


def test_each_call_is_counted() -> None:
    x, w = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    before = launch_counts()["conv_implicit_gemm"]
    conv2d(x, w)
    assert launch_counts()["conv_implicit_gemm"] == before + 1


# ---- plans ----

# torchvision's resnet18 at 1x3x224x224: channels, size, filters, taps, stride
RESNET18 = [
    (3, 224, 64, 7, 2),
    *[(64, 56, 64, 3, 1)] * 4,
    (64, 56, 128, 3, 2),
    (64, 56, 128, 1, 2),
    *[(128, 28, 128, 3, 1)] * 3,
    (128, 28, 256, 3, 2),
    (128, 28, 256, 1, 2),
    *[(256, 14, 256, 3, 1)] * 3,
    (256, 14, 512, 3, 2),
    (256, 14, 512, 1, 2),
    *[(512, 7, 512, 3, 1)] * 3,
]


def spec(*shape: int, channels_last: bool = False, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dense_strides(shape, channels_last), dtype, 16)


def resnet18_plans(channels_last: bool, arch: str) -> Iterator[conv_plan.ConvPlan]:
    for channels, size, filters, taps, stride in RESNET18:
        x = spec(1, channels, size, size, channels_last=channels_last)
        w = spec(filters, channels, taps, taps, channels_last=channels_last)
        yield plan_conv2d(x, w, False, (stride, stride), (taps // 2,) * 4, (1, 1), 1, "", arch)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_resnet18_takes_few_kernels_and_wastes_little(channels_last: bool, arch: str) -> None:
    plans = list(resnet18_plans(channels_last, arch))
    assert len(plans) == 20
    sources = {launch.source for plan in plans for launch in plan.launches}
    assert len(sources) <= 6
    useful = launched = 0
    for plan, (channels, _, filters, taps, _) in zip(plans, RESNET18, strict=True):
        _, _, p, q = plan.output.shape
        useful += filters * p * q * channels * taps**2
        product = plan.launches[0]
        defines = dict(product.source.defines)
        tiles = product.config.grid[0] * int(defines["BM"]) * int(defines["BN"])
        launched += tiles * -(-channels * taps**2 // int(defines["BK"])) * int(defines["BK"])
    assert useful / launched > 0.8


def test_a_long_sum_over_few_tiles_is_split_and_its_parts_fill_the_gpu() -> None:
    plan = plan_conv2d(spec(1, 512, 7, 7), spec(512, 512, 3, 3), True, (1, 1), (1,) * 4, (1, 1), 1, "relu", "sm_80")
    product, total = plan.launches
    splits = product.config.grid[1]
    assert 54 <= product.config.blocks <= 108
    assert plan.workspace == splits * 512 * 49
    assert dict(product.source.defines)["ACTIVATION"] == "0"
    assert dict(total.source.defines)["ACTIVATION"] == "1"
    big = plan_conv2d(spec(32, 64, 56, 56), spec(64, 64, 3, 3), False, (1, 1), (1,) * 4, (1, 1), 1, "", "sm_80")
    assert len(big.launches) == 1


def test_plans_are_pure_and_repeatable() -> None:
    arguments = (spec(1, 8, 9, 9), spec(4, 8, 3, 3), True, (1, 1), (1,) * 4, (1, 1), 1, "relu", "sm_90")
    first = plan_conv2d(*arguments)
    clear_plans()
    again = plan_conv2d(*arguments)
    assert first == again
    assert first is not again
    assert hash(first.launches[0]) == hash(again.launches[0])


def test_a_tensor_of_more_than_2_31_elements_takes_64_bit_offsets() -> None:
    x, w = spec(1, 64, 8192, 8192), spec(64, 64, 3, 3)
    plan = plan_conv2d(x, w, False, (1, 1), (1,) * 4, (1, 1), 1, "", "sm_80")
    assert dict(plan.launches[0].source.defines)["INDEX"] == "long long"
    small = plan_conv2d(spec(1, 64, 56, 56), w, False, (1, 1), (1,) * 4, (1, 1), 1, "", "sm_80")
    assert dict(small.launches[0].source.defines)["INDEX"] == "int"


@settings(max_examples=300, deadline=None)
@given(divisor=st.integers(1, 2**31 - 1), data=st.data())
def test_fast_division_is_exact(divisor: int, data: st.DataObject) -> None:
    d, magic, shift = struct.unpack("<iII", conv_plan.fast_division(divisor))
    near = st.integers(0, (2**31 - 1) // divisor).map(lambda q: q * divisor)
    n = data.draw(st.integers(0, 2**31 - 1) | near | near.map(lambda n: max(0, n - 1)))
    total = (n * magic >> 32) + n
    assert d == divisor
    assert total < 2**32  # the kernel's sum does not wrap
    assert total >> shift == n // divisor


def every_source() -> Iterator[tuple[str, conv_plan.ConvPlan]]:
    """A plan for every configuration and way of filling a tile."""
    shapes = {4: [(256, 56, 256, 3), (256, 14, 256, 3), (64, 56, 64, 3), (32, 7, 32, 3)], 8: [(64, 14, 64, 3)]}
    for dtype, itemsize in (("float32", 4), ("float64", 8), ("int64", 8)):
        for channels, size, filters, taps in shapes[itemsize]:
            for last in (False, True):
                x = spec(1, channels, size, size, channels_last=last, dtype=dtype)
                w = spec(filters, channels, taps, taps, channels_last=last, dtype=dtype)
                y = spec(1, filters, size, size, channels_last=last, dtype=dtype)
                geometry = (1, 1), (1,) * 4, (1, 1), 1
                yield f"{dtype} forward", plan_conv2d(x, w, True, *geometry, "relu", "sm_80")
                yield f"{dtype} input", plan_conv2d_input(y, w, x.shape, *geometry, "sm_80")
                yield f"{dtype} weight", plan_conv2d_weight(y, x, w, *geometry, "sm_80")
        x, w = spec(1, 32, 28, 28, dtype=dtype), spec(32, 1, 3, 3, dtype=dtype)
        yield f"{dtype} depthwise", plan_conv2d(x, w, False, (1, 1), (1,) * 4, (1, 1), 32, "", "sm_80")
        x, w = spec(1, 32, 64, 64, dtype=dtype), spec(32, 32, 1, MASKED_TAPS + 1, dtype=dtype)
        yield f"{dtype} wide", plan_conv2d(x, w, False, (1, 1), (0,) * 4, (1, 1), 1, "", "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_and_all_fit(arch: str) -> None:
    sources = {launch.source: launch for _, plan in every_source() for launch in plan.launches}
    for source, launch in sources.items():
        entry = compile_kernel(source, arch).entry
        assert (entry.spill_bytes, entry.stack_bytes) == (0, 0), source
        check_limits(launch.config, entry, arch)


def test_the_plainest_kernels_do_not_spill() -> None:
    for plan in resnet18_plans(channels_last=False, arch="sm_80"):
        for launch in plan.launches:
            entry = compile_kernel(launch.source, "sm_80").entry
            assert (entry.spill_bytes, entry.stack_bytes) == (0, 0)


@pytest.mark.parametrize("file", ["conv_implicit_gemm.cu", "conv_split_sum.cu"])
def test_the_contract_is_the_compiled_entrys(file: str) -> None:
    """The header's Entry line names the parameters that the entry has, and its Defines are those the plan gives."""
    name = Path(file).stem
    plan = plan_conv2d(spec(1, 512, 7, 7), spec(512, 512, 3, 3), True, (1, 1), (1,) * 4, (1, 1), 1, "", "sm_80")
    source = next(launch.source for launch in plan.launches if launch.source.file == file)
    assert source.entry == name
    text = (kernels_dir() / file).read_text()
    header = re.sub(r"\n// +", " ", text.split("#include")[0])
    declared = re.search(rf"Entry:\s+{name}\((.*?)\)", header)
    assert declared is not None
    entry = compile_kernel(source, "sm_80").entry
    assert [param.name for param in entry.params] == [part.split()[-1] for part in declared[1].split(",")]
    contract = header.split("Defines:")[1].split("Launch:")[0]
    for define, _ in source.defines:
        assert re.search(rf"\b{define}\b", contract), define
