"""Several random programs (c_programs.py) in one kernel, run by the emulator and by the host compiler's code."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.emulator import harness
from tests.emulator.c_programs import Program
from tests.emulator.integer_steps import CONSTANTS

HEADER = Path(__file__).with_name("c_programs.h").read_text()
OPTIONS = ("-fmad=false",)
HOST_OPTIONS = ("-shared", "-fPIC", "-O0", "-ffp-contract=off", "-frounding-math", "-lm")
WORDS, NUMBERS = 64, 32  # of the tables
Grid, Block = tuple[int, int], tuple[int, int, int]


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, floats and doubles, many of them corners."""
    source = np.random.default_rng(1)
    words = source.integers(0, 1 << 32, WORDS).astype(np.uint32)
    words[::2] = [CONSTANTS[n % len(CONSTANTS)] for n in range(WORDS // 2)]
    corners = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2.5,
        np.inf,
        -np.inf,
        np.nan,
        2.0**31,
        -(2.0**31),
        2.0**63,
        4294967295.0,
        0.5,
        -0.5,
    ]
    tables = [words]
    for dtype in (np.float32, np.float64):
        info = np.finfo(dtype)
        found = [*corners, info.max, -info.tiny, info.smallest_subnormal, info.eps]
        rest = NUMBERS - len(found)
        several = source.standard_normal(rest) * 10.0 ** source.integers(-6, 12, rest)
        tables.append(source.permutation(np.array([*found, *several], dtype)))
    return tables[0], tables[1], tables[2]


TABLES = _tables()
# The numbers of a thread: from its place in its block, or, where each is a block of its own, from that block's number.
IN_ITS_BLOCK = """u32 tx = threadIdx.x, ty = threadIdx.y, bid = blockIdx.y * gridDim.x + blockIdx.x;
u32 tid = (threadIdx.z * blockDim.y + ty) * blockDim.x + tx, threads = blockDim.x * blockDim.y * blockDim.z;"""
ALONE = """u32 threads = {x} * {y} * {z}, tid = blockIdx.x % threads, bid = blockIdx.x / threads;
u32 tx = tid % {x}, ty = tid / {x} % {y};"""


@dataclass(frozen=True)
class Batch:
    """Each thread stores what each of the programs returns."""

    programs: tuple[Program, ...]

    @property
    def functions(self) -> str:
        return "\n".join(p.text(f"f{n}") for n, p in enumerate(self.programs))

    @property
    def calls(self) -> str:
        given = "a, b, c, floats[(tid + bid) & 31], doubles[(tid + b) & 31]"
        return "\n".join(f"out[{n}] = f{n}(SAME, {given});" for n in range(len(self.programs)))

    def kernel(self, thread: str = IN_ITS_BLOCK) -> str:
        return f"""{HEADER}
{self.functions}
__global__ void k(u64* out, const u32* table, const float* floats, const double* doubles, u32 a, u32 b, u64 c) {{
{thread}
out += (bid * threads + tid) * {len(self.programs)};
{self.calls}
}}"""

    @property
    def host(self) -> str:
        return f"""{harness.TYPES}{HEADER}
{self.functions}
void k(u64* out, const u32* table, const float* floats, const double* doubles, u32 a, u32 b, u64 c, const u32* grid,
       const u32* block) {{
for (u32 bid = 0; bid < grid[0] * grid[1]; bid++)
for (u32 tid = 0; tid < block[0] * block[1] * block[2]; tid++, out += {len(self.programs)}) {{
u32 tx = tid % block[0], ty = tid / block[0] % block[1];
{self.calls}
}} }}"""

    def run(self, grid: Grid, block: Block, *numbers: int) -> np.ndarray:
        """What each thread of the emulated kernel stores."""
        out = self._out(grid, block)
        harness.run(harness.cuda(self.kernel(), options=OPTIONS), grid, block, out, *TABLES, *numbers)
        return out

    def run_on_the_host(self, folder: Path, grid: Grid, block: Block, *numbers: int) -> np.ndarray:
        """The same by the host compiler, a library in `folder`.

        Without one, by threads that are each alone in a block of the emulator: that tells what goes wrong when lanes
        part, though not what an instruction does.
        """
        out = self._out(grid, block)
        compiler = shutil.which("gcc")
        if compiler is None:
            x, y, z = block
            kernel = harness.cuda(self.kernel(ALONE.format(x=x, y=y, z=z)), options=OPTIONS)
            harness.run(kernel, out.shape[0] * out.shape[1], 1, out, *TABLES, *numbers)
            return out
        name = folder / hashlib.sha256(self.host.encode()).hexdigest()[:16]
        if not name.with_suffix(".so").exists():
            name.with_suffix(".c").write_text(self.host)
            command = [compiler, "-w", "-o", f"{name}.so", f"{name}.c", *HOST_OPTIONS]
            subprocess.run(command, check=True, capture_output=True, timeout=100)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (out, *TABLES)]
        a, b, c = numbers
        sizes = [(ctypes.c_uint32 * len(size))(*size) for size in (grid, block)]
        ctypes.CDLL(f"{name}.so").k(*pointers, ctypes.c_uint32(a), ctypes.c_uint32(b), ctypes.c_uint64(c), *sizes)
        return out

    def _out(self, grid: Grid, block: Block) -> np.ndarray:
        return np.zeros((grid[0] * grid[1], block[0] * block[1] * block[2], len(self.programs)), np.uint64)

    def __repr__(self) -> str:
        """CUDA C, as a failing test shows it."""
        return f"{self.functions}\n{self.calls}"
