"""The configurations of matmul_simt.cu, matmul_mma.cu and matmul_skinny.cu, and what makes one legal."""

from __future__ import annotations

from dataclasses import dataclass

from cudaops.plan import SMEM_WITHOUT_OPT_IN, limits_of

LANES = 32
PACK_BYTES = 16  # the widest load of a thread
_RUN_BYTES = 8  # columns a thread holds side by side (simt_tile.cuh)
_PAD = 4  # elements between rows of B whose stores are scattered (tile_load.cuh)
_MAX_ACCUMULATORS = {
    4: 128,
    8: 64,
    16: 64,
}  # registers a thread may spend on outputs; wide arithmetic needs more beside


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """One way to cut a product into blocks, warps and threads.

    Arguments:
        name: what `plan_matmul(config=...)` takes.
        bm, bn: the block's tile of the output.
        bk: depth of a step for 4-byte elements; see `bk_at`.
        tm, tn: outputs of a thread.
        lanes_n: lanes of a warp along n; with 32 a warp spans rows, so an element of A is one broadcast.
        blocks_per_sm: occupancy intended for 4-byte elements, a floor that the compiler holds registers to.
        speed: fraction of the fastest configuration's speed that a full GPU is expected to reach with this one.
    """

    name: str
    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    lanes_n: int
    blocks_per_sm: int
    speed: float

    @property
    def warp_m(self) -> int:
        """Rows a warp makes."""
        return LANES // self.lanes_n * self.tm

    @property
    def warp_n(self) -> int:
        """Columns a warp makes."""
        return self.lanes_n * self.tn

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return LANES * (self.bm // self.warp_m) * (self.bn // self.warp_n)

    def bk_at(self, itemsize: int) -> int:
        """Depth of a step for elements of `itemsize` bytes: the same bytes of shared memory for all."""
        return self.bk * 4 // itemsize

    def blocks_per_sm_at(self, itemsize: int) -> int:
        """Occupancy intended for elements of `itemsize` bytes: 8-byte ones take twice the registers."""
        return max(1, self.blocks_per_sm * 4 // itemsize)

    def smem_bytes(self, itemsize: int) -> int:
        """The most static shared memory any variant of it takes: two buffers, both tiles padded."""
        bk = self.bk_at(itemsize)
        a_pad = PACK_BYTES // itemsize if self.lanes_n < LANES else 0
        return 2 * itemsize * (self.bm * (bk + a_pad) + bk * (self.bn + _PAD))

    @staticmethod
    def run(itemsize: int) -> int:
        """Columns a thread holds side by side."""
        return max(1, _RUN_BYTES // itemsize)


# All span rows with a warp. Of A it then reads one address at a time, which shared memory sends to all lanes at once,
# so that "128x256" with 16x8 outputs a thread and "128x128" with 32x4 both take 12 turns of shared memory for 128
# multiply-adds: what GPUs with 128 FP32 lanes an SM need to keep them all busy. "128x128" holds two blocks an SM, for
# outputs that do not fill it otherwise; the others give up more for more blocks. A product with a short n is done
# transposed instead (SWAP).
MATMUL_CONFIGS = (
    MatmulConfig("128x256", 128, 256, 8, 16, 8, 32, 1, 1.0),
    MatmulConfig("128x128", 128, 128, 8, 32, 4, 32, 2, 0.95),
    MatmulConfig("64x128", 64, 128, 8, 16, 4, 32, 2, 0.9),
    MatmulConfig("32x128", 32, 128, 8, 8, 4, 32, 4, 0.65),
    MatmulConfig("16x128", 16, 128, 8, 4, 4, 32, 4, 0.4),
)


def is_legal(config: MatmulConfig, itemsize: int) -> bool:
    """Whether the kernel compiles with `config` for `itemsize`-byte elements, within registers and shared memory."""
    pack = PACK_BYTES // itemsize
    if config.lanes_n not in (8, 16, 32) or config.bm % config.warp_m or config.bn % config.warp_n:
        return False
    if config.tn % config.run(itemsize) or config.bk_at(itemsize) % pack or config.tm % pack:
        return False
    if (
        config.tm * config.tn * itemsize // 4 > _MAX_ACCUMULATORS[itemsize]
        or config.smem_bytes(itemsize) > SMEM_WITHOUT_OPT_IN
    ):
        return False
    if config.threads > 1024:
        return False
    return all(
        _shares(outer, config.bk_at(itemsize), width, config.threads)
        for outer in (config.bm, config.bn)
        for width in (1, pack)
    )


def _shares(outer: int, bk: int, width: int, threads: int) -> bool:
    """Whether `threads` share an outer x bk tile equally, however it is loaded by `width` (tile_load.cuh)."""
    loads = outer * bk // width
    lines = (bk // width, outer // width, outer)
    return all(line % threads == 0 or threads % line == 0 for line in lines) and (
        loads % threads == 0 or loads < threads
    )


# ---- tensor cores ----

_WARP_TILE = 64  # rows and columns of a warp (mma_tile.cuh)
_ROW_BYTES = 64  # of a tile along k


@dataclass(frozen=True, slots=True)
class MmaConfig:
    """One way to run matmul_mma.

    Arguments:
        name: what `plan_matmul(config=...)` takes.
        bm, bn: the block's tile of the output, 64 x 64 a warp: 32 instructions for 8 loads of matrices.
        stages: tiles in shared memory at once.
        blocks_per_sm: occupancy intended, a floor that the compiler holds registers to.
        speed: fraction of the fastest configuration's speed that a full GPU is expected to reach with this one.
    """

    name: str
    bm: int
    bn: int
    stages: int
    blocks_per_sm: int
    speed: float

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return LANES * (self.bm // _WARP_TILE) * (self.bn // _WARP_TILE)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.stages * (self.bm + self.bn) * _ROW_BYTES

    def blocks_per_sm_on(self, arch: str) -> int:
        """Occupancy intended on `arch`, whose shared memory may hold fewer blocks."""
        limits = limits_of(arch)
        return min(self.blocks_per_sm, limits.smem_per_sm // (self.smem_bytes + limits.smem_reserved))


# All keep to 48 KB a block but the largest two, so that GPUs with 100 KB an SM hold two of them. A block of one warp
# keeps one of an SM's four tensor cores busy, so four of those should fit.
MMA_CONFIGS = (
    MmaConfig("mma 256x128", 256, 128, 3, 1, 1.0),
    MmaConfig("mma 128x256", 128, 256, 3, 1, 1.0),
    MmaConfig("mma 128x128", 128, 128, 3, 2, 0.95),
    MmaConfig("mma 128x64", 128, 64, 4, 3, 0.75),
    MmaConfig("mma 64x128", 64, 128, 4, 3, 0.75),
    MmaConfig("mma 64x64", 64, 64, 4, 4, 0.5),
)
# dtype -> the instruction it is multiplied by
MMA_MULTIPLY = {"float16": "f16", "bfloat16": "bf16", "int8": "s8", "uint8": "u8", "float32": "tf32"}


# ---- many small matrices ----

BATCHED = "batched"
_SMALL = 64  # rows and columns of a matrix that one block makes, with others
_BATCHED_TILE = {4: 4, 8: 2, 16: 1}  # by bytes computed in: outputs of a thread each way, and elements of k at once
_BATCHED_THREADS = 256


@dataclass(frozen=True, slots=True)
class BatchedConfig:
    """One way to run matmul_batched: `threads_m` x `threads_n` threads a matrix, `matrices` a block."""

    tile: int
    threads_m: int
    threads_n: int
    matrices: int

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.matrices * self.threads_m * self.threads_n


def batched_config(rows: int, columns: int, computed: int) -> BatchedConfig | None:
    """The configuration for matrices of `rows` x `columns` outputs; None: a tile does better."""
    tile = _BATCHED_TILE[computed]
    threads_m, threads_n = (1 << (-(-n // tile) - 1).bit_length() for n in (rows, columns))
    if max(rows, columns) > _SMALL or threads_m * threads_n > _BATCHED_THREADS:
        return None
    return BatchedConfig(tile, threads_m, threads_n, _BATCHED_THREADS // (threads_m * threads_n))


# ---- few rows ----

SKINNY = "skinny"
_SKINNY_ROWS = {4: (1, 4, 8), 8: (1, 4), 16: (1,)}  # by bytes computed in: rows a block computes, that registers hold
_SKINNY_OUTPUTS = {4: 16, 8: 8, 16: 4}  # of a warp whose lanes share k, likewise
_BUSY_WARPS = 8  # on an SM, enough to keep its memory requests coming


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """One way to run matmul_skinny.

    Arguments:
        rows: of the short side, computed at once.
        warps: of a block; `k_warps` of them share k.
        k_lanes: lanes run along k; else along n.
        columns: outputs of each row that a warp (k_lanes) or a lane makes.
        width: elements a load moves along the lanes.
    """

    rows: int
    warps: int
    k_warps: int
    k_lanes: bool
    columns: int
    width: int

    @property
    def block_columns(self) -> int:
        """Columns a block makes."""
        return self.warps // self.k_warps * self.columns * (1 if self.k_lanes else LANES)

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return LANES * self.warps


def skinny_config(
    rows: int, columns: int, k: int, k_lanes: bool, width: int, itemsize: int, sms: int
) -> SkinnyConfig | None:
    """The configuration for `rows` x `columns` outputs (of all batches) of `k` products; None: a tile does better."""
    fitting = [each for each in _SKINNY_ROWS[itemsize] if each >= rows]
    if not fitting:
        return None
    if not k_lanes:
        return SkinnyConfig(fitting[0], 8, 8, False, width, width) if k >= 8 else None
    if k < LANES:
        return None  # lanes without an element
    at_once = min(4, _SKINNY_OUTPUTS[itemsize] // fitting[0])
    warps = -(-columns // at_once)
    if warps < _BUSY_WARPS * sms and k >= 8 * LANES * width:  # too few to be busy, and a step for each of 8
        return SkinnyConfig(fitting[0], 8, 8, True, at_once, width)
    return SkinnyConfig(fitting[0], 4, 1, True, at_once, width)
