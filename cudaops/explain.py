"""`explain`: what an op would launch for given shapes, and why, for any arch; no GPU is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cudaops.compile import compile_kernel
from cudaops.errors import UnsupportedError
from cudaops.launch import arch_of
from cudaops.listing import Listing
from cudaops.ops.matmul_plan import Product, plan_product
from cudaops.ops.matmul_problem import result_shape
from cudaops.plan import DTYPES, TensorSpec, blocks_per_sm, limits_of, sm_count

_OPS = {"matmul": (2, 2, "input other"), "linear": (2, 4, "input weight [bias [residual]]")}


@dataclass(frozen=True, slots=True)
class _Peak:
    """What the arch's usual part can do (that of plan.sm_count): GB/s, and 10^12 operations a second by kind.

    From NVIDIA's data sheets; dense, and for halves with float32 sums.
    """

    memory: float
    float32: float
    float64: float
    tf32: float
    half: float
    int8: float


_PEAKS = {
    "sm_75": _Peak(320, 8.1, 0.25, 0, 65, 130),
    "sm_80": _Peak(2039, 19.5, 9.7, 156, 312, 624),
    "sm_86": _Peak(936, 35.6, 0.56, 35.6, 71, 284),
    "sm_89": _Peak(1008, 82.6, 1.29, 82.6, 165, 660),
    "sm_90": _Peak(3350, 66.9, 33.5, 494, 989, 1979),
    "sm_100": _Peak(8000, 75, 37, 1100, 2250, 4500),
    "sm_103": _Peak(8000, 75, 1.2, 1100, 2250, 150),
    "sm_120": _Peak(1792, 104.8, 1.64, 104.8, 209.5, 838),
}


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Listing):
    """What `explain` found: print it, or read the fields.

    Arguments:
        result: the shape of the output.
        kernel: the entry; None: nothing is launched, the output is empty or zero. Then what follows is 0 or empty.
        reason: the configuration, how operands are read, and why.
        grid, block: of the launch; `blocks` of it in all.
        waves: rounds in which the SMs of the arch's usual part take the blocks; the last one is rarely full.
        blocks_per_sm: that an SM holds at once.
        occupancy: the fraction of an SM's threads that these are.
        registers: a thread's; `spill_bytes` of them go to memory.
        smem_bytes: a block's, static and dynamic.
        operations: multiplications and additions of real numbers.
        bytes: of the operands and the output, each moved once.
        arithmetic_us, memory_us: the least time either takes on the arch's usual part.
        bound: which of the two is longer, `'arithmetic'` or `'memory'`.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    arch: str
    result: tuple[int, ...]
    kernel: str | None = None
    reason: str = "nothing to launch: the output is empty, or a sum of nothing"
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    blocks: int = 0
    waves: float = 0.0
    blocks_per_sm: int = 0
    occupancy: float = 0.0
    registers: int = 0
    spill_bytes: int = 0
    smem_bytes: int = 0
    operations: int = 0
    bytes: int = 0
    arithmetic_us: float = 0.0
    memory_us: float = 0.0
    bound: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON types."""
        return asdict(self)

    def _lines(self) -> list[tuple[str, str]]:
        shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        lines = [("op", f"{self.op} {shapes} in {self.dtype}, on {self.arch}")]
        lines += [("output", "x".join(map(str, self.result)) or "scalar"), ("kernel", self.kernel or "none")]
        lines += [("why", self.reason)]
        if self.kernel is None:
            return lines
        grid, block = ("x".join(str(n) for n in size if n > 1) or "1" for size in (self.grid, self.block))
        spilled = f", {self.spill_bytes} bytes spilled" if self.spill_bytes else ", none spilled"
        return [
            *lines,
            ("grid", f"{grid} blocks of {block} threads"),
            ("waves", f"{self.waves:.2f} on {sm_count(self.arch)} SMs"),
            ("occupancy", f"blocks an SM: {self.blocks_per_sm}, {self.occupancy:.0%} of its threads"),
            ("registers", f"{self.registers} a thread{spilled}"),
            ("shared memory", f"{self.smem_bytes} bytes a block"),
            (
                "bound",
                f"{self.bound}: {self.operations / 1e9:.4g} G operations take at least {_time(self.arithmetic_us)}, "
                f"{self.bytes / 1e6:.4g} MB at least {_time(self.memory_us)}",
            ),
        ]


def _time(us: float) -> str:
    return f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} us"


def explain(op: str, *shapes: Sequence[int], dtype: str = "float32", arch: str | None = None) -> Explanation:
    """The plan for contiguous tensors, in words and as fields: kernel, tile, grid, waves, occupancy, registers, bound.

    Arguments:
        op: `'matmul'`, with the shapes of input and other; or `'linear'`, of input, weight, then bias and residual if
            there are.
        shapes: sizes.
        dtype: torch's name; `'tf32'` is float32 that may be read as tf32.
        arch: `'sm_90'`; None: the GPU's, or without one that of the emulator.

    Raises:
        ValueError: no such op, or not as many shapes as it takes.
        RuntimeError: shapes that do not fit together.
        UnsupportedError: no kernel for the dtype; an arch whose limits are not known.
    """
    if op not in _OPS:
        raise ValueError(f"explain: no op {op!r}; there are {', '.join(_OPS)}")
    least, most, names = _OPS[op]
    if not least <= len(shapes) <= most:
        raise ValueError(f"explain: {op} takes the shapes of {names}, got {len(shapes)}")
    arch = arch or arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    limits_of(arch)
    name = "float32" if dtype == "tf32" else dtype.removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(f"explain: no kernel for {name}; there is one for {', '.join(DTYPES)}")
    sizes = tuple(tuple(int(n) for n in shape) for shape in shapes)
    specs = [_contiguous(shape, name) for shape in sizes]
    turned = sizes[1] if op == "matmul" else sizes[1][::-1]
    result = result_shape(sizes[0], turned, op)
    if op == "linear" and len(sizes) > 2 and sizes[2] not in ((), (1,), result[-1:]):
        raise RuntimeError(f"explain: a bias is (out_features), here {result[-1:]}, got {sizes[2]}")
    k = sizes[0][-1]
    if 0 in result or k == 0:
        return Explanation(op, sizes, dtype, arch, result)
    if op == "linear":
        weight = specs[1]
        specs[1] = TensorSpec(weight.shape[::-1], weight.strides[::-1], weight.dtype, weight.alignment)
    product = plan_product(*specs, arch=arch, tf32=dtype == "tf32", op=op)
    operations = 2 * k * math.prod(result) * (4 if name.startswith("complex") else 1)
    return _explained(op, sizes, dtype, arch, result, product, operations)


def _contiguous(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return TensorSpec(shape, tuple(strides), dtype, 16)


def _explained(
    op: str,
    shapes: tuple[tuple[int, ...], ...],
    dtype: str,
    arch: str,
    result: tuple[int, ...],
    product: Product,
    operations: int,
) -> Explanation:
    plan = product.launches[0]
    entry = compile_kernel(plan.source, arch).entry
    resident = blocks_per_sm(plan.config, entry, arch)
    peak = _PEAKS[arch.rstrip("af")]
    defines = dict(plan.source.defines)
    moved = DTYPES["float32" if dtype == "tf32" else dtype.removeprefix("torch.")].itemsize
    moved *= sum(map(math.prod, (*shapes, result)))
    arithmetic_us = operations / _rate(defines, peak) / 1e6
    memory_us = moved / peak.memory / 1e3
    return Explanation(
        op=op,
        shapes=shapes,
        dtype=dtype,
        arch=arch,
        result=result,
        kernel=plan.source.entry,
        reason="; ".join(launch.reason for launch in product.launches),
        grid=plan.config.grid,
        block=plan.config.block,
        blocks=plan.config.blocks,
        waves=plan.config.blocks / (resident * sm_count(arch)),
        blocks_per_sm=resident,
        occupancy=resident * plan.config.threads / limits_of(arch).threads_per_sm,
        registers=entry.registers,
        spill_bytes=entry.spill_bytes,
        smem_bytes=entry.smem_bytes + plan.config.smem_bytes,
        operations=operations,
        bytes=moved,
        arithmetic_us=arithmetic_us,
        memory_us=memory_us,
        bound="arithmetic" if arithmetic_us > memory_us else "memory",
    )


def _rate(defines: dict[str, str], peak: _Peak) -> float:
    """10^12 operations a second, of the units that a kernel with these defines uses."""
    multiply = defines.get("MULTIPLY", "")
    if multiply:
        return peak.tf32 if multiply == "tf32" else peak.int8 if multiply in ("s8", "u8") else peak.half
    ctype = defines["ELEMENT"]
    if ctype.startswith("double"):
        return peak.float64
    # integers: half as many multiplications at a time, and a 64-bit one is made of three
    return peak.float32 / (6 if ctype == "long long" else 2 if re.search(r"char|short|int", ctype) else 1)
