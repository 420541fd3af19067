"""mma.sync, ldmatrix, stmatrix and movmatrix: matrices spread over the lanes of a warp.

A fragment element lies in the same register of every lane, so each step along k is two constant shuffles and a
multiply-add of 32 lanes for every accumulator. Accumulation is in f32 (f64, i32), k ascending; hardware keeps more
bits and another order, so that only integer and f64 results are defined to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudaops.emulator import sanitizer
from cudaops.emulator.isa.half import narrow, pack, split, widen
from cudaops.emulator.isa.memory import Access
from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import LANE, VARYING
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Instruction, Mem, Operand, Vec

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

Place = Callable[[int, int], tuple[int, int]]  # (lane, element) -> (row, column)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a fragment sit in the matrix. B is given as (n, k)."""

    elements: int
    place: Place


def operand_layout(rows: int, k: int, per_register: int) -> Layout:
    """A (m, k) or B (n, k): `per_register` neighbours along k a register; registers go down by 8 rows, then along k."""
    down = max(rows // 8, 1)
    step = 4 * per_register

    def place(lane: int, element: int) -> tuple[int, int]:
        register, inner = divmod(element, per_register)
        return lane // 4 + 8 * (register % down), lane % 4 * per_register + inner + step * (register // down)

    return Layout(rows * k // 32, place)


def accumulator_layout(rows: int) -> Layout:
    return Layout(rows * 8 // 32, lambda lane, i: (lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2))


BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8}


def fragment_layouts(shape: str, type_: str) -> tuple[Layout, Layout, Layout]:
    """Layouts of A, B and C/D of mma.sync for a shape such as 'm16n8k16'."""
    m, k = int(shape[1 : shape.index("n")]), int(shape[shape.index("k") + 1 :])
    per_register = max(32 // BITS[type_], 1)
    return operand_layout(m, k, per_register), operand_layout(8, k, per_register), accumulator_layout(m)


SHAPES = {
    "f16": ("m16n8k8", "m16n8k16"), "bf16": ("m16n8k8", "m16n8k16"), "tf32": ("m16n8k4", "m16n8k8"),
    "f64": ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
    "s8": ("m8n8k16", "m16n8k16", "m16n8k32"), "u8": ("m8n8k16", "m16n8k16", "m16n8k32"),
}  # fmt: skip


@rule(
    "mma", "f16 bf16 tf32 f64 s8 u8 f32 s32",
    "sync aligned row col satfinite m8n8k4 m8n8k16 m16n8k4 m16n8k8 m16n8k16 m16n8k32",
)  # fmt: skip
def mma(g: Codegen, ins: Instruction) -> None:
    shape = next(p for p in ins.parts if p.startswith("m") and p[1].isdigit())
    out, kind_a, kind_b, into = ins.parts[-4:]
    if shape not in SHAPES[kind_a] or "row" not in ins.parts or "col" not in ins.parts:
        g.unsupported(ins, f"mma of {shape} and {kind_a} in this form")
    a, b, c = fragment_layouts(shape, kind_a)
    k = a.elements * 32 // max(c.elements * 4, 8)
    g.vector = True
    ty = {"f64": "f64", "s8": "s32", "u8": "s32"}.get(kind_a, "f32")
    values_a = _elements(g, _items(ins.operands[1]), kind_a, a.elements)
    values_b = _elements(g, _items(ins.operands[2]), kind_b, b.elements)
    sums = _accumulators(g, _items(ins.operands[3]), into, c.elements)
    wide = ty == "s32" and "satfinite" in ins.parts
    if wide:
        sums = [g.emit(f"sext <32 x i32> {s} to <32 x i64>") for s in sums]
    where_a = {a.place(lane, e): (lane, e) for lane in LANE for e in range(a.elements)}
    where_b = {b.place(lane, e): (lane, e) for lane in LANE for e in range(b.elements)}
    for step in range(k):
        shuffled: dict[tuple[str, tuple[tuple[int, int], ...]], str] = {}
        for n in range(c.elements):
            places = [c.place(lane, n) for lane in LANE]
            x = _pick(g, "a", values_a, tuple(where_a[row, step] for row, _ in places), ty, shuffled)
            y = _pick(g, "b", values_b, tuple(where_b[column, step] for _, column in places), ty, shuffled)
            if ty != "s32":
                sums[n] = g.call("llvm.fma", ty, x, y, sums[n])
            elif wide:
                x, y = (g.emit(f"sext <32 x i32> {v} to <32 x i64>") for v in (x, y))
                sums[n] = g.binary("add", "<32 x i64>", sums[n], g.binary("mul", "<32 x i64>", x, y))
            else:
                sums[n] = g.binary("add", "<32 x i32>", sums[n], g.binary("mul", "<32 x i32>", x, y))
    if wide:
        sums = [_saturated(g, s) for s in sums]
    _write(g, _items(ins.operands[0]), sums, out)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _elements(g: Codegen, registers: Sequence[Operand], kind: str, count: int) -> list[str]:
    """Every element of a fragment as a vector over the lanes, wide enough to calculate with."""
    found: list[str] = []
    for register in registers:
        if kind == "f64":
            found.append(g.read(register, "f64", vector=True))
        elif kind == "tf32":  # the top 19 bits count
            bits = g.binary("and", "<32 x i32>", g.read(register, "b32", vector=True), g.splat32(-0x2000))
            found.append(g.emit(f"bitcast <32 x i32> {bits} to <32 x float>"))
        elif kind in ("f16", "bf16"):
            found += [widen(g, half, kind) for half in split(g, g.read(register, "b32", vector=True))]
        else:
            word = g.read(register, "b32", vector=True)
            for n in range(4):
                up = g.binary("shl", "<32 x i32>", word, g.splat32(24 - 8 * n))
                found.append(g.binary("ashr" if kind == "s8" else "lshr", "<32 x i32>", up, g.splat32(24)))
    assert len(found) == count, f"{len(found)} elements, {count} expected"
    return found


def _accumulators(g: Codegen, registers: Sequence[Operand], kind: str, count: int) -> list[str]:
    if kind == "f16":
        halves = [half for r in registers for half in split(g, g.read(r, "b32", vector=True))]
        found = [widen(g, half, "f16") for half in halves]
    else:
        found = [g.read(r, kind, vector=True) for r in registers]
    assert len(found) == count, f"{len(found)} accumulators, {count} expected"
    return found


def _pick(
    g: Codegen, operand: str, values: Sequence[str], wanted: tuple[tuple[int, int], ...], ty: str,
    done: dict[tuple[str, tuple[tuple[int, int], ...]], str],
) -> str:  # fmt: skip
    """The vector whose lane i is element e of lane l, for (l, e) = wanted[i]."""
    key = (operand, wanted)
    if key not in done:
        vector = g.llvm(ty, True)
        (element,) = {e for _, e in wanted}
        order = g.constant_vector("i32", [lane for lane, _ in wanted])
        done[key] = g.emit(f"shufflevector {vector} {values[element]}, {vector} poison, {order}")
    return done[key]


def _saturated(g: Codegen, value: str) -> str:
    ty = "<32 x i64>"
    for name, limit in (("llvm.smax", -(1 << 31)), ("llvm.smin", (1 << 31) - 1)):
        full = g.declare(f"{name}.v32i64", ty, f"{ty}, {ty}")
        value = g.emit(f"call {ty} @{full}({ty} {value}, {ty} splat (i64 {limit}))")
    return g.emit(f"trunc {ty} {value} to <32 x i32>")


def _write(g: Codegen, registers: Sequence[Operand], values: Sequence[str], kind: str) -> None:
    if kind == "f16":
        halves = [narrow(g, v, "f16") for v in values]
        for n, register in enumerate(registers):
            g.write(register, pack(g, halves[2 * n], halves[2 * n + 1]), "b32", vector=True)
        return
    for register, value in zip(registers, values, strict=True):
        g.write(register, value, kind, vector=True)


# -- matrices in shared memory ----------------------------------------------------------------------------------------
def _spread(g: Codegen, addresses: str, lanes: Sequence[int], offsets: Sequence[int]) -> str:
    """addresses[lanes[i]] + offsets[i]"""
    order = g.constant_vector("i32", lanes)
    rows = g.emit(f"shufflevector <32 x i64> {addresses}, <32 x i64> poison, {order}")
    return g.binary("add", "<32 x i64>", rows, g.vector_text("i64", offsets))


def _places(j: int, trans: bool) -> list[tuple[list[int], list[int]]]:
    """(row address lane, byte offset) over the lanes for register j; with .trans two of them, for its two halves."""
    if not trans:
        return [([8 * j + lane // 4 for lane in LANE], [lane % 4 * 4 for lane in LANE])]
    return [([8 * j + lane % 4 * 2 + h for lane in LANE], [lane // 4 * 2 for lane in LANE]) for h in (0, 1)]


def _read(g: Codegen, a: Access, places: str) -> str:
    mask = g.mask
    if g.checks is Checks.SANITIZER:
        g.watch(a, places, sanitizer.READ)
    value = g.out_of_line_load(a, places)
    g.mask = mask
    return value


def _write_at(g: Codegen, a: Access, places: str, value: str) -> None:
    mask = g.mask
    if g.checks is Checks.SANITIZER:
        g.watch(a, places, sanitizer.WRITE)
    g.out_of_line_store(a, places, value)
    g.mask = mask


MATRIX = "sync aligned m8n8 x1 x2 x4 trans shared shared::cta"


@rule("ldmatrix", "b16", MATRIX)
def ldmatrix(g: Codegen, ins: Instruction) -> None:
    source = ins.operands[1]
    assert isinstance(source, Mem)
    g.vector, trans = True, "trans" in ins.parts
    addresses = g.address_vector(source, "shared")
    g.require_alignment(ins, "shared", addresses, 16, 8 * len(_items(ins.operands[0])))
    for j, register in enumerate(_items(ins.operands[0])):
        a = Access(ins, "shared", "b16" if trans else "b32", (register,), VARYING)
        values = [_read(g, a, _spread(g, addresses, *place)) for place in _places(j, trans)]
        g.write(register, pack(g, values[0], values[1]) if trans else values[0], "b32", vector=True)


@rule("stmatrix", "b16", MATRIX)
def stmatrix(g: Codegen, ins: Instruction) -> None:
    target = ins.operands[0]
    assert isinstance(target, Mem)
    g.vector, trans = True, "trans" in ins.parts
    addresses = g.address_vector(target, "shared")
    g.require_alignment(ins, "shared", addresses, 16, 8 * len(_items(ins.operands[1])))
    for j, register in enumerate(_items(ins.operands[1])):
        word = g.read(register, "b32", vector=True)
        values = split(g, word) if trans else (word,)
        a = Access(ins, "shared", "b16" if trans else "b32", (register,), VARYING)
        for value, place in zip(values, _places(j, trans), strict=True):
            _write_at(g, a, _spread(g, addresses, *place), value)


@rule("movmatrix", "b16", "sync aligned m8n8 trans")
def movmatrix(g: Codegen, ins: Instruction) -> None:
    """Lane i holds elements (i / 4, 2 * (i % 4)) and the next; afterwards those of the transposed matrix."""
    g.vector = True
    halves = split(g, g.read(ins.operands[1], "b32", vector=True))
    found = []
    for h in (0, 1):
        # Element (row, column) of the result is (column, row) of the source.
        order = g.constant_vector("i32", [(lane % 4 * 2 + h) * 4 + lane // 4 // 2 for lane in LANE])
        low, high = (g.emit(f"shufflevector <32 x i16> {v}, <32 x i16> poison, {order}") for v in halves)
        odd = g.vector_text("i1", [lane // 4 % 2 for lane in LANE])
        found.append(g.emit(f"select <32 x i1> {odd}, <32 x i16> {high}, <32 x i16> {low}"))
    g.write(ins.operands[0], pack(g, found[0], found[1]), "b32", vector=True)
