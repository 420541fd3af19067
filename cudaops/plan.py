"""What is launched, as plain values: no torch, no CuPy, no device.

A plan says which kernel runs, with which geometry and scalars. It is made from `TensorSpec`s and an arch alone, so that
planning is tested everywhere, and it is hashable, so that what was prepared for it can be found again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cudaops.errors import LaunchError, UnsupportedError

Dim3 = tuple[int, int, int]

MAX_GRID: Dim3 = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK: Dim3 = (1024, 1024, 64)
MAX_THREADS = 1024
REGISTERS_PER_SM = 65_536
REGISTER_UNIT = 256  # registers are handed out to a warp in this unit
_SMEM_UNIT = 128  # bytes of shared memory, to a block
SMEM_WITHOUT_OPT_IN = 48 * 1024


class DType(NamedTuple):
    """One element type: its size in bytes, its name in CUDA C, the size of what a kernel computes in, and the type in
    which it takes a factor."""

    itemsize: int
    ctype: str
    computed: int
    scalar: str


DTYPES: dict[str, DType] = {
    "float32": DType(4, "float", 4, "float"),
    "float64": DType(8, "double", 8, "double"),
    "float16": DType(2, "__half", 4, "float"),
    "bfloat16": DType(2, "__nv_bfloat16", 4, "float"),
    "int32": DType(4, "int", 4, "long long"),
    "int64": DType(8, "long long", 8, "long long"),
    "int16": DType(2, "short", 4, "long long"),
    "int8": DType(1, "signed char", 4, "long long"),
    "uint8": DType(1, "unsigned char", 4, "long long"),
    "complex64": DType(8, "float2", 8, "float"),
    "complex128": DType(16, "double2", 16, "double"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a plan may know of a tensor.

    Arguments:
        shape: sizes.
        strides: in elements, as torch counts them.
        dtype: torch's name without the prefix, `'float32'`.
        alignment: of the first element, in bytes: a power of two, capped at 16.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int


def dim3(value: int | Sequence[int], what: str) -> Dim3:
    """Read one to three whole numbers as CUDA's dim3; missing ones are 1.

    Raises:
        LaunchError: not one to three whole numbers.
    """
    if type(value) is int:
        return value, 1, 1
    if type(value) is tuple and len(value) <= 3 and {*map(type, value)} == {int}:  # what nearly every launch gives
        x, y, z = value + (1,) * (3 - len(value))
        return x, y, z
    try:
        given = tuple(operator.index(n) for n in value) if isinstance(value, Sequence) else (operator.index(value),)
    except TypeError:
        given = ()
    if not 1 <= len(given) <= 3 or isinstance(value, str | bytes):
        raise LaunchError(
            f"{what} must be one to three whole numbers, got {value!r}; pass ({what}_x, {what}_y, {what}_z)"
        )
    x, y, z = given + (1,) * (3 - len(given))
    return x, y, z


def _within(sizes: object, limits: Dim3) -> bool:
    if type(sizes) is not tuple or len(sizes) != 3:
        return False
    (x, y, z), (most_x, most_y, most_z) = sizes, limits
    plain = type(x) is type(y) is type(z) is int
    return plain and 1 <= x <= most_x and 1 <= y <= most_y and 1 <= z <= most_z


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Grid and block in (x, y, z), and dynamic shared memory in bytes.

    Raises:
        LaunchError: a size is below 1 or beyond what every CUDA device allows.
    """

    grid: Dim3
    block: Dim3
    smem_bytes: int = 0

    def __post_init__(self) -> None:
        if (
            _within(self.grid, MAX_GRID)
            and _within(self.block, MAX_BLOCK)
            and self.block[0] * self.block[1] * self.block[2] <= MAX_THREADS
            and type(self.smem_bytes) is int
            and self.smem_bytes >= 0
        ):
            return  # the rest finds the words for what is wrong
        for what, limits, why in (
            ("grid", MAX_GRID, "return early where there is nothing to compute; put the long axis on x"),
            ("block", MAX_BLOCK, "use a smaller block and a larger grid"),
        ):
            sizes = dim3(getattr(self, what), what)
            object.__setattr__(self, what, sizes)
            for axis, size, limit in zip("xyz", sizes, limits, strict=True):
                if not 1 <= size <= limit:
                    raise LaunchError(f"{what}.{axis} is {size} in {what}={sizes}; it must be 1 to {limit}: {why}")
        if self.threads > MAX_THREADS:
            raise LaunchError(
                f"block={self.block} has {self.threads} threads; a block has at most {MAX_THREADS}: "
                "use a smaller block and a larger grid"
            )
        try:
            smem_bytes = operator.index(self.smem_bytes)
        except TypeError:
            smem_bytes = -1
        if smem_bytes < 0:
            raise LaunchError(f"shared memory must be a whole number of bytes from 0, got {self.smem_bytes!r}")
        object.__setattr__(self, "smem_bytes", smem_bytes)

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def __str__(self) -> str:
        smem = f", {self.smem_bytes} B dynamic shared" if self.smem_bytes else ""
        return f"grid {self.grid} x block {self.block}{smem}"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Where a kernel comes from.

    Arguments:
        file: a name in `kernels/`, or an absolute path; or None, then `text` is the source.
        entry: the kernel's name: as declared, a C++ name expression (`'scale<float>'`), or the mangled name.
        defines: (name, value) pairs, given to the compiler as -D.
        text: CUDA C source, for kernels that are not files of ours.
        options: further NVRTC options, as the user wrote them.
    """

    file: str | None
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    options: tuple[str, ...] = ()


Scalar = int | float | bytes


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One launch of one kernel, complete but for the tensors' addresses.

    The kernel's arguments are one pointer per tensor, in order, output first; then `scalars`, in order
    (`bytes` is a struct by value, already packed). Plans are equal when they would launch the same thing bit by bit:
    a scalar 0.0 is not -0.0, and 1 is not 1.0.

    Arguments:
        op: the operation's name, for people.
        source: the kernel.
        config: the geometry.
        scalars: what follows the pointers.
        reason: why this kernel and configuration, in words.
    """

    op: str
    source: KernelSource
    config: LaunchConfig
    scalars: tuple[Scalar, ...] = ()
    reason: str = ""
    _key: tuple[object, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        exact = tuple(s.hex() if isinstance(s, float) else (type(s), s) for s in self.scalars)
        key = (self.op, self.source, self.config, exact, self.reason)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self is other or self._key == other._key


@dataclass(frozen=True, slots=True)
class ArchLimits:
    """What one SM of an arch holds; shared memory in bytes."""

    threads_per_sm: int
    blocks_per_sm: int
    smem_per_sm: int
    smem_per_block: int  # with the opt-in attribute; static and dynamic together
    smem_reserved: int  # taken by the system from every block


def _limits(threads: int, blocks: int, smem_sm_kb: int, smem_block_kb: int, reserved: int = 1024) -> ArchLimits:
    return ArchLimits(threads, blocks, smem_sm_kb * 1024, smem_block_kb * 1024, reserved)


# CUDA C++ Programming Guide, "Compute Capabilities": the archs of x86-64 GPUs.
ARCH_LIMITS: dict[str, ArchLimits] = {
    "sm_75": _limits(1024, 16, 64, 64, 0),
    "sm_80": _limits(2048, 32, 164, 163),
    "sm_86": _limits(1536, 16, 100, 99),
    "sm_89": _limits(1536, 24, 100, 99),
    "sm_90": _limits(2048, 32, 228, 227),
    "sm_100": _limits(2048, 32, 228, 227),
    "sm_103": _limits(2048, 32, 228, 227),
    "sm_120": _limits(1536, 24, 100, 99),
}


# Streaming multiprocessors of the arch's usual part (T4, A100, RTX 3090, RTX 4090, H100, B200, B300, RTX 5090).
_SM_COUNTS = {
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 82,
    "sm_89": 128,
    "sm_90": 132,
    "sm_100": 148,
    "sm_103": 148,
    "sm_120": 170,
}


def sm_count(arch: str) -> int:
    """How many SMs a GPU of `arch` usually has, for choosing a configuration; those of an A100 where it is unknown."""
    return _SM_COUNTS.get(arch.rstrip("af"), _SM_COUNTS["sm_80"])


def limits_of(arch: str) -> ArchLimits:
    """The limits of `arch`; the family suffix (`sm_90a`) does not matter.

    Raises:
        UnsupportedError: an arch that is not in the table.
    """
    limits = ARCH_LIMITS.get(arch.rstrip("af"))
    if limits is None:
        raise UnsupportedError(f"the limits of arch {arch!r} are not known; known: {', '.join(ARCH_LIMITS)}")
    return limits


class Resources(Protocol):
    """What a compiled entry uses (`compile.Entry` is one)."""

    @property
    def name(self) -> str: ...
    @property
    def max_threads(self) -> int: ...
    @property
    def required_block(self) -> Dim3 | None: ...
    @property
    def registers(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...


def threads_by_registers(registers: int) -> int:
    """The largest block that `registers` a thread allow: whole warps, each given registers in units of 256."""
    return min(MAX_THREADS, _warps_by_registers(registers) * 32)


def _warps_by_registers(registers: int) -> int:
    """Warps of an SM."""
    per_warp = -(-max(registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return REGISTERS_PER_SM // per_warp


def blocks_per_sm(config: LaunchConfig, entry: Resources, arch: str) -> int:
    """How many blocks an SM of `arch` holds at once; 0: it cannot be launched."""
    limits = limits_of(arch)
    warps = -(-config.threads // 32)
    smem = -(-(entry.smem_bytes + config.smem_bytes) // _SMEM_UNIT) * _SMEM_UNIT + limits.smem_reserved
    return min(
        limits.blocks_per_sm,
        limits.threads_per_sm // 32 // warps,
        _warps_by_registers(entry.registers) // warps,
        limits.smem_per_sm // max(smem, 1),
    )


def check_limits(config: LaunchConfig, entry: Resources, arch: str) -> None:
    """Refuse what a device of `arch` could not launch.

    Raises:
        LaunchError: block beyond the entry's own bound or its registers, or too much shared memory.
    """
    if entry.required_block is not None and entry.required_block != config.block:
        raise LaunchError(
            f"kernel {entry.name}: block={config.block}, but the kernel is compiled for exactly "
            f"{entry.required_block} (__block_size__ / .reqntid); launch that block"
        )
    if config.threads > entry.max_threads:
        raise LaunchError(
            f"kernel {entry.name}: block={config.block} has {config.threads} threads, the kernel allows "
            f"{entry.max_threads} (__launch_bounds__); use a smaller block or raise the bound"
        )
    by_registers = threads_by_registers(entry.registers)
    if config.threads > by_registers:
        raise LaunchError(
            f"kernel {entry.name}: block={config.block} has {config.threads} threads, but at {entry.registers} "
            f"registers a thread {arch} holds {by_registers}; use a smaller block, or "
            f"__launch_bounds__({config.threads})"
        )
    limit = limits_of(arch).smem_per_block
    total = entry.smem_bytes + config.smem_bytes
    if total > limit:
        raise LaunchError(
            f"kernel {entry.name}: {total} bytes of shared memory a block ({entry.smem_bytes} static + "
            f"{config.smem_bytes} dynamic); {arch} allows {limit}: use a smaller tile or fewer stages"
        )
