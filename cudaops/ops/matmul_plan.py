"""Which kernels a product runs on, and how.

matmul_skinny where one side has a few rows, matmul_batched for many small matrices, matmul_mma where the tensor cores
have the type, else matmul_simt. A long sum of few outputs is made in parts, which matmul_split_sum adds up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cudaops.errors import LaunchError, UnsupportedError
from cudaops.ops.matmul_configs import (
    BATCHED,
    MATMUL_CONFIGS,
    MMA_CONFIGS,
    MMA_MULTIPLY,
    PACK_BYTES,
    SKINNY,
    MatmulConfig,
    MmaConfig,
    SkinnyConfig,
    batched_config,
    is_legal,
    skinny_config,
)
from cudaops.ops.matmul_problem import MAX_BATCH_DIMS, Operand, Problem, Residual, problem_of
from cudaops.plan import (
    DTYPES,
    MAX_GRID,
    DType,
    KernelSource,
    LaunchConfig,
    Plan,
    TensorSpec,
    limits_of,
    sm_count,
)

_INT_MAX = 2**31 - 1 - 1024  # leaves room for a tile beyond the end
_RASTER_ROWS = 8  # tile rows that neighbouring blocks share, as in the kernel
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")  # in the order of epilogue.cuh
_MMA_WORK = 32**3  # multiply-adds of a matrix below which tensor cores gain nothing, and their kernel compiles longer
_FLOATS = ("float32", "float64", "float16", "bfloat16")

Number = int | float


def plan_matmul(
    input: TensorSpec,
    other: TensorSpec,
    bias: TensorSpec | None = None,
    residual: TensorSpec | None = None,
    *,
    arch: str,
    activation: str | None = None,
    alpha: Number = 1,
    beta: Number = 1,
    conjugate: tuple[bool, bool] = (False, False),
    out: str | None = None,
    tf32: bool = False,
    config: str | None = None,
    op: str = "matmul",
) -> Plan:
    """Plan one launch: tensors (out, input, other, bias, residual), out contiguous; out again where there is no bias or
    residual. The result is `activation(alpha input other + beta residual + bias)`.

    Arguments:
        input, other: as `matmul` takes them; the product must not be empty (K may be 0).
        bias: `(N)` or one element, added to every row.
        residual: broadcasts to the result.
        arch: `'sm_80'`.
        activation: None, `'relu'`, `'gelu'`, `'gelu_tanh'`, `'silu'`, `'sigmoid'` or `'tanh'`; integers have None and
            `'relu'`, complex numbers None.
        alpha, beta: whole numbers for integers, 1 for complex numbers.
        conjugate: of input, of other: multiply by the complex conjugate.
        out: `'int32'` for a product of int8 or uint8 that is not cut to its operands' type.
        tf32: float32 may be read as tf32.
        config: the name of one of MATMUL_CONFIGS or MMA_CONFIGS, `'skinny'`, `'batched'`; None chooses.
        op: the name the plan goes by.

    Raises:
        RuntimeError: shapes do not fit together.
        UnsupportedError: no kernel for the dtype or activation.
        LaunchError: `config` is unknown, or cannot be had for this dtype or shape; more batch dimensions than the
            kernels take.
    """
    if input.dtype not in DTYPES:
        raise UnsupportedError(f"{op}: no kernel for {input.dtype}; there is one for {', '.join(DTYPES)}")
    known = ACTIVATIONS if input.dtype in _FLOATS else ACTIVATIONS[: 1 if input.dtype.startswith("complex") else 2]
    if activation not in known:
        raise UnsupportedError(f"{op}: no activation {activation!r} for {input.dtype}; there is {known}")
    problem = problem_of(input, other, op, residual)
    if len(problem.sizes) > MAX_BATCH_DIMS:
        raise LaunchError(
            f"{op}: {len(problem.sizes)} batch dimensions that cannot be merged, the kernel takes {MAX_BATCH_DIMS}; "
            "make the operands contiguous"
        )
    how = _How(op, input.dtype, out or input.dtype, arch, tf32, config, conjugate)
    return _plan(_choose(problem, how), how, _Finish(bias, residual is not None, activation, alpha, beta))


# ---- a sum in parts ----

_PARTIAL = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32", "int16": "int32"}
_LEAST_PART = 512  # elements of k that a part has at least, for the sums to be worth writing and reading again
_PART_UNIT = 64  # of which a part's k is a multiple, so that all parts are aligned as the first is
_MOST_WORKSPACE = 64 << 20  # bytes
_SUM_THREADS = 256  # of matmul_split_sum


@dataclass(frozen=True, slots=True)
class Product:
    """The launches that make a product: one, or one of partial sums and one that adds them up.

    `workspace` is the dtype and number of the partial sums. Tensors of the launches: (out, input, other, bias,
    residual); or (workspace, input, other, workspace, workspace) and (out, workspace, bias, residual).
    """

    launches: tuple[Plan, ...]
    workspace: tuple[str, int] | None = None


def plan_product(
    input: TensorSpec,
    other: TensorSpec,
    bias: TensorSpec | None = None,
    residual: TensorSpec | None = None,
    *,
    arch: str,
    activation: str | None = None,
    alpha: Number = 1,
    beta: Number = 1,
    conjugate: tuple[bool, bool] = (False, False),
    tf32: bool = False,
    op: str = "matmul",
) -> Product:
    """Plan a product, its sum in parts where it is long and its outputs are too few to keep the GPU busy.

    The parts are added up in order, so that the result is repeatable. Arguments and errors as `plan_matmul`'s.
    """
    whole = plan_matmul(
        input, other, bias, residual, arch=arch, activation=activation, alpha=alpha, beta=beta, conjugate=conjugate,
        tf32=tf32, op=op,
    )  # fmt: skip
    problem = problem_of(input, other, op, residual)
    partial = _PARTIAL.get(input.dtype, input.dtype)
    parts, k = _parts(problem, whole, DTYPES[partial].itemsize, sm_count(arch))
    if parts == 1:
        return Product((whole,))
    how = _How(op, input.dtype, partial, arch, tf32, None, conjugate)
    sums = _plan(_choose(problem.split(parts, k), how), how, _Finish())
    finish = _Finish(bias, residual is not None, activation, alpha, beta)
    outputs = problem.a.outer * problem.b.outer * problem.batches
    return Product((sums, _sum(problem, parts, partial, input.dtype, op, finish)), (partial, parts * outputs))


def _parts(problem: Problem, whole: Plan, itemsize: int, sms: int) -> tuple[int, int]:
    """(parts of the sum, k of each but the last)"""
    if whole.source.entry in ("matmul_skinny", "matmul_batched") or len(problem.sizes) == MAX_BATCH_DIMS:
        return 1, problem.k
    outputs = problem.a.outer * problem.b.outer * problem.batches
    parts = min(sms // whole.config.blocks, problem.k // _LEAST_PART, _MOST_WORKSPACE // (outputs * itemsize))
    if parts < 2:
        return 1, problem.k
    k = -(-problem.k // (parts * _PART_UNIT)) * _PART_UNIT
    return -(-problem.k // k), k


def _sum(problem: Problem, parts: int, partial: str, out: str, op: str, finish: _Finish) -> Plan:
    outputs = problem.a.outer * problem.b.outer * problem.batches
    fits = max(problem.largest, finish.bias_stride) <= _INT_MAX
    defines: dict[str, object] = {
        "ELEMENT": DTYPES[out].ctype,
        "PARTIAL": DTYPES[partial].ctype,
        "SCALAR": DTYPES[out].scalar,
        "INDEX": "int" if fits else "long long",
        **finish.defines(swap=False),
    }
    fill = MAX_BATCH_DIMS - len(problem.sizes)
    r = problem.residual or Residual(0, 0, (0,) * len(problem.sizes))
    sizes = (1,) * fill + problem.sizes
    return Plan(
        op=op,
        source=KernelSource("matmul_split_sum.cu", "matmul_split_sum", tuple((k, str(v)) for k, v in defines.items())),
        config=LaunchConfig(_grid(-(-outputs // _SUM_THREADS)), (_SUM_THREADS, 1, 1)),
        scalars=(
            *(finish.bias_stride, r.m_stride, r.n_stride, *(0,) * fill, *r.batch, *sizes[1:]),
            *(problem.a.outer, problem.b.outer, parts, outputs, finish.alpha, finish.beta),
        ),
        reason=f"adds up {parts} parts of the sum, in order",
    )


# ---- one launch ----


@dataclass(frozen=True, slots=True)
class _How:
    """What a launch depends on beside the problem."""

    op: str
    dtype: str
    out: str
    arch: str
    tf32: bool
    config: str | None
    conjugate: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class _Finish:
    """What becomes of the sums."""

    bias: TensorSpec | None = None
    residual: bool = False
    activation: str | None = None
    alpha: Number = 1
    beta: Number = 1

    @property
    def bias_stride(self) -> int:
        return self.bias.strides[-1] if self.bias is not None and self.bias.shape and self.bias.shape[-1] > 1 else 0

    def defines(self, swap: bool) -> dict[str, object]:
        """As epilogue.cuh's kernels take them."""
        return {
            "BIAS": 0 if self.bias is None else 2 if swap else 1,
            "ACTIVATION": ACTIVATIONS.index(self.activation),
            "RESIDUAL": int(self.residual),
            "SCALED": int(self.alpha != 1 or (self.residual and self.beta != 1)),
        }


def _choose(problem: Problem, how: _How) -> _Launch:
    dtype, sms = DTYPES[how.dtype], sm_count(how.arch)
    launch: _Launch | None
    if how.out == how.dtype or problem.k_total:
        worth = how.config is not None or problem.a.outer * problem.b.outer * problem.extent >= _MMA_WORK
        launch = None if problem.k_total else _skinny(problem, dtype, sms, how.config) or _batched(problem, dtype, how)
        launch = launch or (_mma(problem, how) if worth else None)
        return launch or _tiled(problem, dtype, sms, how.config, how.op)
    launch = _mma(problem, how) if how.out == "int32" else None
    if launch is None or dtype.itemsize != 1:
        raise UnsupportedError(
            f"{how.op}: no kernel gives {how.out} for {how.dtype} on {how.arch}; int32 is for int8 and uint8, from "
            "sm_80 on"
        )
    return launch


def _plan(launch: _Launch, how: _How, finish: _Finish) -> Plan:
    problem, mma = launch.problem, launch.entry == "matmul_mma"
    fits = max(problem.largest, finish.bias_stride, launch.blocks * _RASTER_ROWS) <= _INT_MAX
    defines: dict[str, object] = {
        "ELEMENT": DTYPES[how.dtype].ctype,
        "SCALAR": DTYPES[how.dtype].scalar,
        "INDEX": "int" if fits else "long long",
        **launch.defines,
        **finish.defines(launch.swap),
    }
    if not mma:
        first, second = how.conjugate[::-1] if launch.swap else how.conjugate
        defines |= {"A_CONJ": int(first), "B_CONJ": int(second), "SWAP": int(launch.swap)}
    tiled = launch.entry in ("matmul_simt", "matmul_mma")
    if tiled:
        defines |= {"OUTPUT": DTYPES[how.out].ctype, "SPLIT": int(problem.k_total > 0)}
    scalars = problem.scalars(finish.bias_stride, c_n=not mma, k_total=tiled)
    return Plan(
        op=how.op,
        source=KernelSource(f"{launch.entry}.cu", launch.entry, tuple((k, str(v)) for k, v in defines.items())),
        config=LaunchConfig(_grid(launch.blocks), (launch.threads, 1, 1), launch.smem_bytes),
        scalars=(*scalars, finish.alpha, finish.beta),
        reason=f"{launch.reason}: {launch.blocks} blocks for {sm_count(how.arch)} SMs",
    )


def _grid(blocks: int) -> tuple[int, int, int]:
    """The blocks on x, with y taking over where x ends."""
    y = -(-blocks // MAX_GRID[0])
    return -(-blocks // y), y, 1


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel chosen for a problem, which is the transposed one with `swap`."""

    entry: str
    problem: Problem
    swap: bool
    blocks: int
    threads: int
    defines: dict[str, object]
    reason: str
    smem_bytes: int = 0


# ---- tensor cores ----


def _mma(problem: Problem, how: _How) -> _Launch | None:
    """The launch of matmul_mma, where the arch has the instructions and copies, and the type is theirs."""
    dtype, out, arch, name = how.dtype, how.out, how.arch, how.config
    multiply = MMA_MULTIPLY.get(dtype)
    if multiply is None or (multiply == "tf32" and not how.tf32) or int(arch.removeprefix("sm_").rstrip("af")) < 80:
        return None
    smem, sms = limits_of(arch).smem_per_block, sm_count(arch)
    fitting = [c for c in MMA_CONFIGS if c.smem_bytes <= smem and name in (None, c.name)]
    if not fitting:
        return None
    config = min(fitting, key=lambda c: _cost(c, problem, sms))
    itemsize = DTYPES[dtype].itemsize
    (a_fast, a_width), (b_fast, b_width) = (_copy(x, problem.extent, itemsize) for x in (problem.a, problem.b))
    store = PACK_BYTES // DTYPES[out].itemsize
    return _Launch(
        entry="matmul_mma",
        problem=problem,
        swap=False,
        blocks=_tiles(config, problem),
        threads=config.threads,
        smem_bytes=config.smem_bytes,
        defines={
            "MULTIPLY": multiply,
            "BM": config.bm,
            "BN": config.bn,
            "STAGES": config.stages,
            "MIN_BLOCKS": config.blocks_per_sm,
            "A_K_FAST": int(a_fast),
            "A_WIDTH": a_width,
            "B_K_FAST": int(b_fast),
            "B_WIDTH": b_width,
            "C_WIDTH": store if problem.b.outer % store == 0 else 1,
        },
        reason=f"{config.name} tile in {multiply}, {config.stages} stages, a {_copied(a_fast, a_width)}, "
        f"b {_copied(b_fast, b_width)}",
    )


def _copy(operand: Operand, k: int, itemsize: int) -> tuple[bool, int]:
    """(whether k is the dimension whose elements are neighbours, bytes copied at once; 0: element by element)"""
    if operand.k_stride == 1 or operand.outer_stride != 1:
        k_fast = operand.k_stride == 1 or (operand.k_stride or math.inf) < (operand.outer_stride or math.inf)
        unit, extent, slow_stride = operand.k_stride == 1, k, operand.outer_stride
        widths: tuple[int, ...] = (16, 8, 4)
    else:
        k_fast, unit, extent, slow_stride = False, True, operand.outer, operand.k_stride
        # halves can lie in shared memory as they do outside, words and bytes are turned round on the way, four by four
        widths = (16, 8, 4) if itemsize == 2 else (4 * itemsize,)
    if unit:
        for width in widths:
            if width >= itemsize and operand.allows(width // itemsize, extent, slow_stride, width):
                return k_fast, width
    return k_fast, 0


def _copied(k_fast: bool, width: int) -> str:
    return f"along {'k' if k_fast else 'rows'} by {f'{width} bytes' if width else 'element'}"


# ---- tiles ----


@dataclass(frozen=True, slots=True)
class _Load:
    """How a tile of an operand is read: along which dimension, how many elements at once, whether its stride is 1."""

    k_fast: bool
    width: int
    unit: bool

    def __str__(self) -> str:
        way = "k" if self.k_fast else "rows"
        return f"along {way} by {self.width}" + ("" if self.unit else ", strided")


def _load(operand: Operand, k: int, pack: int, itemsize: int) -> _Load:
    if operand.k_stride == 1:
        k_fast, extent, slow_stride = True, k, operand.outer_stride
    elif operand.outer_stride == 1:
        k_fast, extent, slow_stride = False, operand.outer, operand.k_stride
    else:
        outer = operand.outer_stride or math.inf  # 0: nothing to run along
        return _Load((operand.k_stride or math.inf) < outer, 1, False)
    return _Load(k_fast, pack if operand.allows(pack, extent, slow_stride, pack * itemsize) else 1, True)


def _tiled(problem: Problem, dtype: DType, sms: int, name: str | None, op: str) -> _Launch:
    itemsize = dtype.computed
    legal = [config for config in MATMUL_CONFIGS if is_legal(config, itemsize) and name in (None, config.name)]
    if not legal:
        known = ", ".join(config.name for config in MATMUL_CONFIGS if is_legal(config, itemsize))
        raise LaunchError(
            f"{op}: no configuration {name!r} for this shape and {itemsize}-byte elements; there is {known}"
        )
    # of equals: the least work, then as given, then the larger tile
    config, swap = min(
        ((config, swap) for swap in (False, True) for config in legal),
        key=lambda choice: _cost(choice[0], problem.swapped() if choice[1] else problem, sms),
    )
    problem = problem.swapped() if swap else problem
    pack, run = PACK_BYTES // itemsize, config.run(itemsize)
    a, b = (_load(x, problem.extent, pack, dtype.itemsize) for x in (problem.a, problem.b))
    store_width = run if problem.c_n == 1 and problem.b.outer % run == 0 else 1
    return _Launch(
        entry="matmul_simt",
        problem=problem,
        swap=swap,
        blocks=_tiles(config, problem),
        threads=config.threads,
        defines={
            "BM": config.bm,
            "BN": config.bn,
            "BK": config.bk_at(itemsize),
            "TM": config.tm,
            "TN": config.tn,
            "LANES_N": config.lanes_n,
            "MIN_BLOCKS": config.blocks_per_sm_at(itemsize),
            "A_K_FAST": int(a.k_fast),
            "A_WIDTH": a.width,
            "A_UNIT": int(a.unit),
            "B_K_FAST": int(b.k_fast),
            "B_WIDTH": b.width,
            "B_UNIT": int(b.unit),
            "C_WIDTH": store_width,
        },
        reason=f"{config.name} tile{' of the transposed product' if swap else ''}, {config.tm}x{config.tn} a thread, "
        f"a {a}, b {b}, c by {store_width}",
    )


def _tiles(config: MatmulConfig | MmaConfig, problem: Problem) -> int:
    return -(-problem.a.outer // config.bm) * -(-problem.b.outer // config.bn) * problem.batches


def _cost(config: MatmulConfig | MmaConfig, problem: Problem, sms: int) -> tuple[float, int]:
    """Time of the busiest SM, which gets its share of the blocks, rounded up; then the work of all. Both in outputs."""
    blocks = _tiles(config, problem)
    rounds = -(-blocks // sms)
    return rounds * config.bm * config.bn / config.speed, blocks * config.bm * config.bn


# ---- many small matrices ----

_SMALL_FOR_MMA = 32  # rows and columns beyond which a tensor core's smallest tile is filled well enough
_LEAST_BATCHES = 8  # fewer are a few tiles, whatever is done


def _batched(problem: Problem, dtype: DType, how: _How) -> _Launch | None:
    """The launch of matmul_batched, where a matrix would leave most of a tile empty."""
    if how.config not in (None, BATCHED) or (how.config is None and problem.batches < _LEAST_BATCHES):
        return None
    config = batched_config(problem.a.outer, problem.b.outer, dtype.computed)
    if config is None:
        return None
    if how.config is None and min(problem.a.outer, problem.b.outer) > _SMALL_FOR_MMA and _mma(problem, how) is not None:
        return None
    loads = [_load(x, problem.k, config.tile, dtype.itemsize) for x in (problem.a, problem.b)]
    return _Launch(
        entry="matmul_batched",
        problem=problem,
        swap=False,
        blocks=-(-problem.batches // config.matrices),
        threads=config.threads,
        defines={
            "TILE": config.tile,
            "THREADS_M": config.threads_m,
            "THREADS_N": config.threads_n,
            "MATRICES": config.matrices,
            "A_K_FAST": int(loads[0].k_fast),
            "A_WIDTH": loads[0].width,
            "B_K_FAST": int(loads[1].k_fast),
            "B_WIDTH": loads[1].width,
        },
        reason=f"{config.matrices} matrices a block, {config.tile}x{config.tile} outputs a thread, a {loads[0]}, "
        f"b {loads[1]}",
    )


# ---- few rows ----


def _skinny(problem: Problem, dtype: DType, sms: int, name: str | None) -> _Launch | None:
    """The launch of matmul_skinny, where one side has few enough rows and the sum is long enough for its lanes."""
    if name not in (None, SKINNY):
        return None
    swap = problem.b.outer < problem.a.outer  # a is the side with few rows
    problem = problem.swapped() if swap else problem
    a, b, k = problem.a, problem.b, problem.k
    pack = PACK_BYTES // dtype.computed
    k_lanes = b.k_stride == 1 or b.outer_stride != 1
    if k_lanes:
        unit = b.k_stride == 1 and a.k_stride == 1
        wide = unit and all(x.allows(pack, k, x.outer_stride, pack * dtype.itemsize) for x in (a, b))
    else:
        unit = True
        # narrow where wide loads would leave SMs without a block
        wide = (
            b.allows(pack, b.outer, b.k_stride, pack * dtype.itemsize) and b.outer * problem.batches >= 32 * pack * sms
        )
    width = pack if wide else 1
    config = skinny_config(a.outer, b.outer * problem.batches, k, k_lanes, width, dtype.computed, sms)
    if config is None:
        return None
    return _Launch(
        entry="matmul_skinny",
        problem=problem,
        swap=swap,
        blocks=-(-b.outer // config.block_columns) * problem.batches,
        threads=config.threads,
        defines={
            "ROWS": config.rows,
            "WARPS": config.warps,
            "K_WARPS": config.k_warps,
            "K_LANES": int(config.k_lanes),
            "COLUMNS": config.columns,
            "WIDTH": config.width,
            "UNIT": int(unit),
        },
        reason=_skinny_reason(config, swap),
    )


def _skinny_reason(config: SkinnyConfig, swap: bool) -> str:
    lanes = "k" if config.k_lanes else "n"
    shared = f", {config.k_warps} warps share k" if config.k_warps > 1 else ""
    return (
        f"{config.rows} {'columns' if swap else 'rows'} at a time, lanes along {lanes} by {config.width}, "
        f"{config.columns} outputs of each a {'warp' if config.k_lanes else 'lane'}{shared}"
    )
