"""Which launches make a 2-d convolution or one of its gradients: pure, from shapes and strides alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cudaops.errors import LaunchError
from cudaops.plan import DTYPES, KernelSource, LaunchConfig, Plan, TensorSpec

Pair = tuple[int, int]
Padding = tuple[int, int, int, int]  # top, left, bottom, right

FORWARD, INPUT_GRAD, WEIGHT_GRAD = "FORWARD", "INPUT_GRAD", "WEIGHT_GRAD"
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

# Streaming multiprocessors of the arch's usual part (T4, A100, RTX 3090, RTX 4090, H100, B200, B300, RTX 5090).
_SMS = {
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 82,
    "sm_89": 128,
    "sm_90": 132,
    "sm_100": 148,
    "sm_103": 148,
    "sm_120": 170,
}


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """A convolution's sizes. `padding` is (top, left, bottom, right); every other pair is (height, width)."""

    batch: int
    channels: int
    image: Pair
    filters: int
    taps: Pair
    output: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int


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


# ---- shapes and memory formats: sizes may be symbolic ----


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
    problem = _problem(input.shape, weight.shape, shape, stride, padding, dilation, groups)
    output = _dense(shape, input.dtype, channels_last(input, weight))
    return _plan(FORWARD, "conv2d", problem, weight, input, output, bias, activation, arch)


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
    problem = _problem(input_shape, weight.shape, shape, stride, padding, dilation, groups)
    output = _dense(input_shape, grad.dtype, channels_last(grad, weight))
    return _plan(INPUT_GRAD, "conv2d_input", problem, weight, grad, output, False, "", arch)


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
    problem = _problem(input.shape, weight.shape, shape, stride, padding, dilation, groups)
    return _plan(WEIGHT_GRAD, "conv2d_weight", problem, grad, input, weight, False, "", arch)


def channels_last(*operands: TensorSpec) -> bool:
    """The format of a result: channels last if any operand is, as torch's convolutions have it."""
    return any(suggests_channels_last(operand.shape, operand.strides) for operand in operands)


def check_grad(op: str, grad: Sequence[int], output: Sequence[int]) -> None:
    """Refuse a gradient that is not of the output's shape.

    Raises:
        RuntimeError: it is not.
    """
    if list(grad) != list(output):
        raise RuntimeError(f"{op}: expected grad of size {list(output)}, the size of the output, but got {list(grad)}")


def _problem(
    image: Sequence[int],
    weight: Sequence[int],
    output: Sequence[int],
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
) -> ConvProblem:
    batch, channels, height, width = image
    filters, _, r, s = weight
    return ConvProblem(
        batch, channels, (height, width), filters, (r, s), (output[2], output[3]), stride, padding, dilation, groups
    )


def _dense(shape: tuple[int, ...], dtype: str, channels_last: bool) -> TensorSpec:
    return TensorSpec(shape, dense_strides(shape, channels_last), dtype, 16)


# ---- geometry ----


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What conv_geometry.cuh's ConvGeometry holds, in its order; sums and tiles are filled in last."""

    n: int
    k: int
    a_group: int
    b_group: int
    c_group: int
    a_row: int
    a_k: tuple[int, int, int]
    b: tuple[int, int, int, int]  # channel, image, y, x
    c_row: int
    c_n: tuple[int, int, int]
    m: int
    taps: Pair
    source: Pair  # height and width of the image B is taken from
    pixels: Pair  # of the one whose pixels are counted
    channels: int  # summed over, in a group
    images: int
    k_per_split: int = 0
    split_stride: int = 0
    tiles_m: int = 0
    tiles_n: int = 0
    a_linear: bool = False
    has_bias: bool = False

    @property
    def b_last(self) -> int:
        """The offset of the last element of B in a group."""
        channel, image, y, x = self.b
        high, wide = self.source
        return (self.images - 1) * image + (self.channels - 1) * channel + (high - 1) * y + (wide - 1) * x

    @property
    def pixels_linear(self) -> bool:
        """At stride 1, windows of neighbouring pixels start at neighbouring elements of B."""
        return self.source == self.pixels and self.b[3] == 1 and self.b[2] == self.source[1]

    def pack(self, problem: ConvProblem, by_taps: int, wide_index: bool) -> bytes:
        """The struct's bytes, padding at its end included."""
        index = (
            *(
                self.n,
                self.k,
                self.k_per_split,
                self.split_stride,
                self.a_group,
                self.b_group,
                self.c_group,
                self.a_row,
            ),
            *(*self.a_k, *self.b, self.b_last, self.c_row, *self.c_n),
        )
        top, left, _, _ = problem.padding
        taps = self.taps[0] * self.taps[1]
        ints = (
            *(self.m, self.tiles_m, self.tiles_n, taps, self.taps[1], self.taps[0], *self.source),
            *(*problem.stride, top, left, *problem.dilation),
            *(int(self.a_linear), int(problem.stride == (1, 1) and self.pixels_linear), int(self.has_bias)),
        )
        high, wide = self.pixels
        packed = struct.pack(f"<{len(index)}{'q' if wide_index else 'i'}", *index) + struct.pack(
            f"<{len(ints)}i", *ints
        )
        packed += b"".join(fast_division(d) for d in (high * wide, wide, by_taps))
        return packed + bytes(-len(packed) % (8 if wide_index else 4))


def fast_division(divisor: int) -> bytes:
    """conv_geometry.cuh's FastDiv: exact for numerators from 0 to 2^31 - 1.

    Source: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994, figure 4.1.
    """
    shift = (divisor - 1).bit_length()
    return struct.pack("<iII", divisor, ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift)


def _geometry(mode: str, p: ConvProblem, a: TensorSpec, b: TensorSpec, c: TensorSpec) -> _Geometry:
    filters, channels = p.filters // p.groups, p.channels // p.groups
    taps = p.taps[0] * p.taps[1]
    (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3) = a.strides, b.strides, c.strides
    output_pixels = p.output[0] * p.output[1]
    if mode == FORWARD:
        return _Geometry(
            m=filters,
            n=p.batch * output_pixels,
            k=channels * taps,
            a_group=filters * a0,
            b_group=channels * b1,
            c_group=filters * c1,
            a_row=a0,
            a_k=(a1, a2, a3),
            b=(b1, b0, b2, b3),
            c_row=c1,
            c_n=(c0, c2, c3),
            taps=p.taps,
            source=p.image,
            pixels=p.output,
            channels=channels,
            images=p.batch,
        )
    if mode == INPUT_GRAD:
        return _Geometry(
            m=channels,
            n=p.batch * p.image[0] * p.image[1],
            k=filters * taps,
            a_group=filters * a0,
            b_group=filters * b1,
            c_group=channels * c1,
            a_row=a1,
            a_k=(a0, a2, a3),
            b=(b1, b0, b2, b3),
            c_row=c1,
            c_n=(c0, c2, c3),
            taps=p.taps,
            source=p.output,
            pixels=p.image,
            channels=filters,
            images=p.batch,
        )
    return _Geometry(
        m=filters,
        n=channels * taps,
        k=p.batch * output_pixels,
        a_group=filters * a1,
        b_group=channels * b1,
        c_group=filters * c0,
        a_row=a1,
        a_k=(a0, a2, a3),
        b=(b1, b0, b2, b3),
        c_row=c0,
        c_n=(c1, c2, c3),
        taps=p.taps,
        source=p.image,
        pixels=p.output,
        channels=channels,
        images=p.batch,
    )


def _fits_int(g: _Geometry, problem: ConvProblem, specs: tuple[TensorSpec, ...]) -> bool:
    """Every offset the kernel forms, those outside the image included, fits a 32-bit int."""
    _, _, y, x = g.b
    overhang = [
        before + after + taps * dilation
        for before, after, taps, dilation in zip(
            problem.padding[:2], problem.padding[2:], problem.taps, problem.dilation, strict=True
        )
    ]
    return (
        max(
            g.n,
            g.k,
            g.b_last + overhang[0] * y + overhang[1] * x,
            *(sum((size - 1) * step for size, step in zip(s.shape, s.strides, strict=True)) for s in specs),
        )
        < _INT_LIMIT
    )


# ---- the plan ----


def _plan(
    mode: str,
    op: str,
    problem: ConvProblem,
    a: TensorSpec,
    b: TensorSpec,
    c: TensorSpec,
    bias: bool,
    activation: str,
    arch: str,
) -> ConvPlan:
    if 0 in c.shape or 0 in a.shape or 0 in b.shape:
        return ConvPlan(c, ())
    g = _geometry(mode, problem, a, b, c)
    along_k = mode == WEIGHT_GRAD or (g.b[0] == 1 and g.channels > 1 and g.b[3] != 1)
    tap_outer = along_k and mode != WEIGHT_GRAD
    wide_filter = max(problem.taps) > MASKED_TAPS
    wide_index = not _fits_int(g, problem, (a, b, c))
    if g.pixels[0] * g.pixels[1] >= 2**31:
        raise LaunchError(
            f"{op}: an image of {g.pixels[0]} x {g.pixels[1]} pixels; the limit is 2^31 - 1: cut it into parts"
        )
    itemsize, element = DTYPES[c.dtype]
    config = _choose(g, problem.groups, itemsize, along_k)
    tiles_m, tiles_n = -(-g.m // config.bm), -(-g.n // config.bn)
    tiles = tiles_m * tiles_n * problem.groups
    splits, k_per_split = _splits(tiles, g.k, config.bk, _SMS.get(arch.rstrip("af"), 108))
    numel = c.shape[0] * c.shape[1] * c.shape[2] * c.shape[3]
    last = splits == 1
    g = replace(
        g,
        k_per_split=k_per_split,
        split_stride=0 if last else numel,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        a_linear=_linear(mode, g, tap_outer),
        has_bias=last and bias,
    )
    source = KernelSource(
        "conv_implicit_gemm.cu",
        "conv_implicit_gemm",
        tuple(
            (name, str(value))
            for name, value in {
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
            }.items()
        ),
    )
    taps = problem.taps[0] * problem.taps[1]
    launch = LaunchConfig(
        (tiles, splits, 1),
        (config.threads, 1, 1),
        _smem_bytes(config, mode, itemsize, along_k, taps, wide_filter, 8 if wide_index else 4),
    )
    reason = (
        f"{config.bm}x{config.bn}x{config.bk} tile ({config.reason}), {tiles} tiles"
        f"{f' x {splits} splits of the sum' if splits > 1 else ''} of {g.m} x {g.n} x {g.k}"
        f"{f' in {problem.groups} groups' if problem.groups > 1 else ''}"
    )
    scalars = (g.pack(problem, g.channels if tap_outer else taps, wide_index),)
    product = Plan(op, source, launch, scalars, reason)
    if last:
        return ConvPlan(c, (product,))
    return ConvPlan(c, (product, _sum(op, c, element, splits, numel, bias, activation)), splits * numel)


def _sum(op: str, c: TensorSpec, element: str, splits: int, numel: int, bias: bool, activation: str) -> Plan:
    wide = splits * numel >= _INT_LIMIT
    source = KernelSource(
        "conv_split_sum.cu",
        "conv_split_sum",
        (
            ("ELEMENT", element),
            ("THREADS", str(SUM_THREADS)),
            ("ITEMS", str(SUM_ITEMS)),
            ("INDEX", "long long" if wide else "int"),
            ("ACTIVATION", str(ACTIVATIONS.index(activation))),
        ),
    )
    launch = LaunchConfig((-(-numel // (SUM_THREADS * SUM_ITEMS)), 1, 1), (SUM_THREADS, 1, 1))
    scalars = (numel, splits, c.strides[1], c.shape[1], int(bias))
    return Plan(op, source, launch, scalars, f"adds up {splits} splits of the sum, in order")


def _linear(mode: str, g: _Geometry, tap_outer: bool) -> bool:
    """The elements of a row of A lie side by side in the order of the sum."""
    sizes = (g.images, *g.pixels) if mode == WEIGHT_GRAD else (g.channels, *g.taps)
    step = 1
    for axis in (0, 2, 1) if tap_outer else (2, 1, 0):
        if sizes[axis] > 1 and g.a_k[axis] != step:
            return False
        step *= sizes[axis]
    return True


def _choose(g: _Geometry, groups: int, itemsize: int, along_k: bool) -> ConvConfig:
    """The configuration that issues the fewest instructions, ragged edges counted in."""

    def cost(config: ConvConfig) -> int:
        tiles = -(-g.m // config.bm) * -(-g.n // config.bn) * groups
        return tiles * -(-g.k // config.bk) * config.instructions(along_k, 16 // itemsize)

    return min(CONV_CONFIGS[itemsize], key=cost)


def _splits(tiles: int, k: int, bk: int, sms: int) -> Pair:
    """Into how many parts the sum is cut, and how much of it each takes: enough to give every SM a block.

    Small images with many channels have few output tiles and long sums, the weight gradient still more so.
    """
    steps = -(-k // bk)
    splits = max(1, min(sms // tiles, steps // LEAST_STEPS))
    each = -(-steps // splits)
    return -(-steps // each), each * bk


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
