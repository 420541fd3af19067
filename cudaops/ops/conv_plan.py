"""Which launches make a 2-d convolution or one of its gradients: pure, from shapes and strides alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cudaops.errors import LaunchError
from cudaops.ops.conv_shapes import check_grad, dense_strides, is_dense, output_shape, suggests_channels_last
from cudaops.plan import DTYPES, KernelSource, LaunchConfig, Plan, TensorSpec, sm_count

Pair = tuple[int, int]
Padding = tuple[int, int, int, int]  # top, left, bottom, right

FORWARD, INPUT_GRAD, WEIGHT_GRAD = "FORWARD", "INPUT_GRAD", "WEIGHT_GRAD"
CONV_DTYPES = ("float32", "float64", "int32", "int64")
ACTIVATIONS = ("", "relu")  # in the order of epilogue.cuh's enum
MASKED_TAPS = 15  # filter rows, and columns, that conv_geometry.cuh's bit masks hold
SUM_THREADS, SUM_ITEMS = 256, 8  # of conv_split_sum: a block, and elements a thread
LEAST_STEPS = 8  # tiles of the sum a split is worth starting for
_INT_LIMIT = 2**31 - 2**16  # below int's, by more than a tile's overhang


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """A tile of `conv_implicit_gemm`: `bm x bn` outputs a block, `bk` of the sum a step, `tm x tn` outputs a thread.

    `ku` of the sum are unrolled: TM * TN * KU multiply-adds are what a compiler, and the emulator's, must read.
    """

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    ku: int
    reason: str

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return 32 * (self.bm // self.tm) * (self.bn // (32 * self.tn))

    def instructions(self, along_k: bool, width: int) -> int:
        """What a block issues for one step of the sum, by thread: multiply-adds, shared loads, the two fills."""
        sums = self.tm * self.tn * self.bk
        loads = self.bk * (self.tm // width + self.tn)
        fill_a = max(1, self.bm * self.bk // self.threads) * 4
        fill_b = max(1, self.bn * self.bk // self.threads) * 10
        rows = 0 if along_k else 8 * max(1, self.bk * 32 // self.threads)
        return self.threads * (sums + loads + fill_a + fill_b + rows)


# A warp owns 16 rows of 64 (32) pixels: each B element it loads from shared memory is worth 16 multiply-adds, and
# each A element is one broadcast. 16 x 2 outputs a thread leave room in 255 registers for the next tile's loads, and a
# step of 32 is 1024 multiply-adds of straight code.
CONV_CONFIGS: dict[int, tuple[ConvConfig, ...]] = {
    4: (
        ConvConfig(128, 64, 32, 16, 2, 32, "many channels: each gathered element serves 128 of them"),
        ConvConfig(64, 128, 32, 16, 2, 32, "64 channels or so, large image: each weight serves 128 pixels"),
        ConvConfig(64, 64, 32, 16, 2, 32, "small in both: less of the tile is wasted"),
        ConvConfig(128, 32, 32, 16, 1, 32, "many channels, few pixels"),
        ConvConfig(32, 128, 32, 16, 2, 32, "up to 32 channels"),
        ConvConfig(4, 128, 16, 4, 1, 16, "a channel or a few in a group (depthwise): no rows to waste"),
    ),
    8: (
        ConvConfig(64, 64, 16, 16, 2, 16, "8-byte elements: twice the registers, so half the step"),
        ConvConfig(4, 128, 16, 4, 1, 16, "a channel or a few in a group (depthwise): no rows to waste"),
    ),
}


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """The launches that make `output`, in order.

    With `workspace` 0 there is one, on (output, a, b, bias). Else `workspace` is a number of elements: the first is on
    (workspace, a, b, bias), and the second, on (output, workspace, bias), adds up what the splits left there. Without a
    bias any tensor of the dtype stands in its place; it is not read.
    No launches: the output is empty, or a sum over nothing, zero.
    """

    output: TensorSpec
    launches: tuple[Plan, ...]
    workspace: int = 0


# ---- the three plans ----


@lru_cache(maxsize=4096)
def plan_conv2d(
    input: TensorSpec,
    weight: TensorSpec,
    bias: bool,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    activation: str,
    arch: str,
) -> ConvPlan:
    """Plan the output `(N, K, P, Q)` of `input (N, C, H, W)` and `weight (K, C / groups, R, S)`.

    Channels last if either operand is, as torch's convolutions have it.
    """
    shape = output_shape("conv2d", input.shape, weight.shape, stride, padding, dilation, groups)
    output = _result(shape, input, weight)
    axes = _axes(input.shape, weight.shape, shape, stride, padding, dilation)
    operands = _Operands(weight, input, output)
    return _plan("conv2d", FORWARD, operands, axes, groups, bias, activation, arch)


@lru_cache(maxsize=4096)
def plan_conv2d_input(
    grad: TensorSpec,
    weight: TensorSpec,
    input_shape: tuple[int, int, int, int],
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    arch: str,
) -> ConvPlan:
    """Plan the gradient with respect to an input of `input_shape`; channels last if either operand is."""
    shape = output_shape("conv2d_input", input_shape, weight.shape, stride, padding, dilation, groups)
    check_grad("conv2d_input", grad.shape, shape)
    axes = _axes(shape, weight.shape, input_shape, stride, padding, dilation)
    operands = _Operands(weight, grad, _result(input_shape, grad, weight))
    return _plan("conv2d_input", INPUT_GRAD, operands, axes, groups, False, "", arch)


@lru_cache(maxsize=4096)
def plan_conv2d_weight(
    grad: TensorSpec,
    input: TensorSpec,
    weight: TensorSpec,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    arch: str,
) -> ConvPlan:
    """Plan the gradient with respect to `weight`, whose strides (dense, in any order) the result takes."""
    shape = output_shape("conv2d_weight", input.shape, weight.shape, stride, padding, dilation, groups)
    check_grad("conv2d_weight", grad.shape, shape)
    if not is_dense(weight.shape, weight.strides):
        raise RuntimeError(
            f"conv2d_weight: a weight of size {list(weight.shape)} with strides {list(weight.strides)} is not dense; "
            "ask for the strides of torch.empty_like(weight)"
        )
    axes = _axes(input.shape, weight.shape, shape, stride, padding, dilation)
    return _plan("conv2d_weight", WEIGHT_GRAD, _Operands(grad, input, weight), axes, groups, False, "", arch)


def _result(shape: tuple[int, ...], *operands: TensorSpec) -> TensorSpec:
    last = any(suggests_channels_last(operand.shape, operand.strides) for operand in operands)
    return TensorSpec(shape, dense_strides(shape, last), operands[0].dtype, 16)


# ---- geometry ----


class _Operands(NamedTuple):
    """C = A B, by the names of conv_implicit_gemm's table."""

    a: TensorSpec
    b: TensorSpec
    c: TensorSpec


class _Axis(NamedTuple):
    """Height or width: conv_geometry.cuh's Axis, in its order, but for the last."""

    pixels: int
    source: int
    taps: int
    stride: int
    pad: int
    dilation: int

    @property
    def tap_apart(self) -> int:
        return self.stride // math.gcd(self.stride, self.dilation)


def _axes(
    source: Sequence[int],
    weight: Sequence[int],
    pixels: Sequence[int],
    stride: Pair,
    padding: Padding,
    dilation: Pair,
) -> tuple[_Axis, _Axis]:
    """Height and width: B is taken from `source`, and it is the pixels of `pixels` that are counted."""
    y, x = (_Axis(pixels[n], source[n], weight[n], stride[n - 2], padding[n - 2], dilation[n - 2]) for n in (2, 3))
    return y, x


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The sizes and strides of the matrix product in one group; of its largest phase, where there are phases."""

    m: int
    n: int
    k: int
    images: int
    channels: int
    phases: int
    a_group: int
    b_group: int
    c_group: int
    a_row: int
    a_k: tuple[int, int, int]
    b: tuple[int, int, int, int]  # channel, image, y, x
    b_last: int
    c_row: int
    c_n: tuple[int, int, int]


def _geometry(mode: str, operands: _Operands, axes: tuple[_Axis, _Axis], groups: int) -> _Geometry:
    (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3) = (operand.strides for operand in operands)
    images, channels, high, wide = operands.b.shape
    channels //= groups
    phased = mode == INPUT_GRAD
    pixels = images * math.prod(-(-axis.pixels // axis.stride) if phased else axis.pixels for axis in axes)
    taps = channels * math.prod(-(-axis.taps // axis.tap_apart) if phased else axis.taps for axis in axes)
    # A's rows are filters: weights', or the channels of a gradient; the input gradient's are the weights' own channels.
    m = operands.a.shape[1 if mode == INPUT_GRAD else 0] if mode != WEIGHT_GRAD else operands.a.shape[1] // groups
    m //= groups if mode == FORWARD else 1
    by_pixel, by_weight = (c0, c2, c3), (c1, c2, c3)
    return _Geometry(
        m=m,
        n=taps if mode == WEIGHT_GRAD else pixels,
        k=pixels if mode == WEIGHT_GRAD else taps,
        images=images,
        channels=channels,
        phases=axes[0].stride * axes[1].stride if phased else 1,
        a_group={FORWARD: m * a0, INPUT_GRAD: channels * a0, WEIGHT_GRAD: m * a1}[mode],
        b_group=channels * b1,
        c_group=m * (c0 if mode == WEIGHT_GRAD else c1),
        a_row=a0 if mode == FORWARD else a1,
        a_k=(a1 if mode == FORWARD else a0, a2, a3),
        b=(b1, b0, b2, b3),
        b_last=(images - 1) * b0 + (channels - 1) * b1 + (high - 1) * b2 + (wide - 1) * b3,
        c_row=c0 if mode == WEIGHT_GRAD else c1,
        c_n=by_weight if mode == WEIGHT_GRAD else by_pixel,
    )


def _pack(
    g: _Geometry,
    axes: tuple[_Axis, _Axis],
    groups: int,
    tiles: Pair,
    split_stride: int,
    flags: Pair,
    by_taps: int,
    wide_index: bool,
) -> bytes:
    """conv_geometry.cuh's ConvGeometry, padding at its end included. `flags`: a_linear, has_bias."""
    index = (
        *(split_stride, g.a_group, g.b_group, g.c_group, g.a_row, *g.a_k),
        *(*g.b, g.b_last, g.c_row, *g.c_n),
    )
    ints = (
        *(g.m, g.images, g.channels, groups, *tiles, *flags),
        *(value for axis in axes for value in (*axis, axis.tap_apart)),
    )
    packed = struct.pack(f"<{len(index)}{'q' if wide_index else 'i'}{len(ints)}i", *index, *ints)
    packed += b"".join(map(fast_division, (axes[0].pixels * axes[1].pixels, axes[1].pixels, by_taps)))
    return packed + bytes(-len(packed) % (8 if wide_index else 4))


def fast_division(divisor: int) -> bytes:
    """conv_geometry.cuh's FastDiv: exact for numerators from 0 to 2^31 - 1.

    Source: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994, figure 4.1.
    """
    shift = (divisor - 1).bit_length()
    return struct.pack("<iII", divisor, ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift)


def _fits_int(g: _Geometry, axes: tuple[_Axis, _Axis], operands: _Operands) -> bool:
    """Every offset the kernel forms, those outside the image included, fits a 32-bit int."""
    beyond = sum(
        (axis.pad + axis.stride + axis.taps * axis.dilation) * stride
        for axis, stride in zip(axes, g.b[2:], strict=True)
    )
    spans = (sum((size - 1) * step for size, step in zip(s.shape, s.strides, strict=True)) for s in operands)
    return max(g.n, g.k, g.b_last + beyond, *spans) < _INT_LIMIT


def _linear(mode: str, g: _Geometry, axes: tuple[_Axis, _Axis], tap_outer: bool) -> bool:
    """The elements of a row of A lie side by side in the order of the sum."""
    if g.phases > 1:
        return False
    y, x = axes
    sizes = (g.images, y.pixels, x.pixels) if mode == WEIGHT_GRAD else (g.channels, y.taps, x.taps)
    step = 1
    for axis in (0, 2, 1) if tap_outer else (2, 1, 0):
        if sizes[axis] > 1 and g.a_k[axis] != step:
            return False
        step *= sizes[axis]
    return True


# ---- the plan ----


def _plan(
    op: str,
    mode: str,
    operands: _Operands,
    axes: tuple[_Axis, _Axis],
    groups: int,
    bias: bool,
    activation: str,
    arch: str,
) -> ConvPlan:
    c = operands.c
    if any(0 in operand.shape for operand in operands):
        return ConvPlan(c, ())
    if axes[0].pixels * axes[1].pixels >= 2**31:
        raise LaunchError(
            f"{op}: an image of {axes[0].pixels} x {axes[1].pixels} pixels; the limit is 2^31 - 1: cut it into parts"
        )
    g = _geometry(mode, operands, axes, groups)
    itemsize, element = DTYPES[c.dtype][:2]
    along_k = mode == WEIGHT_GRAD or (g.b[0] == 1 and g.channels > 1 and g.b[3] != 1)
    tap_outer = along_k and mode != WEIGHT_GRAD
    wide_filter = max(axis.taps for axis in axes) > MASKED_TAPS
    wide_index = not _fits_int(g, axes, operands)
    config = _choose(g, groups, itemsize, along_k)
    tiles_m, tiles_n = -(-g.m // config.bm), -(-g.n // config.bn)
    blocks = tiles_m * tiles_n * groups * g.phases
    splits = _splits(blocks, g.k, config.bk, sm_count(arch))
    taps = axes[0].taps * axes[1].taps
    last = splits == 1
    numel = math.prod(c.shape)
    defines = {
        "ELEMENT": element,
        "MODE": mode,
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "TM": config.tm,
        "TN": config.tn,
        "KU": config.ku,
        "INDEX": "long long" if wide_index else "int",
        "FILL_ALONG_K": int(along_k),
        "TAP_OUTER": int(tap_outer),
        "WIDE_FILTER": int(wide_filter),
        "ACTIVATION": ACTIVATIONS.index(activation) if last else 0,
    }
    geometry = _pack(
        g,
        axes,
        groups,
        (tiles_m, tiles_n),
        0 if last else numel,
        (_linear(mode, g, axes, tap_outer), last and bias),
        g.channels if tap_outer else taps,
        wide_index,
    )
    product = Plan(
        op,
        KernelSource("conv_implicit_gemm.cu", "conv_implicit_gemm", tuple((k, str(v)) for k, v in defines.items())),
        LaunchConfig(
            (blocks, splits, 1),
            (config.threads, 1, 1),
            _smem_bytes(config, mode, itemsize, along_k, taps, wide_filter, 8 if wide_index else 4),
        ),
        (geometry,),
        f"{config.bm}x{config.bn}x{config.bk} tile ({config.reason}): {blocks} blocks"
        f"{'' if last else f' x {splits} splits of the sum'} for {g.m} x {g.n} x {g.k}"
        f"{f' in {groups} groups' if groups > 1 else ''}{f' in {g.phases} phases' if g.phases > 1 else ''}",
    )
    if last:
        return ConvPlan(c, (product,))
    return ConvPlan(c, (product, _sum(op, c, element, splits, bias, activation)), splits * numel)


def _sum(op: str, c: TensorSpec, element: str, splits: int, bias: bool, activation: str) -> Plan:
    numel = math.prod(c.shape)
    defines = {
        "ELEMENT": element,
        "THREADS": SUM_THREADS,
        "ITEMS": SUM_ITEMS,
        "INDEX": "long long" if splits * numel >= _INT_LIMIT else "int",
        "ACTIVATION": ACTIVATIONS.index(activation),
    }
    return Plan(
        op,
        KernelSource("conv_split_sum.cu", "conv_split_sum", tuple((k, str(v)) for k, v in defines.items())),
        LaunchConfig((-(-numel // (SUM_THREADS * SUM_ITEMS)), 1, 1), (SUM_THREADS, 1, 1)),
        (numel, splits, c.strides[1], c.shape[1], int(bias)),
        f"adds up {splits} splits of the sum, in order",
    )


def _choose(g: _Geometry, groups: int, itemsize: int, along_k: bool) -> ConvConfig:
    """The configuration that issues the fewest instructions, ragged edges counted in."""

    def cost(config: ConvConfig) -> int:
        tiles = -(-g.m // config.bm) * -(-g.n // config.bn) * groups
        return tiles * -(-g.k // config.bk) * config.instructions(along_k, 16 // itemsize)

    return min(CONV_CONFIGS[itemsize], key=cost)


def _splits(blocks: int, k: int, bk: int, sms: int) -> int:
    """Into how many parts the sum is cut: enough to give every SM a block.

    Small images with many channels have few output tiles and long sums, the weight gradient still more so.
    """
    steps = -(-k // bk)
    splits = max(1, min(sms // blocks, steps // LEAST_STEPS))
    return -(-steps // -(-steps // splits))


def _smem_bytes(
    config: ConvConfig, mode: str, itemsize: int, along_k: bool, taps: int, wide_filter: bool, index: int
) -> int:
    key = 8 if wide_filter else 4
    tiles = (config.bm * config.bk + config.bk * (config.bn + along_k)) * itemsize
    columns = config.bn * (index + key) if along_k else 0
    # in two sizes, as code for the emulator is made for a size
    table = (64 if taps <= 64 else MASKED_TAPS**2) * (2 * index + key) if mode != WEIGHT_GRAD and not wide_filter else 0
    return tiles + columns + table


def configurations() -> Iterator[tuple[int, ConvConfig]]:
    """Every (element size in bytes, configuration) a plan may choose."""
    for itemsize, configs in CONV_CONFIGS.items():
        for config in configs:
            yield itemsize, config
