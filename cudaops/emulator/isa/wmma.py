"""wmma.load, wmma.store and wmma.mma, as nvcuda::wmma of mma.h makes them.

The PTX ISA leaves open where the elements of a fragment are. Here a fragment is the operands of the mma.sync that the
product is made of, one behind the other: 16 (or 8) rows of A, 8 columns of B, and a tile of the result for each pair of
them. Every register element is an element of the matrix; the 8 registers that f16 operands always have hold copies
where the matrix needs fewer. 4-bit and 1-bit operands are not emulated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cudaops.emulator import sanitizer
from cudaops.emulator.isa.half import split
from cudaops.emulator.isa.memory import Access, interleave
from cudaops.emulator.isa.mma import (
    BITS,
    accumulator_layout,
    accumulators_of,
    items_of,
    operand_layout,
    product,
    saturated_product,
    write_accumulators,
)
from cudaops.emulator.isa.table import rule
from cudaops.emulator.isa.tensor import Rows, load_rows, transposed
from cudaops.emulator.lanes import LANE, VARYING
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import TYPE_BITS, Instruction, Mem, Operand

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), ("m16n16k16", "m32n8k16", "m8n32k16")),
    "tf32": ("m16n16k8",), "f64": ("m8n8k4",),
}  # fmt: skip
ACCUMULATORS = {
    **dict.fromkeys(("f32", "s32", "f16"), ("m16n16k16", "m32n8k16", "m8n32k16")),
    "f32": ("m16n16k16", "m32n8k16", "m8n32k16", "m16n16k8"), "f64": ("m8n8k4",),
}  # fmt: skip
F16_REGISTERS = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Fragment:
    """One operand of a product: tiles one behind the other, each with the layout that mma.sync wants."""

    operand: str  # a, b, c (d too)
    m: int
    n: int
    k: int
    kind: str

    @classmethod
    def of(cls, operand: str, shape: str, kind: str) -> Fragment:
        m, rest = shape[1:].split("n")
        n, k = rest.split("k")
        return cls(operand, int(m), int(n), int(k), kind)

    @property
    def bits(self) -> int:
        return BITS.get(self.kind) or TYPE_BITS[self.kind]

    @property
    def per_register(self) -> int:
        return max(32 // self.bits, 1)

    @property
    def rows(self) -> int:
        """Of A in one mma.sync."""
        return min(self.m, 16)

    @property
    def tiles(self) -> int:
        return {"a": self.m // self.rows, "b": self.n // 8}.get(self.operand, self.m // self.rows * (self.n // 8))

    @property
    def tile_elements(self) -> int:
        """Of a lane."""
        return {"a": self.rows * self.k, "b": 8 * self.k}.get(self.operand, self.rows * 8) // 32

    @property
    def registers(self) -> int:
        """That differ from each other."""
        return self.tiles * self.tile_elements // self.per_register

    @property
    def copies(self) -> int:
        """How often they are there."""
        return F16_REGISTERS // self.registers if self.kind == "f16" and self.operand in "ab" else 1

    def place(self, lane: int, element: int) -> tuple[int, int]:
        """(row, column) of an element in its matrix, which is m x k, k x n or m x n."""
        tile, inner = divmod(element, self.tile_elements)
        if self.operand == "a":
            row, column = operand_layout(self.rows, self.k, self.per_register).place(lane, inner)
            return row + tile * self.rows, column
        if self.operand == "b":
            column, row = operand_layout(8, self.k, self.per_register).place(lane, inner)
            return row, column + 8 * tile
        row, column = accumulator_layout(self.rows).place(lane, inner)
        across = self.n // 8
        return row + tile // across * self.rows, column + tile % across * 8

    def neighbours(self, order: str) -> bool:
        """Whether elements 2 i and 2 i + 1, where they are neighbours in the matrix, are so in memory."""
        return (order == "col") == (self.operand == "b")

    def leading(self, order: str) -> int:
        """The stride where none is given: the length of a row (of a column) in elements."""
        rows, columns = {"a": (self.m, self.k), "b": (self.k, self.n)}.get(self.operand, (self.m, self.n))
        return columns if order == "row" else rows


@dataclass(frozen=True)
class Memory:
    """A matrix in memory: where it begins in each lane, and the bytes from one row (column) to the next."""

    fragment: Fragment
    order: str
    start: str
    stride: str

    def places(self, g: Codegen, where: Sequence[tuple[int, int]]) -> str:
        """Addresses of the elements (row, column) over the lanes."""
        size, ty = self.fragment.bits // 8, "<32 x i64>"
        steps = [row if self.order == "row" else column for row, column in where]
        inside = [size * (column if self.order == "row" else row) for row, column in where]
        along = g.binary("mul", ty, self.stride, g.vector_text("i64", steps))
        return g.binary("add", ty, g.binary("add", ty, self.start, along), g.vector_text("i64", inside))


def _memory(g: Codegen, ins: Instruction, address: Operand, stride: Sequence[Operand]) -> tuple[Memory, str]:
    """(the matrix that an instruction loads or stores, its state space)"""
    assert isinstance(address, Mem)
    shape = next(p for p in ins.parts if p[0] == "m" and p[1].isdigit())
    operand, order = ins.parts[2], next((p for p in ins.parts if p in ("row", "col")), "")
    fragment = Fragment.of(operand, shape, ins.type)
    if shape not in (SHAPES if operand in "ab" else ACCUMULATORS).get(ins.type, ()) or not order:
        g.unsupported(ins, f"a matrix {operand} of {shape} and {ins.type}")
    space = next((p.split("::")[0] for p in ins.parts if p.split("::")[0] in ("global", "shared")), "generic")
    g.vector = True
    step = g.splat("i64", fragment.leading(order) * fragment.bits // 8)
    if stride:
        wide = g.resize(g.read(stride[0], "u32", vector=True), "u32", "u64")
        step = g.binary("mul", "<32 x i64>", wide, g.splat("i64", fragment.bits // 8))
    return Memory(fragment, order, g.address_vector(address, space), step), space


WHERE = "sync aligned row col global shared shared::cta m16n16k16 m32n8k16 m8n32k16 m16n16k8 m8n8k4"


@rule("wmma", "f16 bf16 tf32 f64 s8 u8 f32 s32", f"a b c {WHERE}", needs="load")
def load(g: Codegen, ins: Instruction) -> None:
    registers = items_of(ins.operands[0])
    matrix, space = _memory(g, ins, ins.operands[1], ins.operands[2:])
    fragment = matrix.fragment
    check_count(g, ins, registers, fragment)
    different = registers[: fragment.registers]
    in_rows = fragment.operand in "ab" and fragment.bits < 64
    if in_rows and (fragment.neighbours(matrix.order) or fragment.bits == 16):
        values = _load_rows(g, ins, matrix, space, different)
    elif fragment.bits < 32:
        values = [_load_packed(g, ins, matrix, space, r, n) for n, r in enumerate(different)]
    else:
        values = _load_whole(g, ins, matrix, space, different)
    for n, register in enumerate(registers):
        g.write(register, values[n % len(different)], _held(fragment), vector=True)


def check_count(g: Codegen, ins: Instruction, registers: Sequence[Operand], fragment: Fragment) -> None:
    wanted = fragment.registers * fragment.copies
    if len(registers) != wanted:
        g.unsupported(ins, f"{len(registers)} registers for a matrix {fragment.operand} that has {wanted}")


def _held(fragment: Fragment) -> str:
    return "b64" if fragment.bits == 64 else "b32"


def _watched(g: Codegen, a: Access, places: str, kind: int, act: Callable[[], T]) -> T:
    mask = g.mask
    if g.checks is Checks.SANITIZER:
        g.watch(a, places, kind)
    found = act()
    g.mask = mask
    return found


def _load_rows(g: Codegen, ins: Instruction, matrix: Memory, space: str, registers: Sequence[Operand]) -> list[str]:
    """As ldmatrix does it: of a register, 8 lanes give the addresses of 16 bytes each; or of those transposed."""
    fragment = matrix.fragment
    turned = not fragment.neighbours(matrix.order)
    values: list[str] = []
    for first in range(0, len(registers), 4):
        some = registers[first : first + 4]
        where = []
        for lane in LANE:
            element = (first + lane // 8 % len(some)) * fragment.per_register
            n = lane % 8
            where.append(fragment.place(n // 2, element + n % 2) if turned else fragment.place(4 * n, element))
        a = Rows(ins, space, "b32", tuple(some), VARYING)
        found = load_rows(g, a, matrix.places(g, where))
        values += [transposed(g, v) if turned else v for v in found]
    return values


def _load_packed(g: Codegen, ins: Instruction, matrix: Memory, space: str, register: Operand, n: int) -> str:
    """A register of several elements."""
    fragment, word = matrix.fragment, "<32 x i32>"
    elements = range(n * fragment.per_register, (n + 1) * fragment.per_register)
    if fragment.neighbours(matrix.order):
        a = Access(ins, space, "b32", (register,), VARYING)
        return _load_one(g, a, matrix, elements[0])
    a = Access(ins, space, f"b{fragment.bits}", (register,), VARYING)
    total = ""
    for place, element in enumerate(elements):
        value = g.emit(f"zext <32 x i{fragment.bits}> {_load_one(g, a, matrix, element)} to {word}")
        if place:
            value = g.binary("or", word, total, g.binary("shl", word, value, g.splat32(place * fragment.bits)))
        total = value
    return total


def _load_one(g: Codegen, a: Access, matrix: Memory, element: int) -> str:
    places = matrix.places(g, [matrix.fragment.place(lane, element) for lane in LANE])
    return _watched(g, a, places, sanitizer.READ, lambda: g.out_of_line_load(a, places))


def _load_whole(g: Codegen, ins: Instruction, matrix: Memory, space: str, registers: Sequence[Operand]) -> list[str]:
    """Registers of one element each, two at a time where they are neighbours."""
    fragment = matrix.fragment
    if fragment.operand != "c" or not fragment.neighbours(matrix.order):
        of_one = [Access(ins, space, _held(fragment), (r,), VARYING) for r in registers]
        return [_load_one(g, a, matrix, n) for n, a in enumerate(of_one)]
    values = []
    for n in range(0, len(registers), 2):
        a = Access(ins, space, _held(fragment), tuple(registers[n : n + 2]), VARYING)
        places = matrix.places(g, [fragment.place(lane, n) for lane in LANE])
        _watched(g, a, places, sanitizer.READ, functools.partial(g.out_of_line_wide, a, places))
        ty = f"<64 x i{fragment.bits}>"
        both = g.emit(f"load {ty}, ptr %wide, align 64")
        for odd in (0, 1):
            order = g.constant_vector("i32", [2 * lane + odd for lane in LANE])
            values.append(g.emit(f"shufflevector {ty} {both}, {ty} poison, {order}"))
    return values


@rule("wmma", "f16 f64 f32 s32", f"d {WHERE}", needs="store")
def store(g: Codegen, ins: Instruction) -> None:
    registers = items_of(ins.operands[1])
    matrix, space = _memory(g, ins, ins.operands[0], ins.operands[2:])
    fragment = matrix.fragment
    check_count(g, ins, registers, fragment)
    values = [g.read(r, _held(fragment), vector=True) for r in registers]
    together, bits = fragment.neighbours(matrix.order), fragment.bits
    for n, value in enumerate(values):
        if bits == 16 and together:
            _store_one(g, Access(ins, space, "b32", (registers[n],), VARYING), matrix, 2 * n, value)
        elif bits == 16:
            a = Access(ins, space, "b16", (registers[n],), VARYING)
            for inner, half in enumerate(split(g, value)):
                _store_one(g, a, matrix, 2 * n + inner, half)
        elif not together:
            _store_one(g, Access(ins, space, _held(fragment), (registers[n],), VARYING), matrix, n, value)
        elif n % 2 == 0:
            a = Access(ins, space, _held(fragment), tuple(registers[n : n + 2]), VARYING)
            both = interleave(g, f"i{bits}", values[n : n + 2])
            g.line(f"store <64 x i{bits}> {both}, ptr %wide, align 64")
            places = matrix.places(g, [fragment.place(lane, n) for lane in LANE])
            _watched(g, a, places, sanitizer.WRITE, functools.partial(g.out_of_line_wide_store, a, places))


def _store_one(g: Codegen, a: Access, matrix: Memory, element: int, value: str) -> None:
    places = matrix.places(g, [matrix.fragment.place(lane, element) for lane in LANE])
    _watched(g, a, places, sanitizer.WRITE, lambda: g.out_of_line_store(a, places, value))


@rule(
    "wmma", "f16 bf16 tf32 f64 s8 u8 f32 s32",
    "sync aligned row col rn satfinite m16n16k16 m32n8k16 m8n32k16 m16n16k8 m8n8k4", needs="mma",
)  # fmt: skip
def mma(g: Codegen, ins: Instruction) -> None:
    shape = next(p for p in ins.parts[2:] if p[0] == "m" and p[1].isdigit())
    types = [p for p in ins.parts[ins.parts.index(shape) + 1 :] if p not in ("satfinite", "rn")]
    if len(types) == 2:  # f16 operands go without saying
        types = [types[0], "f16", "f16", types[1]]
    out, kind_a, kind_b, into = types
    g.vector = True
    if shape not in SHAPES.get(kind_a, ()) or BITS.get(kind_b) != BITS[kind_a]:
        g.unsupported(ins, f"wmma of {shape} and {kind_a}")
    if "satfinite" in ins.parts and into != "s32":
        g.unsupported(ins, "satfinite of floating-point numbers")
    kinds = zip("dabc", (out, kind_a, kind_b, into), ins.operands, strict=True)
    registers = {operand: items_of(given) for operand, _, given in kinds}
    fragments = {
        operand: Fragment.of(operand, shape, kind)
        for operand, kind in (("d", out), ("a", kind_a), ("b", kind_b), ("c", into))
    }
    for operand, fragment in fragments.items():
        check_count(g, ins, registers[operand], fragment)
    values = {
        operand: [g.read(r, _held(fragments[operand]), vector=True) for r in registers[operand]] for operand in "ab"
    }
    if kind_a == "f64":
        values = {o: [g.emit(f"bitcast <32 x i64> {v} to <32 x double>") for v in given] for o, given in values.items()}
    c = accumulators_of(g, registers["c"], into)
    multiply = saturated_product if "satfinite" in ins.parts else product
    a, b = fragments["a"], fragments["b"]
    size_a, size_b = a.registers // a.tiles, b.registers // b.tiles
    size_c = fragments["c"].tile_elements
    found: list[str] = []
    for i in range(a.tiles):
        for j in range(b.tiles):
            rows, columns = values["a"][i * size_a : (i + 1) * size_a], values["b"][j * size_b : (j + 1) * size_b]
            some = c[len(found) : len(found) + size_c]
            found += multiply(g, (kind_a, kind_b), a.rows, rows, columns, some)
    write_accumulators(g, registers["d"], found, out)
