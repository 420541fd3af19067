"""wmma.load, wmma.mma and wmma.store against NumPy: as PTX in every form, and as mma.h of the toolkit makes them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from cudaops.emulator import sanitize
from cudaops.emulator.isa.wmma import SHAPES, Fragment
from cudaops.errors import EmulatorError, SanitizerError
from tests.emulator import harness

U16, U32, F32 = np.uint16, np.uint32, np.float32
STORED: dict[str, Any] = {
    "f16": np.float16, "bf16": U16, "tf32": F32, "f64": np.float64, "s8": np.int8, "u8": np.uint8, "f32": F32,
    "s32": np.int32,
}  # fmt: skip
PAD = 8  # elements between the rows of a matrix in memory
ORDERS = {"r": "row", "c": "col"}
EVERY = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


def sizes(shape: str) -> tuple[int, int, int]:
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def total_of(kind: str) -> str:
    return {"f64": "f64", "s8": "s32", "u8": "s32"}.get(kind, "f32")


def drawn(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    if kind[0] in "su":
        info = np.iinfo(STORED[kind])
        return rng.integers(info.min, info.max, shape, dtype=STORED[kind], endpoint=True)
    x = rng.standard_normal(shape).astype(np.float64 if kind == "f64" else F32)
    return (x.view(U32) >> 16).astype(U16) if kind == "bf16" else x.astype(STORED[kind])


def wide(x: np.ndarray, kind: str) -> np.ndarray:
    """What the product is of, in a type wide enough to be exact."""
    if kind == "bf16":
        x = (x.astype(U32) << 16).view(F32)
    if kind == "tf32":
        x = (x.view(U32) & U32(0xFFFFE000)).view(F32)
    return x.astype(np.int64 if kind[0] in "su" else np.float64)


def in_memory(x: np.ndarray, order: str, pad: int) -> np.ndarray:
    lines = x if order == "row" else x.T
    return np.ascontiguousarray(np.pad(lines, ((0, 0), (0, pad))))


def from_memory(lines: np.ndarray, order: str, pad: int) -> np.ndarray:
    kept = lines[:, : lines.shape[1] - pad]
    return kept if order == "row" else kept.T


def names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{n}" for n in range(count)) + "}"


def copied(source: str, from_space: str, target: str, to_space: str, size: int, label: str) -> str:
    """PTX of a warp that copies `size` bytes."""
    return f"""mov.u32 %t, %laneid; mul.wide.u32 %o, %t, 2;
        next_{label}: setp.ge.u64 %q, %o, {size}; @%q bra end_{label};
        add.u64 %x, {source}, %o; add.u64 %y, {target}, %o; ld.{from_space}.b16 %h, [%x]; st.{to_space}.b16 [%y], %h;
        add.u64 %o, %o, 64; bra next_{label};
        end_{label}:"""


def kernel(
    kind: str, shape: str, orders: str, *, into: str = "", out: str = "", space: str = "global", pad: int = PAD,
    more: str = "",
) -> harness.Kernel:  # fmt: skip
    """d = a b + c; `orders` has one letter (r, c) for each of a, b, c, d."""
    into, out = into or total_of(kind), out or total_of(kind)
    kinds = dict(zip("abcd", (kind, kind, into, out), strict=True))
    order = {operand: ORDERS[o] for operand, o in zip("abcd", orders, strict=True)}
    declared, loads, copies = [], [], []
    at = 0
    for operand, its in kinds.items():
        fragment = Fragment.of(operand, shape, its)
        held = {"f64": "f64", "f32": "f32"}.get(its, "b32") if operand in "cd" else "f64" if its == "f64" else "b32"
        registers = names(operand, fragment.registers * fragment.copies)
        declared.append(f".reg .{held} {registers[1:-1]};")
        lines = {"a": (fragment.m, fragment.k), "b": (fragment.k, fragment.n)}.get(operand, (fragment.m, fragment.n))
        rows, columns = lines if order[operand] == "row" else lines[::-1]
        size = rows * (columns + pad) * np.dtype(STORED[its]).itemsize
        stride = f", {columns + pad}" if pad else ""
        where = "" if space == "generic" else f".{space}"
        address = f"%p{operand}"
        if space.startswith("shared"):
            address = f"%s{operand}"
            declared.append(f".reg .b64 {address}; ")
            copies.append(f"mov.u64 {address}, sh; add.u64 {address}, {address}, {at};")
            if operand != "d":
                copies.append(copied(f"%p{operand}", "global", address, "shared", size, operand))
            at += -(-size // 32) * 32
        if operand != "d":
            loads.append(
                f"wmma.load.{operand}.sync.aligned.{order[operand]}.{shape}{where}.{its} {registers}, [{address}]{stride};"
            )
            continue
        types = f"{out}.{into}" if kind == "f16" else f"{out}.{kind}.{kind}.{into}"
        operands = ", ".join(
            names(o, Fragment.of(o, shape, kinds[o]).registers * Fragment.of(o, shape, kinds[o]).copies) for o in "dabc"
        )
        loads.append(
            f"wmma.mma.sync.aligned.{order['a']}.{order['b']}.{shape}{more if more == '.rn' else ''}.{types}{more if more != '.rn' else ''} {operands};"
        )
        loads.append(f"wmma.store.d.sync.aligned.{order['d']}.{shape}{where}.{its} [{address}], {registers}{stride};")
        if space.startswith("shared"):
            loads.append("bar.warp.sync -1;")
            loads.append(copied(address, "shared", "%pd", "global", size, operand))
    return harness.ptx(
        f"""
        .shared .align 32 .b8 sh[{max(at, 32)}];
        .reg .b64 %pa, %pb, %pc, %pd, %o, %x, %y; .reg .b16 %h; .reg .b32 %t; .reg .pred %q;
        {" ".join(declared)}
        ld.param.u64 %pa, [a]; ld.param.u64 %pb, [b]; ld.param.u64 %pc, [c]; ld.param.u64 %pd, [d];
        {chr(10).join(copies)}
        bar.warp.sync -1;
        {chr(10).join(loads)}
        ret;""",
        params=".param .u64 d, .param .u64 a, .param .u64 b, .param .u64 c",
    )  # fmt: skip


def check(found: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str, out: str, into: str) -> None:
    x, y, z = wide(a, kind), wide(b, kind), wide(c, into)
    exact = x @ y + z
    if out == "s32":
        np.testing.assert_array_equal(found, exact.astype(np.int32))
        return
    terms, eps = x.shape[1] + 1, 2.0**-53 if kind == "f64" else 2.0**-24
    bound = 2 * terms * eps / (1 - terms * eps) * (np.abs(x) @ np.abs(y) + np.abs(z))
    if out == "f16":
        bound += 2.0**-11 * (np.abs(exact) + bound) + 2.0**-24
    assert (np.abs(found.astype(np.float64) - exact) <= bound).all()


def run(kind: str, shape: str, orders: str, *, into: str = "", out: str = "", pad: int = PAD, **options: Any) -> None:
    rng = np.random.default_rng()
    into, out = into or total_of(kind), out or total_of(kind)
    m, n, k = sizes(shape)
    a, b, c = drawn(rng, kind, (m, k)), drawn(rng, kind, (k, n)), drawn(rng, into, (m, n))
    order = [ORDERS[o] for o in orders]
    given = [in_memory(x, o, pad) for x, o in zip((a, b, c), order, strict=False)]
    found = harness.poisoned(in_memory(c, order[3], pad).shape, STORED[out])
    before = found.copy()
    harness.run(kernel(kind, shape, orders, into=into, out=out, pad=pad, **options), 1, 32, found, *given)
    check(from_memory(found, order[3], pad), a, b, c, kind, out, into)
    if pad and not options.get("space", "").startswith("shared"):
        np.testing.assert_array_equal(found[:, -pad:].view(np.uint8), before[:, -pad:].view(np.uint8))


@pytest.mark.parametrize(("kind", "shape"), EVERY)
def test_every_form_in_every_order(kind: str, shape: str) -> None:
    for orders in itertools.product("rc", repeat=4):
        run(kind, shape, "".join(orders))


@pytest.mark.parametrize(("out", "into"), [*itertools.product(("f16", "f32"), repeat=2)])
@pytest.mark.parametrize("shape", SHAPES["f16"])
def test_f16_accumulators(shape: str, out: str, into: str) -> None:
    for orders in ("rcrr", "crcr", "rrrc"):
        run("f16", shape, orders, out=out, into=into)


@pytest.mark.parametrize("space", ["generic", "shared", "shared::cta"])
@pytest.mark.parametrize(("kind", "shape"), EVERY)
def test_state_spaces_and_the_stride_that_is_left_out(kind: str, shape: str, space: str) -> None:
    run(kind, shape, "rcrc", space=space, pad=0)


def test_rounding_of_f64_is_to_nearest() -> None:
    run("f64", "m8n8k4", "rcrr", more=".rn")


@pytest.mark.parametrize("kind", ["s8", "u8"])
def test_satfinite(kind: str) -> None:
    m, n, k = sizes("m16n16k16")
    rng = np.random.default_rng()
    a, b = drawn(rng, kind, (m, k)), drawn(rng, kind, (k, n))
    c = np.where(rng.random((m, n)) < 0.5, 2**31 - 1 - 99, -(2**31) + 99).astype(np.int32)
    found = harness.poisoned((m, n), np.int32)
    harness.run(kernel(kind, "m16n16k16", "rrrr", pad=0, more=".satfinite"), 1, 32, found, a, b, c)
    exact = a.astype(np.int64) @ b.astype(np.int64) + c
    np.testing.assert_array_equal(found, np.clip(exact, -(2**31), 2**31 - 1))


@pytest.mark.parametrize(("kind", "shape"), EVERY)
@pytest.mark.parametrize("operand", "abc")
def test_a_fragment_holds_every_element_as_often_as_any_other(kind: str, shape: str, operand: str) -> None:
    fragment = Fragment.of(operand, shape, total_of(kind) if operand == "c" else kind)
    elements = fragment.registers * fragment.per_register
    held = [fragment.place(lane, e) for lane in range(32) for e in range(elements)]
    m, n, k = sizes(shape)
    rows, columns = {"a": (m, k), "b": (k, n), "c": (m, n)}[operand]
    assert sorted(held) == list(itertools.product(range(rows), range(columns)))


# -- mma.h ------------------------------------------------------------------------------------------------------------
HEADER = {
    "f16": ("__half", "__half"), "bf16": ("__nv_bfloat16", "__nv_bfloat16"), "f64": ("double", "double"),
    "tf32": ("wmma::precision::tf32", "float"), "s8": ("signed char", "signed char"),
    "u8": ("unsigned char", "unsigned char"),
}  # fmt: skip


@pytest.mark.parametrize("orders", ["rc", "cr"])
@pytest.mark.parametrize(("kind", "shape"), EVERY)
def test_mma_h(kind: str, shape: str, orders: str) -> None:
    """Two steps along k from shared memory, then arithmetic on what the fragment holds, element by element."""
    m, n, k = sizes(shape)
    element, stored = HEADER[kind]
    total = {"f64": "double", "s32": "int", "f32": "float"}[total_of(kind)]
    order = [ORDERS[o] for o in orders]
    source = f"""#include <mma.h>
    #include <cuda_bf16.h>
    using namespace nvcuda;
    __global__ void k({total}* o, const {stored}* a, const {stored}* b, const {total}* c) {{
        __shared__ __align__(32) {stored} sa[{m * 2 * k}], sb[{n * 2 * k}];
        for (int i = threadIdx.x; i < {m * 2 * k}; i += 32) sa[i] = a[i];
        for (int i = threadIdx.x; i < {n * 2 * k}; i += 32) sb[i] = b[i];
        __syncwarp();
        wmma::fragment<wmma::matrix_a, {m}, {n}, {k}, {element}, wmma::{order[0]}_major> x;
        wmma::fragment<wmma::matrix_b, {m}, {n}, {k}, {element}, wmma::{order[1]}_major> y;
        wmma::fragment<wmma::accumulator, {m}, {n}, {k}, {total}> z, bias;
        wmma::fill_fragment(z, ({total})0);
        for (int step = 0; step < 2; step++) {{
            wmma::load_matrix_sync(x, sa + step * {k if order[0] == "row" else k * m}, {2 * k if order[0] == "row" else m});
            wmma::load_matrix_sync(y, sb + step * {k * n if order[1] == "row" else k}, {n if order[1] == "row" else 2 * k});
            {"for (int i = 0; i < x.num_elements; i++) x.x[i] = wmma::__float_to_tf32(x.x[i]);" if kind == "tf32" else ""}
            wmma::mma_sync(z, x, y, z);
        }}
        wmma::load_matrix_sync(bias, c, {n}, wmma::mem_row_major);
        for (int i = 0; i < z.num_elements; i++) z.x[i] = z.x[i] * 2 + bias.x[i];
        wmma::store_matrix_sync(o, z, {m}, wmma::mem_col_major);
    }}"""
    rng = np.random.default_rng()
    a, b, c = drawn(rng, kind, (m, 2 * k)), drawn(rng, kind, (2 * k, n)), drawn(rng, total_of(kind), (m, n))
    if kind == "tf32":  # rounding to it changes nothing
        a, b = ((x.view(U32) & U32(0xFFFFE000)).view(F32) for x in (a, b))
    found = harness.poisoned((n, m), STORED[total_of(kind)])
    with sanitize():
        harness.run(harness.cuda(source), 1, 32, found, in_memory(a, order[0], 0), in_memory(b, order[1], 0), c)
    exact = 2 * (wide(a, kind) @ wide(b, kind)) + c
    if total == "int":
        np.testing.assert_array_equal(found.T, exact.astype(np.int32))
        return
    eps, terms = 2.0**-53 if kind == "f64" else 2.0**-24, 2 * k + 3
    size = 2 * np.abs(wide(a, kind)) @ np.abs(wide(b, kind)) + np.abs(c)
    assert (np.abs(found.T - exact) <= 2 * terms * eps * size).all()


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "instruction",
    [
        "wmma.load.a.sync.aligned.row.m8n8k32.global.s4 {%a}, [%p], 32",
        "wmma.load.a.sync.aligned.row.m8n8k128.global.b1 {%a}, [%p], 128",
        "wmma.load.a.sync.aligned.row.m16n16k8.global.f16 {%a, %a, %a, %a, %a, %a, %a, %a}, [%p], 16",
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%a, %a, %a, %a}, [%p], 16",
        "wmma.mma.sync.aligned.row.col.m8n8k32.s32.u4.u4.s32 {%a, %a}, {%a}, {%a}, {%a, %a}",
        "wmma.mma.xor.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 {%a, %a}, {%a}, {%a}, {%a, %a}",
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%a, %a}, {%a}, {%a}, {%a, %a}",
    ],
)
def test_what_is_not_emulated_is_an_error_that_names_it(instruction: str) -> None:
    made = harness.ptx(f".reg .b32 %a; .reg .b64 %p;\n.loc 1 12 0\n{instruction};\nret;")
    with pytest.raises(EmulatorError, match=rf"^test\.cu:12: .*{re.escape(instruction.split(' ')[0])}"):
        harness.run(made, 1, 32, np.zeros(1, F32))


def test_a_matrix_that_is_outside_is_an_error() -> None:
    made = kernel("f16", "m16n16k16", "rcrr", pad=0)
    a, c = np.zeros((15, 16), np.float16), np.zeros((16, 16), F32)
    with pytest.raises(EmulatorError, match=r"argument1"):
        harness.run(made, 1, 32, c.copy(), a, np.zeros((16, 16), np.float16), c)


def test_a_race_with_a_store_is_a_finding() -> None:
    source = """#include <mma.h>
    using namespace nvcuda;
    __global__ void k(float* o) {
        __shared__ __align__(32) float s[256];
        wmma::fragment<wmma::accumulator, 16, 16, 16, float> z;
        wmma::fill_fragment(z, 1.0f);
        if (threadIdx.x < 32) wmma::store_matrix_sync(s, z, 16, wmma::mem_row_major);
        o[threadIdx.x] = s[threadIdx.x];
    }"""
    with sanitize(), pytest.raises(SanitizerError) as error:
        harness.run(harness.cuda(source), 1, 64, np.zeros(64, F32))
    assert "racecheck" in {f.check for f in error.value.findings}


def test_a_fault_in_the_toolkits_headers_is_told_at_the_users_line() -> None:
    kernel = harness.cuda("""
    #include <mma.h>
    using namespace nvcuda;
    typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Sum;
    __device__ void put(float *x, Sum &c) {
        wmma::store_matrix_sync(x + 1024, c, 16, wmma::mem_row_major);
    }
    __global__ void k(float *x) {
        Sum c;
        wmma::fill_fragment(c, 1.f);
        put(x, c);
    }""")
    with pytest.raises(EmulatorError, match=r"k\.cu:6: block \(0, 0, 0\), thread \(0, 0, 0\) writes 8 bytes at"):
        harness.run(kernel, 1, 32, np.zeros(256, np.float32))
