"""ldmatrix, stmatrix and movmatrix: matrices of 8 x 8 between shared memory and the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cudaops.emulator import sanitizer
from cudaops.emulator.isa.half import pack, split
from cudaops.emulator.isa.memory import Access
from cudaops.emulator.isa.mma import items_of
from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import LANE, VARYING, WARP
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Imm, Instruction, Mem, Operand

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


# -- asynchronous copies ----------------------------------------------------------------------------------------------
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


def _copy16(g: Codegen, ins: Instruction, target: Mem, to: str, source: Mem, origin: str) -> None:
    g.out_of_line_wide(Quad(ins, "global", "b32", (source,), VARYING), origin)
    g.out_of_line_wide_store(Quad(ins, "shared", "b32", (target,), VARYING), to)


@rule(
    "cp", "", "async ca cg shared shared::cta global commit_group wait_group wait_all L2::64B L2::128B L2::256B "
    "L2::cache_hint",
)  # fmt: skip
def cp_async(g: Codegen, ins: Instruction) -> None:
    """Global to shared memory. The copy is made at once; bytes past src-size are zeros and are not read."""
    if any(part in ins.parts for part in ("commit_group", "wait_group", "wait_all")):
        return
    target, source, size = ins.operands[:3]
    assert isinstance(target, Mem)
    assert isinstance(source, Mem)
    assert isinstance(size, Imm)
    g.vector = True
    more = ins.operands[3 : -1 if "L2::cache_hint" in ins.parts else None]  # the cache policy says nothing here
    count = g.read(more[0], "b32", vector=True) if more else None
    to, origin = g.address_vector(target, "shared"), g.address_vector(source, "global")
    g.require_alignment(ins, "shared", to, size.value, 32)
    g.require_alignment(ins, "global", origin, size.value, 32)
    if size.value == 16 and count is None and g.checks is not Checks.SANITIZER:
        _copy16(g, ins, target, to, source, origin)
        return
    mask = g.mask
    for n in range(size.value // 4):
        step = g.vector_text("i64", [4 * n] * 32)
        g.mask = mask
        if count is not None:
            some = g.emit(f"icmp ugt <32 x i32> {count}, {g.splat32(4 * n)}")
            g.mask = some if mask is None else g.binary("and", "<32 x i1>", mask, some)
        read = Access(ins, "global", "b32", (source,), VARYING)
        value = _read(g, read, g.binary("add", "<32 x i64>", origin, step))
        if count is not None:  # the bytes of this word that are inside src-size
            left = g.binary("sub", "<32 x i32>", count, g.splat32(4 * n))
            full = g.emit(f"icmp sge <32 x i32> {left}, {g.splat32(4)}")
            bits = g.binary("shl", "<32 x i32>", g.binary("and", "<32 x i32>", left, g.splat32(3)), g.splat32(3))
            low = g.binary("sub", "<32 x i32>", g.binary("shl", "<32 x i32>", g.splat32(1), bits), g.splat32(1))
            keep = g.emit(f"select <32 x i1> {full}, <32 x i32> {g.splat32(-1)}, <32 x i32> {low}")
            value = g.binary("and", "<32 x i32>", value, keep)
        g.mask = mask
        written = Access(ins, "shared", "b32", (target,), VARYING)
        _write_at(g, written, g.binary("add", "<32 x i64>", to, step), value)
