"""What the compiler made of every shipped configuration, read from its machine code and held to what is intended."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nvidia
import pytest
from rich.console import Console
from rich.table import Table

from cudaops.compile import compile_kernel
from cudaops.ops.linear import plan_linear
from cudaops.ops.matmul import plan_matmul
from cudaops.ops.matmul_configs import MATMUL_CONFIGS, MMA_CONFIGS, is_legal
from cudaops.plan import DTYPES, Plan, TensorSpec, blocks_per_sm, check_limits

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
LAYOUTS = ("rr", "cc", "rc", "cr")  # of a, of b: rows or columns contiguous; the first two have all paths


@dataclass(frozen=True)
class Variant:
    """A plan, the blocks of it an SM should hold, and what its main loop should be."""

    config: str
    dtype: str
    layout: str
    plan: Plan
    blocks: int = 1
    fma_per_load: float = 0  # FFMA : LDS.128
    mma_per_load: float = 0  # HMMA : LDSM
    wide: bool = False  # every load of a and b moves 16 bytes


def spec(rows: int, columns: int, layout: str, dtype: str, alignment: int = 16) -> TensorSpec:
    return TensorSpec((rows, columns), (columns, 1) if layout == "r" else (1, rows), dtype, alignment)


def variants(arch: str) -> Iterator[Variant]:
    yield from simt_variants(arch)
    yield from skinny_variants(arch)
    if arch != "sm_75":
        yield from mma_variants(arch)


def simt_variants(arch: str) -> Iterator[Variant]:
    for config, dtype in itertools.product(MATMUL_CONFIGS, ("float32", "float64", "int64", "complex64", "float16")):
        size = DTYPES[dtype].computed
        if is_legal(config, size):
            for layout in LAYOUTS if dtype == "float32" and arch == "sm_80" else LAYOUTS[:2]:
                plan = plan_matmul(
                    spec(512, 512, layout[0], dtype),
                    spec(512, 512, layout[1], dtype),
                    arch=arch,
                    config=config.name,
                )
                single = dtype == "float32"
                yield Variant(
                    config.name,
                    dtype,
                    layout,
                    plan,
                    config.blocks_per_sm_at(size),
                    fma_per_load=16 if single else 0,
                    wide=single,
                )
    largest = max(MATMUL_CONFIGS, key=lambda config: config.bm * config.bn)
    finished = [spec(512, 511, "r", "float32", 4), spec(511, 509, "r", "float32", 4)]
    added = [TensorSpec((509,), (1,), "float32", 4), TensorSpec((512, 509), (509, 1), "float32", 4)]
    plan = plan_matmul(*finished, *added, arch=arch, config=largest.name, activation="gelu", alpha=2.0)
    yield Variant(largest.name, "float32", "rr, odd, finished", plan)


def mma_variants(arch: str) -> Iterator[Variant]:
    cases = [("bfloat16", layout) for layout in (LAYOUTS if arch == "sm_80" else LAYOUTS[:2])]
    cases += [("float16", "rc"), ("float32", "rc"), ("float32", "cr"), ("int8", "rc"), ("int8", "rr")]
    for config in MMA_CONFIGS:
        for dtype, layout in cases:
            plan = plan_matmul(
                spec(512, 512, layout[0], dtype),
                spec(512, 512, layout[1], dtype),
                arch=arch,
                tf32=True,
                config=config.name,
            )
            wide = layout == "rc" or dtype == "bfloat16"
            yield Variant(config.name, dtype, layout, plan, config.blocks_per_sm_on(arch), mma_per_load=4, wide=wide)
        finished = [spec(512, 511, "r", "float16", 2), spec(509, 511, "c", "float16", 2)]
        added = [TensorSpec((509,), (1,), "float16", 2), TensorSpec((512, 509), (509, 1), "float16", 2)]
        plan = plan_linear(*finished, *added, arch=arch, config=config.name, activation="gelu")
        yield Variant(config.name, "float16", "odd, finished", plan, config.blocks_per_sm_on(arch), mma_per_load=4)


def skinny_variants(arch: str) -> Iterator[Variant]:
    dtypes = {"float32": (1, 4, 8), "float64": (1, 4), "bfloat16": (1, 8), "int8": (8,), "complex128": (1,)}
    for dtype in dtypes:
        for rows, right, (k, n) in itertools.product(dtypes[dtype], "rc", ((4096, 64), (128, 20_000))):
            plan = plan_matmul(spec(rows, k, "r", dtype), spec(k, n, right, dtype), arch=arch, config="skinny")
            assert plan.source.entry == "matmul_skinny"
            yield Variant(f"skinny {rows}x{n}x{k}", dtype, f"r{right}", plan, blocks=2)


# ---- machine code ----


def disassembler() -> Path:
    """nvdisasm of the test extra, which is a package of NVIDIA's."""
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/nvdisasm")]
    assert found, "no nvdisasm: pip install nvidia-cuda-nvdisasm, as the test extra does"
    return found[0]


def instructions(cubin: bytes, folder: Path, name: str) -> Counter[str]:
    """How often each opcode is in the code, with its modifiers."""
    file = folder / f"{name}.cubin"
    file.write_bytes(cubin)
    done = subprocess.run([disassembler(), "-c", file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)", done.stdout)
    assert found, "no instruction could be read"
    return Counter(found)


def count(code: Counter[str], *opcodes: str, part: str = "") -> int:
    return sum(n for opcode, n in code.items() if opcode.split(".")[0] in opcodes and part in opcode)


def faults(variant: Variant, arch: str, folder: Path, number: int) -> tuple[list[str], list[str]]:
    """(a row of the table, what is not as it should be)."""
    compiled = compile_kernel(variant.plan.source, arch)
    entry, code = compiled.entry, instructions(compiled.cubin, folder, str(number))
    check_limits(variant.plan.config, entry, arch)
    blocks = blocks_per_sm(variant.plan.config, entry, arch)
    wrong = []
    if entry.spill_bytes or entry.stack_bytes or count(code, "LDL", "STL"):
        wrong.append(
            f"spills {entry.spill_bytes} bytes, stack {entry.stack_bytes}, {count(code, 'LDL', 'STL')} LDL, STL"
        )
    if blocks < variant.blocks:
        wrong.append(f"{blocks} blocks an SM, {variant.blocks} intended")
    loads = count(code, "LDS", part=".128")
    if variant.fma_per_load and count(code, "FFMA") < variant.fma_per_load * loads:
        wrong.append(f"{count(code, 'FFMA')} FFMA for {loads} LDS.128")
    matrices = count(code, "LDSM")
    multiplies = count(code, "HMMA", "IMMA")
    if variant.mma_per_load and not multiplies >= variant.mma_per_load * matrices > 0:
        wrong.append(f"{multiplies} HMMA for {matrices} LDSM")
    reads = {opcode: n for opcode, n in code.items() if opcode.split(".")[0] in ("LDG", "LDGSTS")}
    if variant.wide and not (reads and all(".128" in opcode for opcode in reads)):
        wrong.append(f"narrow loads: {', '.join(reads)}")
    widths = Counter[str]()
    for opcode, n in reads.items():
        width = next((part for part in opcode.split(".") if part in ("64", "128", "U8", "S8", "U16", "S16")), "32")
        widths[f"{'async' if opcode.startswith('LDGSTS') else 'global'} {width}"] += n
    smem = entry.smem_bytes + variant.plan.config.smem_bytes
    ratio = f"{count(code, 'FFMA') / loads:.0f}" if variant.fma_per_load else "-"
    mma = f"{multiplies / matrices:.1f}" if matrices else "-"
    row = [variant.plan.source.entry, variant.config, variant.dtype, variant.layout, entry.registers, entry.spill_bytes]
    row += [smem, f"{blocks} ({variant.blocks})", ratio, mma, ", ".join(f"{n} x {w}" for w, n in widths.items())]
    return [str(cell) for cell in row], wrong


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*ARCHS, "sm_75"])
def test_gates(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No spill and no stack; the occupancy stated; arithmetic for what is loaded; wide copies. All configurations."""
    table = Table(title=arch, header_style="bold")
    for heading in ("kernel", "configuration", "dtype", "layout", "registers", "spill", "shared", "blocks (intended)"):
        table.add_column(heading, justify="right" if heading in ("registers", "spill", "shared") else "left")
    for heading in ("FFMA : LDS.128", "HMMA : LDSM", "loads"):
        table.add_column(heading)
    found = []
    with ThreadPoolExecutor() as pool:
        every = list(variants(arch))
        rows = pool.map(faults, every, itertools.repeat(arch), itertools.repeat(tmp_path), itertools.count())
        for variant, (row, wrong) in zip(every, rows, strict=True):
            table.add_row(*row, style="red" if wrong else "")
            found += [f"{variant.config} {variant.dtype} {variant.layout}: {each}" for each in wrong]
    with capsys.disabled():
        Console(file=sys.stdout, width=200).print(table)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("config", "dtype"), [("128x128", "float32"), ("mma 128x128", "bfloat16")])
def test_gates_of_two_blocks_an_sm(config: str, dtype: str, tmp_path: Path) -> None:
    """The tiles that are to share an SM of sm_80 with another do."""
    plan = plan_matmul(spec(512, 512, "r", dtype), spec(512, 512, "r", dtype), arch="sm_80", config=config)
    variant = Variant(config, dtype, "rr", plan, 2, 16 * (dtype == "float32"), 4 * (dtype == "bfloat16"), True)
    row, wrong = faults(variant, "sm_80", tmp_path, 0)
    assert not wrong
    assert row[7] == "2 (2)"


def test_gates_can_fail(tmp_path: Path) -> None:
    plan = plan_matmul(
        spec(512, 511, "r", "float32", 4), spec(511, 509, "r", "float32", 4), arch="sm_80", config="64x128"
    )
    _, wrong = faults(Variant("", "", "", plan, 9, 99, 4, True), "sm_80", tmp_path, 0)
    assert [each.split(":")[0].split()[1] for each in wrong] == ["blocks", "FFMA", "HMMA", "loads"]
