"""ldmatrix, stmatrix and movmatrix: matrices of 8 x 8 between shared memory and the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cudaops.emulator import sanitizer
from cudaops.emulator.isa.half import pack, split
from cudaops.emulator.isa.memory import Access
from cudaops.emulator.isa.mma import items_of
from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import LANE, WARP
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Instruction, Mem, Operand

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen


class Quad(Access):
    """16 bytes of each lane."""

    @property
    def total(self) -> int:
        return 16


class Rows(Quad):
    """What ldmatrix and stmatrix touch: each of the first lanes gives the address of a row of 16 bytes."""

    @property
    def count(self) -> int:
        """How many rows."""
        return 8 * len(self.items)


# A matrix in a register's lanes is its 8 rows of 8 elements one behind the other: element 2 * lane + half. With .trans
# it is the transposed one.
TRANSPOSED = [element % 8 * 8 + element // 8 for element in range(64)]


def transposed(g: Codegen, word: str) -> str:
    halves = "<64 x i16>"
    value = g.emit(f"bitcast <32 x i32> {word} to {halves}")
    turned = g.emit(f"shufflevector {halves} {value}, {halves} poison, {g.constant_vector('i32', TRANSPOSED)}")
    return g.emit(f"bitcast {halves} {turned} to <32 x i32>")


def _rows(g: Codegen, ins: Instruction, address: Mem, registers: Operand) -> Rows:
    a = Rows(ins, "shared", "b32", items_of(registers), g.analysis.addresses[id(ins)][0])
    g.vector = True
    if g.checks is Checks.SANITIZER:
        g.require_alignment(ins, "shared", g.address_vector(address, "shared"), 16, a.count)
    return a


def _for_the_rows(g: Codegen, a: Rows, act: Callable[[], None]) -> None:
    """`act` under the mask of the lanes whose addresses count."""
    mask = g.mask
    if a.count < WARP:
        some = g.constant_vector("i1", [int(lane < a.count) for lane in LANE])
        g.mask = g.emit(f"and {some}, {g.mask_or_full().removeprefix('<32 x i1> ')}")
    act()
    g.mask = mask


def _affine_rows(a: Rows) -> Sequence[int] | None:
    """Where the rows lie from the lowest one, if that is known."""
    offsets = a.address.offsets
    if offsets is None or a.address.uniform:  # of one address for all there is no use
        return None
    return [offset - min(offsets[: a.count]) for offset in offsets[: a.count]]


MATRIX = "sync aligned m8n8 x1 x2 x4 trans shared shared::cta"


@rule("ldmatrix", "b16", MATRIX)
def ldmatrix(g: Codegen, ins: Instruction) -> None:
    source = ins.operands[1]
    assert isinstance(source, Mem)
    a = _rows(g, ins, source, ins.operands[0])
    steps = _affine_rows(a)
    if steps is None or g.mask is not None or g.checks is Checks.SANITIZER:
        found = load_rows(g, a, g.address_vector(source, "shared"))
    else:
        address, low = g.address_scalar(source, "shared"), min((a.address.offsets or ())[: a.count])
        found = g.checked(
            a, address, max(steps) + 16, low, lambda: _load_rows_at(g, a, g.pointer(address, low), steps),
            lambda: load_rows(g, a, g.address_vector(source, "shared")),
        )  # fmt: skip
    for register, value in zip(a.items, found, strict=True):
        g.write(register, transposed(g, value) if "trans" in ins.parts else value, "b32", vector=True)


def load_rows(g: Codegen, a: Rows, places: str) -> list[str]:
    def load() -> None:
        if g.checks is Checks.SANITIZER:
            g.watch(a, places, sanitizer.READ)
        g.out_of_line_wide(a, places)

    _for_the_rows(g, a, load)
    pointers = [g.emit(f"getelementptr i8, ptr %wide, i64 {128 * j}") for j in range(len(a.items))]
    return [g.emit(f"load <32 x i32>, ptr {pointer}, align 64") for pointer in pointers]


def _load_rows_at(g: Codegen, a: Rows, start: str, steps: Sequence[int]) -> list[str]:
    pointers = [g.emit(f"getelementptr i8, ptr {start}, i64 {step}") for step in steps]
    parts = [g.emit(f"load <4 x i32>, ptr {pointer}, align 1") for pointer in pointers]
    return [joined(g, "i32", 4, parts[8 * j : 8 * j + 8]) for j in range(len(a.items))]


def joined(g: Codegen, element: str, width: int, parts: Sequence[str]) -> str:
    """Vectors of `width` elements one behind the other; as many as a power of two."""
    while len(parts) > 1:
        ty, order = f"<{width} x {element}>", g.constant_vector("i32", range(2 * width))
        parts = [
            g.emit(f"shufflevector {ty} {x}, {ty} {y}, {order}") for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
        width *= 2
    return parts[0]


@rule("stmatrix", "b16", MATRIX)
def stmatrix(g: Codegen, ins: Instruction) -> None:
    target = ins.operands[0]
    assert isinstance(target, Mem)
    a = _rows(g, ins, target, ins.operands[1])
    values = [g.read(register, "b32", vector=True) for register in a.items]
    if "trans" in ins.parts:
        values = [transposed(g, value) for value in values]
    for j, value in enumerate(values):
        g.line(f"store <32 x i32> {value}, ptr {g.emit(f'getelementptr i8, ptr %wide, i64 {128 * j}')}, align 64")
    places = g.address_vector(target, "shared")

    def store() -> None:
        if g.checks is Checks.SANITIZER:
            g.watch(a, places, sanitizer.WRITE)
        g.out_of_line_wide_store(a, places)

    _for_the_rows(g, a, store)


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
