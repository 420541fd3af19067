"""mma.sync and what moves its operands, against NumPy, CuTe's layouts and the ISA's tables; votes and the like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudaops.emulator import sanitize
from cudaops.emulator.isa.mma import SHAPES, fragment_layouts
from cudaops.errors import EmulatorError, SanitizerError
from tests.emulator import harness

U16, U32, F32 = np.uint16, np.uint32, np.float32
LAYOUTS: dict[str, dict[str, list[Any]]] = json.loads(
    (Path(__file__).parent.parent / "data" / "mma_layouts.json").read_text()
)["layouts"]
PROBLEMS = 3  # warps of a launch, each with a product of its own

Layout = list[list[tuple[int, int]]]  # lane -> element -> coordinate


def sizes(shape: str) -> tuple[int, int, int]:
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def opcode(shape: str, a: str, b: str = "", out: str = "", into: str = "") -> str:
    total = {"f64": "f64", "s8": "s32", "u8": "s32"}.get(a, "f32")
    out = out or total
    return f"mma.sync.aligned.{shape}.row.col.{out}.{a}.{b or a}.{into or out}"


def isa_layouts(shape: str, kind: str) -> dict[str, Layout]:
    """Of what CuTe's file has not: A (m, k), B (n, k), C (m, n), from the tables of the PTX ISA."""
    m, n, k = sizes(shape)
    assert n == 8
    lanes = [divmod(lane, 4) for lane in range(32)]  # groupID, threadID_in_group
    if kind == "f64":
        a = [[(g + 8 * (i % 2) if m == 16 else g, t + 4 * (i // 2 if m == 16 else i)) for i in range(m * k // 32)]
             for g, t in lanes]  # fmt: skip
        b = [[(g, t + 4 * i) for i in range(k // 4)] for g, t in lanes]
    else:
        assert (m, k, kind[1:]) == (8, 16, "8")
        a = [[(g, 4 * t + i) for i in range(4)] for g, t in lanes]
        b = [[(g, 4 * t + i) for i in range(4)] for g, t in lanes]
    c = [[(g + 8 * (i // 2), 2 * t + i % 2) for i in range(m * n // 32)] for g, t in lanes]
    return {"A": a, "B": b, "C": c}


def layouts(shape: str, kind: str) -> dict[str, Layout]:
    like = {"u8": "s8"}.get(kind, kind)
    found = LAYOUTS.get(opcode(shape, like)) or LAYOUTS.get(opcode(shape, "f16" if kind == "bf16" else like))
    if found is None:
        return isa_layouts(shape, kind)
    return {o: [[(r, c) for r, c in lane] for lane in found[o]] for o in "ABC"}


EVERY = [(shape, kind) for kind, shapes in SHAPES.items() for shape in shapes]


@pytest.mark.parametrize(("shape", "kind"), EVERY)
def test_layouts_are_those_of_cute_and_the_isa(shape: str, kind: str) -> None:
    for ours, theirs in zip(fragment_layouts(shape, kind), layouts(shape, kind).values(), strict=True):
        assert [[ours.place(lane, e) for e in range(ours.elements)] for lane in range(32)] == theirs


def test_every_layout_of_the_file_is_one_of_ours() -> None:
    known = {opcode(shape, kind) for shape, kind in EVERY}
    assert set(LAYOUTS) <= known


def fragments(matrices: np.ndarray, layout: Layout) -> np.ndarray:
    """[problem, lane, element] of [problem, row, column]."""
    rows, columns = np.moveaxis(np.array(layout), -1, 0)
    return np.ascontiguousarray(matrices[:, rows, columns])


def whole(parts: np.ndarray, layout: Layout, shape: tuple[int, int]) -> np.ndarray:
    rows, columns = np.moveaxis(np.array(layout), -1, 0)
    found = np.empty((len(parts), *shape), parts.dtype)
    found[:, rows, columns] = parts
    return found


def multiply(instruction: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, layout: dict[str, Layout]) -> np.ndarray:
    """The instruction on [problem, m, k], [problem, n, k] and [problem, m, n], whose items have the operands' bits."""
    given = [fragments(x, layout[o]) for x, o in zip((a, b, c), "ABC", strict=True)]
    wide = a.itemsize == 8
    size = 8 if wide else 4
    counts = [f.shape[2] * f.itemsize // size for f in given]
    floating = c.dtype == F32
    register = "f64" if wide else "b32"
    total = "f64" if wide else "f32" if floating else "b32"
    names = [[f"%{o}{n}" for n in range(count)] for o, count in zip("abc", counts, strict=True)]
    results = [f"%d{n}" for n in range(counts[2])]
    text = []
    for o, items in zip("abc", names, strict=True):
        text.append(f"ld.param.u64 %p, [{o}]; mul.lo.u32 %u, %t, {size * len(items)}; cvt.u64.u32 %o, %u;")
        text.append("add.u64 %p, %p, %o;")
        held = total if o == "c" else register
        text += [f"ld.global.{held} {name}, [%p+{size * n}];" for n, name in enumerate(items)]
    lists = [f"{{{', '.join(items)}}}" for items in (results, *names)]
    text.append(f"{instruction} {', '.join(lists)};")
    text.append(f"ld.param.u64 %p, [out]; mul.lo.u32 %u, %t, {size * counts[2]}; cvt.u64.u32 %o, %u;")
    text.append("add.u64 %p, %p, %o;")
    text += [f"st.global.{total} [%p+{size * n}], {name};" for n, name in enumerate(results)]
    kernel = harness.ptx(
        f"""
        .reg .{register} {", ".join(names[0] + names[1])};
        .reg .{total} {", ".join(names[2] + results)};
        .reg .b32 %t, %u;
        .reg .b64 %p, %o;
        mov.u32 %t, %ctaid.x;
        shl.b32 %t, %t, 5;
        mov.u32 %u, %tid.x;
        add.u32 %t, %t, %u;
        {chr(10).join(text)}
        ret;""",
        params=".param .u64 out, .param .u64 a, .param .u64 b, .param .u64 c",
    )
    out = harness.poisoned(given[2].shape, c.dtype)
    harness.run(kernel, PROBLEMS, 32, out, *given)
    return whole(out, layout["C"], c.shape[1:])


def gamma(k: int, eps: float) -> float:
    return k * eps / (1 - k * eps)


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a @ b^T + c, the same of sizes) in f64."""
    x, y, z = (v.astype(np.float64) for v in (a, b, c))
    return x @ y.transpose(0, 2, 1) + z, np.abs(x) @ np.abs(y).transpose(0, 2, 1) + np.abs(z)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 4, shape)


def drawn(shape: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m, n, k = sizes(shape)
    return normal(rng, PROBLEMS, m, k), normal(rng, PROBLEMS, n, k), normal(rng, PROBLEMS, m, n)


@pytest.mark.parametrize("shape", SHAPES["f16"])
def test_mma_f16(shape: str) -> None:
    a, b, c = drawn(shape, np.random.default_rng())
    a, b, c = a.astype(np.float16), b.astype(np.float16), c.astype(F32)
    ref, size = product(a, b, c)
    found = multiply(opcode(shape, "f16"), a, b, c, layouts(shape, "f16"))
    assert (np.abs(found - ref) <= gamma(sizes(shape)[2] + 1, 2.0**-24) * size).all()


@pytest.mark.parametrize("shape", SHAPES["f16"])
def test_mma_f16_with_f16_accumulators(shape: str) -> None:
    a, b, c = (x.astype(np.float16) for x in drawn(shape, np.random.default_rng()))
    ref, size = product(a, b, c)
    found = multiply(opcode(shape, "f16", out="f16"), a, b, c, layouts(shape, "f16"))
    wide = gamma(sizes(shape)[2] + 1, 2.0**-24) * size
    assert (np.abs(found.astype(np.float64) - ref) <= wide + 2.0**-11 * (np.abs(ref) + wide)).all()


@pytest.mark.parametrize("shape", SHAPES["bf16"])
def test_mma_bf16(shape: str) -> None:
    a, b, c = (x.astype(F32) for x in drawn(shape, np.random.default_rng()))
    a, b = ((x.view(U32) >> 16).astype(U16) for x in (a, b))
    ref, size = product(*((x.astype(U32) << 16).view(F32) for x in (a, b)), c)
    found = multiply(opcode(shape, "bf16"), a, b, c, layouts(shape, "bf16"))
    assert (np.abs(found - ref) <= gamma(sizes(shape)[2] + 1, 2.0**-24) * size).all()


@pytest.mark.parametrize("shape", SHAPES["tf32"])
def test_mma_tf32_reads_the_top_19_bits(shape: str) -> None:
    a, b, c = (x.astype(F32) for x in drawn(shape, np.random.default_rng()))
    cut_a, cut_b = ((x.view(U32) & U32(0xFFFFE000)).view(F32) for x in (a, b))
    ref, size = product(cut_a, cut_b, c)
    found = multiply(opcode(shape, "tf32"), a, b, c, layouts(shape, "tf32"))
    assert (np.abs(found - ref) <= gamma(sizes(shape)[2] + 1, 2.0**-24) * size).all()


@pytest.mark.parametrize("shape", SHAPES["f64"])
def test_mma_f64(shape: str) -> None:
    rng = np.random.default_rng()
    a, b, c = drawn(shape, rng)
    ref, size = product(a, b, c)
    found = multiply(opcode(shape, "f64"), a, b, c, layouts(shape, "f64"))
    # the reference has rounding errors of its own
    assert (np.abs(found - ref) <= 2 * gamma(sizes(shape)[2] + 1, 2.0**-53) * size).all()
    a, b, c = (rng.integers(-(1 << 20), 1 << 20, x.shape).astype(np.float64) for x in (a, b, c))
    np.testing.assert_array_equal(multiply(opcode(shape, "f64"), a, b, c, layouts(shape, "f64")), product(a, b, c)[0])


@pytest.mark.parametrize("b_kind", ["s8", "u8"])
@pytest.mark.parametrize("a_kind", ["s8", "u8"])
@pytest.mark.parametrize("shape", SHAPES["s8"])
def test_mma_integers_are_exact(shape: str, a_kind: str, b_kind: str) -> None:
    rng = np.random.default_rng()
    m, n, k = sizes(shape)
    types = {"s8": np.int8, "u8": np.uint8}
    a, b = (
        rng.integers(np.iinfo(types[kind]).min, np.iinfo(types[kind]).max, shape_, endpoint=True, dtype=types[kind])
        for kind, shape_ in ((a_kind, (PROBLEMS, m, k)), (b_kind, (PROBLEMS, n, k)))
    )
    c = rng.integers(-(1 << 31), 1 << 31, (PROBLEMS, m, n)).astype(np.int32)
    exact = a.astype(np.int64) @ b.astype(np.int64).transpose(0, 2, 1) + c
    layout = layouts(shape, a_kind)
    found = multiply(opcode(shape, a_kind, b_kind), a, b, c, layout)
    np.testing.assert_array_equal(found, exact.astype(np.int32))  # wraps
    c = np.where(rng.random(c.shape) < 0.5, 2**31 - 1 - 99, -(2**31) + 99).astype(np.int32)
    exact = a.astype(np.int64) @ b.astype(np.int64).transpose(0, 2, 1) + c
    instruction = opcode(shape, a_kind, b_kind).replace(".row.col", ".row.col.satfinite")
    found = multiply(instruction, a, b, c, layout)
    np.testing.assert_array_equal(found, np.clip(exact, -(2**31), 2**31 - 1))


def test_mma_of_infinities_and_nan() -> None:
    shape = "m16n8k16"
    a, b = np.ones((PROBLEMS, 16, 16), np.float16), np.ones((PROBLEMS, 8, 16), np.float16)
    c = np.zeros((PROBLEMS, 16, 8), F32)
    a[0, 3, 5], a[1, 2, 2], b[1, 4, 7], c[2, 1, 1] = np.inf, np.nan, -np.inf, np.inf
    b[0, 6, 5] = 0
    found = multiply(opcode(shape, "f16"), a, b, c, layouts(shape, "f16"))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found, product(a, b, c)[0])


@pytest.mark.parametrize(
    "instruction",
    [
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32",
        "wgmma.fence.sync.aligned", "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ],
)  # fmt: skip
def test_unknown_matrix_instruction_is_an_error_that_names_it(instruction: str) -> None:
    operands = (
        " {%a, %a, %a, %a}, {%a, %a, %a, %a}, {%a, %a}, {%a, %a, %a, %a}" if instruction.startswith("mma") else ""
    )
    kernel = harness.ptx(f".reg .f32 %a;\n.loc 1 12 0\n{instruction}{operands};\nret;")
    with pytest.raises(EmulatorError, match=rf"^test\.cu:12: .*{re.escape(instruction)}"):
        harness.run(kernel, 1, 32, np.zeros(1, F32))


# -- ldmatrix, stmatrix, movmatrix ------------------------------------------------------------------------------------
def registers(count: int) -> tuple[str, str]:
    names = [f"%r{n}" for n in range(count)]
    return ", ".join(names), f"{{{', '.join(names)}}}"


def matrix_kernel(count: int, trans: bool, store: bool) -> harness.Kernel:
    """Shared memory <- `memory` (1024 bytes); ldmatrix or stmatrix at `rows[lane]`; registers or memory back."""
    declared, items = registers(count)
    form = f"sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared{'::cta' if count == 2 else ''}.b16"
    at = "\n".join(
        f"{'ld' if store else 'st'}.global.b32 "
        + (f"%r{n}, [%q+{4 * n}];" if store else f"[%q+{4 * n}], %r{n};")
        for n in range(count)
    )  # fmt: skip
    act = f"{at}\nstmatrix.{form} [%s], {items};" if store else f"ldmatrix.{form} {items}, [%s];\n{at}"
    back = "\n".join(f"ld.shared.b32 %x, [%m+{128 * n}]; st.global.b32 [%p+{128 * n}], %x;" for n in range(8))
    return harness.ptx(
        f"""
        .shared .align 16 .b8 sh[1024];
        .reg .b32 %t, %x, {declared};
        .reg .b64 %p, %q, %s, %m, %o;
        mov.u32 %t, %tid.x;
        mul.wide.u32 %o, %t, 4;
        mov.u64 %m, sh;
        ld.param.u64 %q, [rows];
        add.u64 %q, %q, %o;
        ld.global.u32 %x, [%q];
        cvt.u64.u32 %s, %x;
        add.u64 %s, %s, %m;
        add.u64 %m, %m, %o;
        ld.param.u64 %p, [memory];
        add.u64 %p, %p, %o;
        {chr(10).join(f"ld.global.b32 %x, [%p+{128 * n}]; st.shared.b32 [%m+{128 * n}], %x;" for n in range(8))}
        bar.warp.sync -1;
        mul.wide.u32 %o, %t, {4 * count};
        ld.param.u64 %q, [regs];
        add.u64 %q, %q, %o;
        {act}
        bar.warp.sync -1;
        {back}
        ret;""",
        params=".param .u64 memory, .param .u64 rows, .param .u64 regs",
    )  # fmt: skip


def element_of(lane: int, half: int, trans: bool) -> tuple[int, int]:
    row, column = lane // 4, lane % 4 * 2 + half
    return (column, row) if trans else (row, column)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: bool, checked: bool) -> None:
    rng = np.random.default_rng()
    memory = rng.integers(0, 1 << 16, 512).astype(U16)
    rows = rng.permutation(64)[:32].astype(U32) * 16
    found = harness.poisoned((32, count, 2), U16)
    kernel = matrix_kernel(count, trans, False)
    if checked:
        with sanitize():
            harness.run(kernel, 1, 32, memory.copy(), rows, found)
    else:
        harness.run(kernel, 1, 32, memory.copy(), rows, found)
    for lane in range(32):
        for j in range(count):
            for half in range(2):
                row, column = element_of(lane, half, trans)
                assert found[lane, j, half] == memory[rows[8 * j + row] // 2 + column]


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count: int, trans: bool) -> None:
    rng = np.random.default_rng()
    memory = rng.integers(0, 1 << 16, 512).astype(U16)
    rows = rng.permutation(64)[:32].astype(U32) * 16
    given = rng.integers(0, 1 << 16, (32, count, 2)).astype(U16)
    expected, found = memory.copy(), memory.copy()
    for lane in range(32):
        for j in range(count):
            for half in range(2):
                row, column = element_of(lane, half, trans)
                expected[rows[8 * j + row] // 2 + column] = given[lane, j, half]
    text = matrix_kernel(count, trans, True).ptx.replace(".target sm_80", ".target sm_90")
    harness.run(harness.whole_ptx(text), 1, 32, found, rows, given)
    np.testing.assert_array_equal(found, expected)


SWIZZLES = {  # where lane l, warp w of two and step i find their chunk of 16 bytes; what the analysis knows of it
    "affine": "l * 16 + w * 512 + i * 64",
    "rows swizzled": "((l % 16) * 4 + ((l / 16 + 2 * i) ^ (l / 2 % 4))) * 16 + w * 1024",
    "columns swizzled": "((l % 16) * 8 + ((w * 4 + 2 * i + l / 16) ^ l % 8)) * 16",
    "one address": "w * 16",
}


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("place", SWIZZLES.values(), ids=SWIZZLES)
def test_ldmatrix_by_what_is_known_of_the_address(place: str, trans: bool) -> None:
    source = f"""__global__ void k(uint4* o, const int* x) {{
        __shared__ __align__(16) int s[1024];
        for (int t = threadIdx.x; t < 1024; t += 64) s[t] = x[t];
        __syncthreads();
        u32 l = threadIdx.x % 32, w = threadIdx.x / 32;
        for (u32 i = 0; i < 2; i++) {{
            u32 at = (u32)__cvta_generic_to_shared(s) + {place};
            uint4 v;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4{".trans" * trans}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
                : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
            o[i * 64 + threadIdx.x] = v;
        }}
    }}"""
    x = np.random.default_rng().integers(0, 1 << 16, 2048).astype(U16)
    found = harness.poisoned((2, 2, 32, 4, 2), U16)  # step, warp, lane, register, half
    harness.run(harness.cuda(source), 1, 64, found, x.view(np.int32))
    formula = place.replace("/", "//")
    for i, w, lane, j, half in np.ndindex(*found.shape):
        row, column = element_of(lane, half, trans)
        at = eval(formula, {"l": 8 * j + row, "w": w, "i": i})
        assert found[i, w, lane, j, half] == x[at // 2 + column]


def test_ldmatrix_of_a_misaligned_row_is_a_finding() -> None:
    rows = np.arange(32, dtype=U32) * 16
    rows[5] += 8
    message = r"thread \(5, 0, 0\) reads 16 bytes shared\[88\] \(bytes\), which is not a multiple of 16"
    with sanitize(), pytest.raises(SanitizerError, match=message) as error:
        harness.run(matrix_kernel(1, False, False), 1, 32, np.zeros(512, U16), rows, np.zeros((32, 2), U16))
    assert [f.check for f in error.value.findings] == ["memcheck"]
    with sanitize():  # lanes that give no address to .x1 may hold anything
        harness.run(matrix_kernel(1, False, False), 1, 32, np.zeros(512, U16), np.roll(rows, 5), np.zeros((32, 2), U16))


def test_ldmatrix_outside_shared_memory_is_an_error() -> None:
    rows = np.arange(32, dtype=U32) * 16
    rows[12] = 1024
    with pytest.raises(EmulatorError, match=r"shared\[1024\] \(bytes\), but the block has 1024 bytes"):
        harness.run(matrix_kernel(4, False, False), 1, 32, np.zeros(512, U16), rows, np.zeros((32, 8), U16))


def test_movmatrix_transposes() -> None:
    kernel = harness.ptx(
        """
        .reg .b32 %t, %x;
        .reg .b64 %p, %o;
        mov.u32 %t, %tid.x;
        mul.wide.u32 %o, %t, 4;
        ld.param.u64 %p, [out];
        add.u64 %p, %p, %o;
        ld.global.b32 %x, [%p];
        movmatrix.sync.aligned.m8n8.trans.b16 %x, %x;
        st.global.b32 [%p], %x;
        ret;"""
    )
    x = np.random.default_rng().integers(0, 1 << 16, (8, 8)).astype(U16)
    found = x.copy()
    harness.run(kernel, 1, 32, found)
    np.testing.assert_array_equal(found, x.T)


# -- cp.async ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("how", "size"),
    [
        *(("ca.shared.global", size) for size in (4, 8, 16)),
        ("cg.shared.global", 16),
        ("cg.shared::cta.global.L2::128B", 16),
        ("ca.shared.global.L2::64B", 8),
        ("cg.shared.global.L2::256B", 16),
        ("cg.shared.global.L2::cache_hint", 16),
    ],
)
def test_cp_async_fills_zeros_past_the_source_size(how: str, size: int, dynamic: bool) -> None:
    policy = ", 0x14F0000000000000" if "cache_hint" in how else ""
    source = f"""__global__ void k(u8* o, const u8* x, const int* sizes) {{
        extern __shared__ __align__(16) u8 s[];
        int t = threadIdx.x, n = sizes[t];
        for (int i = 0; i < {size}; i++) s[{size} * t + i] = 0xEE;
        __syncwarp();
        u32 to = (u32)__cvta_generic_to_shared(s + {size} * t);
        asm volatile("cp.async.{how} [%0], [%1], {size}{", %2" if dynamic else ""}{policy};"
            :: "r"(to), "l"(x + {size} * t){', "r"(n)' if dynamic else ""});
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        for (int i = 0; i < {size}; i++) o[{size} * t + i] = s[{size} * t + i];
    }}"""
    rng = np.random.default_rng()
    x = rng.integers(1, 200, 64 * size).astype(np.uint8)
    counts = rng.integers(0, size + 1, 64).astype(np.int32)
    found = harness.poisoned(64 * size, np.uint8)
    harness.run(harness.cuda(source), 1, 64, found, x, counts, smem=64 * size)
    expected = x.reshape(64, size).copy()
    if dynamic:
        expected[np.arange(size) >= counts[:, None]] = 0
    np.testing.assert_array_equal(found.reshape(64, size), expected)


def test_cp_async_does_not_read_past_the_source_size() -> None:
    source = """__global__ void k(float* o, const float* x, int n) {
        __shared__ __align__(16) float s[128];
        int t = threadIdx.x, left = min(max(n - 4 * t, 0), 4);
        u32 to = (u32)__cvta_generic_to_shared(s + 4 * t);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(x + 4 * t), "r"(4 * left));
        asm volatile("cp.async.wait_all;");
        for (int i = 0; i < 4; i++) o[4 * t + i] = s[4 * t + i];
    }"""
    x = np.random.default_rng().standard_normal(61).astype(F32)
    for check in (False, True):
        found = harness.poisoned(128, F32)
        kernel = harness.cuda(source)
        if check:
            with sanitize():
                harness.run(kernel, 1, 32, found, x, 61)
        else:
            harness.run(kernel, 1, 32, found, x, 61)
        np.testing.assert_array_equal(found, np.concatenate([x, np.zeros(67, F32)]))


@pytest.mark.parametrize(("to", "source"), [(4, 0), (0, 4)])
def test_misaligned_cp_async_is_a_finding(to: int, source: int) -> None:
    text = f"""__global__ void k(float* o, const float* x) {{
        __shared__ __align__(16) float s[68];
        int t = threadIdx.x;
        u32 to = (u32)__cvta_generic_to_shared(s + 4 * t) + {to};
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"((const char*)(x + 4 * t) + {source}));
        asm volatile("cp.async.wait_all;");
        __syncwarp();
        o[t] = s[4 * t + {to // 4}];
    }}"""
    x = np.arange(100, dtype=F32)
    with sanitize(), pytest.raises(SanitizerError, match=r"16 bytes .* not a multiple of 16") as error:
        harness.run(harness.cuda(text), 1, 16, np.zeros(16, F32), x)
    (finding,) = error.value.findings
    assert (finding.check, finding.line, finding.argument) == ("memcheck", 5, "shared" if to else "argument1")


def test_cp_async_of_some_lanes() -> None:
    source = """__global__ void k(int* o, const int* x) {
        __shared__ int s[64];
        int t = threadIdx.x;
        s[t] = -1;
        if (t % 3 == 0) {
            u32 to = (u32)__cvta_generic_to_shared(s + t);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(x + t));
        }
        asm volatile("cp.async.wait_all;");
        o[t] = s[t];
    }"""
    x, found = np.arange(64, dtype=np.int32), harness.poisoned(64, np.int32)
    harness.run(harness.cuda(source), 1, 64, found, x)
    np.testing.assert_array_equal(found, np.where(x % 3 == 0, x, -1))


# -- lanes together ---------------------------------------------------------------------------------------------------
def lanewise(expression: str, x: np.ndarray, out: type = U32, threads: int = 32) -> np.ndarray:
    """`expression` of `v` (the lane's value), `t` and FULL, in every lane."""
    name = {np.uint32: "u32", np.int32: "int", np.uint64: "u64"}
    source = f"""#define FULL 0xFFFFFFFFu
    __global__ void k({name[out]}* o, const {name[x.dtype.type]}* x) {{
        int t = threadIdx.x;
        {name[x.dtype.type]} v = x[t];
        o[t] = {expression};
    }}"""
    found = harness.poisoned(threads, out)
    harness.run(harness.cuda(source), 1, threads, found, x)
    return found


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add.reduce, "min": np.min, "max": np.max, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_redux(op: str, dtype: type) -> None:
    if op in ("and", "or", "xor") and dtype is np.int32:
        dtype = np.uint32
    x = np.random.default_rng().integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 64, dtype=dtype, endpoint=True)
    found = lanewise(f"__reduce_{op}_sync(FULL, v)", x, dtype, 64)
    expected = [REDUCTIONS[op](x[w : w + 32]).astype(dtype) for w in (0, 32)]
    np.testing.assert_array_equal(found, np.repeat(expected, 32))


def test_redux_of_some_lanes() -> None:
    x = np.random.default_rng().integers(0, 1 << 32, 32, dtype=np.uint64).astype(U32)
    found = lanewise("t % 3 == 1 ? __reduce_min_sync(0x92492492u, v) : 5u", x)
    np.testing.assert_array_equal(found, np.where(np.arange(32) % 3 == 1, x[1::3].min(), 5))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_match_any_and_all(dtype: type) -> None:
    rng = np.random.default_rng()
    x = rng.integers(0, 5, 32).astype(dtype) << (60 if dtype is np.uint64 else 0)
    found = lanewise("__match_any_sync(FULL, v)", x)
    bits = 1 << np.arange(32, dtype=np.uint64)
    np.testing.assert_array_equal(found, [int(bits[x == value].sum()) for value in x])
    source = """__global__ void k(u32* o, const TYPE* x) {
        int p, t = threadIdx.x;
        o[t] = __match_all_sync(0xFFFFFFFFu, x[t], &p);
        o[32 + t] = p;
    }""".replace("TYPE", "u64" if dtype is np.uint64 else "u32")
    for values, mask in ((np.full(32, x[0]), 0xFFFFFFFF), (np.where(np.arange(32) == 20, x[0] + dtype(1), x[0]), 0)):
        o = harness.poisoned(64, U32)
        harness.run(harness.cuda(source), 1, 32, o, values.astype(dtype))
        np.testing.assert_array_equal(o[:32], mask)
        np.testing.assert_array_equal(o[32:], int(mask != 0))


def test_match_any_of_some_lanes() -> None:
    x = np.random.default_rng().integers(0, 3, 32).astype(U32)
    found = lanewise("t >= 12 ? __match_any_sync(0xFFFFF000u, v) : 7u", x)
    lanes = np.arange(32)
    bits = 1 << lanes.astype(np.uint64)
    expected = [7 if t < 12 else int(bits[(x == x[t]) & (lanes >= 12)].sum()) for t in lanes]
    np.testing.assert_array_equal(found, expected)


def test_votes() -> None:
    x = np.random.default_rng().integers(0, 2, 32).astype(U32)
    bits = int((x.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum())
    for values in (x, np.zeros_like(x), np.ones_like(x)):
        bits = int((values.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum())
        np.testing.assert_array_equal(lanewise("__ballot_sync(FULL, v)", values), bits)
        np.testing.assert_array_equal(lanewise("__any_sync(FULL, v)", values), int(bits != 0))
        np.testing.assert_array_equal(lanewise("__all_sync(FULL, v)", values), int(bits == 0xFFFFFFFF))
        found = lanewise("t & 4 ? __ballot_sync(0xF0F0F0F0u, v) : __ballot_sync(0x0F0F0F0Fu, v)", values)
        lanes = np.arange(32)
        np.testing.assert_array_equal(found, np.where(lanes & 4, bits & 0xF0F0F0F0, bits & 0x0F0F0F0F))


def test_vote_uni() -> None:
    kernel = harness.ptx(
        """
        .reg .b32 %t, %x;
        .reg .b64 %p, %o;
        .reg .pred %a, %b;
        mov.u32 %t, %tid.x;
        mul.wide.u32 %o, %t, 4;
        ld.param.u64 %p, [out];
        add.u64 %p, %p, %o;
        ld.global.b32 %x, [%p];
        setp.ne.u32 %a, %x, 0;
        vote.sync.uni.pred %b, %a, -1;
        selp.b32 %x, 1, 0, %b;
        st.global.b32 [%p], %x;
        ret;"""
    )
    for values, expected in ((np.ones(32), 1), (np.zeros(32), 1), (np.arange(32), 0)):
        found = values.astype(U32)
        harness.run(kernel, 1, 32, found)
        np.testing.assert_array_equal(found, expected)


def test_activemask_in_divergent_code() -> None:
    source = """__global__ void k(u32* o, const u32* x) {
        int t = threadIdx.x;
        u32 v = x[t], mask = 0;
        if (v & 1) mask = __activemask();
        else if (v & 2) mask = __activemask();
        o[t] = mask;
    }"""
    x, found = np.random.default_rng().integers(0, 4, 32).astype(U32), harness.poisoned(32, U32)
    harness.run(harness.cuda(source), 1, 32, found, x)
    bits = 1 << np.arange(32, dtype=np.uint64)
    odd, two = x & 1 == 1, x == 2
    np.testing.assert_array_equal(found, np.where(odd, bits[odd].sum(), np.where(two, bits[two].sum(), 0)))


def test_ballots_of_a_loop_that_lanes_leave_one_by_one() -> None:
    """Each lane keeps the ballot of its own last round."""
    source = """__global__ void k(u32* o, const u32* x) {
        int t = threadIdx.x;
        u32 mask = 0, members = 0xFFFFFFFFu;
        for (u32 i = 0; i < x[t]; i++) {
            members = __ballot_sync(members, true);
            mask = __activemask();
            members = __ballot_sync(members, i + 1 < x[t]);
        }
        o[t] = mask;
    }"""
    x, found = np.random.default_rng().integers(1, 9, 32).astype(U32), harness.poisoned(32, U32)
    harness.run(harness.cuda(source), 1, 32, found, x)
    bits = 1 << np.arange(32, dtype=np.uint64)
    np.testing.assert_array_equal(found, [int(bits[x >= v].sum()) for v in x])


def test_elect_takes_the_lowest_member() -> None:
    kernel = harness.ptx(
        """
        .reg .b32 %t, %x, %m;
        .reg .b64 %p, %o;
        .reg .pred %q, %e;
        mov.u32 %t, %tid.x;
        mul.wide.u32 %o, %t, 8;
        ld.param.u64 %p, [out];
        add.u64 %p, %p, %o;
        setp.lt.u32 %q, %t, 5;
        @%q bra low;
        elect.sync %x|%e, 0xFFFFFFE0;
        bra.uni put;
        low: elect.sync %x|%e, 0x1E;
        put:
        selp.b32 %m, 1, 0, %e;
        st.global.v2.b32 [%p], {%x, %m};
        ret;"""
    )
    found = harness.poisoned((32, 2), U32)
    harness.run(harness.whole_ptx(kernel.ptx.replace("sm_80", "sm_90")), 1, 32, found)
    leader = np.where(np.arange(32) < 5, 1, 5)
    np.testing.assert_array_equal(found[:, 0], leader)
    np.testing.assert_array_equal(found[:, 1], np.arange(32) == leader)
