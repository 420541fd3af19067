"""mma.sync: D = A B + C on matrices spread over the lanes of a warp.

Of an accumulator register, four neighbouring lanes (a quad) hold columns of one row, so that a step along k multiplies
an element of A that is the same for the four lanes of a quad by four elements of B that are the same for all eight
quads. Both operands are first spread out in memory in that form, which several instructions then share (a warp's tile
uses each fragment of A for every column of fragments of B), and a step is loads and multiply-adds only. The arithmetic
is a function of its own, so that a tile of 64 instructions is not 64 copies of it.

Accumulation is in f32 (f64, i32), k ascending; hardware keeps more bits and another order, so that only integer and
f64 results are defined to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudaops.emulator import native
from cudaops.emulator.isa.half import narrow, pack, split, widen
from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import LANE, WARP
from cudaops.emulator.ptx import Instruction, Operand, Vec
from cudaops.emulator.text import Text

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


# -- what is calculated with ------------------------------------------------------------------------------------------
# A register of an operand is `inner` vectors of what a step takes: one element, or two neighbours of 16 bits in 32.
ELEMENT = {"f16": "float", "bf16": "float", "tf32": "float", "f64": "double", "s8": "i32", "u8": "i32"}
INNER = {"f16": 2, "bf16": 2, "tf32": 1, "f64": 1, "s8": 2, "u8": 2}
SLOTS = {"a": 4, "b": 16}  # operands that are kept spread out; more would not stay in the first cache
# Lanes of B's registers in the order in which they are spread: k ascending, in it even columns before odd ones.
B_ORDER = [4 * n + k for k in range(4) for n in (0, 2, 4, 6, 1, 3, 5, 7)]


def _expand(t: Text, register: str, kind: str) -> list[str]:
    """The vectors of what a step takes, from a register's; `register` is <32 x i32> or <32 x double>."""
    word = "<32 x i32>"
    if kind == "f64":
        return [register]
    if kind == "tf32":  # the top 19 bits count
        return [t.emit(f"bitcast {word} {t.binary('and', word, register, 'splat (i32 -8192)')} to <32 x float>")]
    if kind == "bf16":
        low = t.binary("shl", word, register, "splat (i32 16)")
        high = t.binary("and", word, register, "splat (i32 -65536)")
        return [t.emit(f"bitcast {word} {v} to <32 x float>") for v in (low, high)]
    if kind == "f16":
        high = t.binary("lshr", word, register, "splat (i32 16)")
        found = []
        for value in (register, high):
            half = t.emit(f"bitcast <32 x i16> {t.emit(f'trunc {word} {value} to <32 x i16>')} to <32 x half>")
            found.append(t.emit(f"fpext <32 x half> {half} to <32 x float>"))
        return found
    # bytes 0 and 2, and bytes 1 and 3, as two numbers of 16 bits
    shift, pairs = "ashr" if kind == "s8" else "lshr", "<64 x i16>"
    raw = t.emit(f"bitcast {word} {register} to {pairs}")
    up = t.binary("shl", pairs, raw, "splat (i16 8)")
    return [t.emit(f"bitcast {pairs} {t.binary(shift, pairs, v, 'splat (i16 8)')} to {word}") for v in (up, raw)]


def _bytes(kind: str) -> int:
    return 8 if kind == "f64" else 4


def _vector(order: Sequence[int]) -> str:
    return f"<{len(order)} x i32> <{', '.join(f'i32 {n}' for n in order)}>"


def _convention() -> str:
    """Sums pass in registers, where there are more than these take."""
    return "x86_regcallcc" if native.vector_extension() == "AVX-512" else "ccc"


def _function(name: str, result: str, parameters: str, body: Text) -> str:
    return "\n".join([f"define internal {_convention()} {result} @{name}({parameters}) #0 {{", *body.lines, "}"])


def _spread_a(name: str, kind: str, registers: int, down: int) -> str:
    """name(out, registers): for every step and group of 8 rows, 32 lanes: the quad's element in each of its lanes."""
    t, element = Text(), ELEMENT[kind]
    held, size = ("double" if kind == "f64" else "i32"), _bytes(kind)
    ty = f"<32 x {element}>"
    place = 0
    for first in range(0, registers, down):
        expanded = [_expand(t, f"%r{first + d}", kind) for d in range(down)]
        for inner in range(INNER[kind]):
            for quad in range(4):
                for d in range(down):
                    order = _vector([lane // 4 * 4 + quad for lane in LANE])
                    value = t.emit(f"shufflevector {ty} {expanded[d][inner]}, {ty} poison, {order}")
                    at = t.emit(f"getelementptr i8, ptr %out, i64 {place}")
                    t.line(f"store {ty} {value}, ptr {at}, align 64")
                    place += WARP * size
    t.line("ret void")
    parameters = ", ".join(f"<32 x {held}> %r{n}" for n in range(registers))
    return _function(name, "void", f"ptr %out, {parameters}", t)


def _spread_b(name: str, kind: str, registers: int) -> str:
    """name(out, registers): for every step, the four even columns and the four odd ones."""
    t = Text()
    held, size = ("double" if kind == "f64" else "i32"), _bytes(kind)
    ty = f"<32 x {held}>"
    place = 0
    for r in range(registers):
        turned = t.emit(f"shufflevector {ty} %r{r}, {ty} poison, {_vector(B_ORDER)}")
        for value in _expand(t, turned, kind):
            at = t.emit(f"getelementptr i8, ptr %out, i64 {place}")
            t.line(f"store <32 x {ELEMENT[kind]}> {value}, ptr {at}, align 64")
            place += WARP * size
    t.line("ret void")
    parameters = ", ".join(f"<32 x {held}> %r{n}" for n in range(registers))
    return _function(name, "void", f"ptr %out, {parameters}", t)


def _steps(kind: str, registers: int) -> list[int]:
    """Where the steps lie in a spread operand, in the order of k."""
    inner = INNER[kind]
    return [(r * inner + i) * 4 + quad for r in range(registers) for quad in range(4) for i in range(inner)]


def _multiply(name: str, kind: str, registers: int, down: int) -> str:
    """name(sums, a, b) -> sums, of operands that are spread out."""
    t, element = Text(), ELEMENT[kind]
    size, ty = _bytes(kind), f"<32 x {element}>"
    sums = [f"%c{n}" for n in range(2 * down)]
    together = down if native.vector_extension() == "AVX-512" else 1  # groups of 8 rows whose sums fit the registers
    for first in range(0, down, together):
        for step in _steps(kind, registers):
            b = []
            for odd in (0, 1):
                at = t.emit(f"getelementptr i8, ptr %b, i64 {(step * 8 + odd * 4) * size}")
                four = t.emit(f"load <4 x {element}>, ptr {at}, align 16")
                order = _vector([lane % 4 for lane in LANE])
                b.append(t.emit(f"shufflevector <4 x {element}> {four}, <4 x {element}> poison, {order}"))
            for d in range(first, first + together):
                at = t.emit(f"getelementptr i8, ptr %a, i64 {(step * down + d) * WARP * size}")
                a = t.emit(f"load {ty}, ptr {at}, align 64")
                for odd in (0, 1):
                    n = 2 * d + odd
                    if element == "i32":
                        sums[n] = t.binary("add", ty, sums[n], _pairs(t, a, b[odd]))
                    else:
                        suffix = "v32f32" if element == "float" else "v32f64"
                        sums[n] = t.emit(f"call {ty} @llvm.fma.{suffix}({ty} {a}, {ty} {b[odd]}, {ty} {sums[n]})")
    found = "poison"
    many = "{ " + ", ".join([ty] * len(sums)) + " }"
    for n, value in enumerate(sums):
        found = t.emit(f"insertvalue {many} {found}, {ty} {value}, {n}")
    t.line(f"ret {many} {found}")
    parameters = ", ".join(f"{ty} %c{n}" for n in range(len(sums)))
    return _function(name, many, f"{parameters}, ptr %a, ptr %b", t)


PAIRS = {"AVX-512": ("llvm.x86.avx512.pmaddw.d.512", 16), "AVX2": ("llvm.x86.avx2.pmadd.wd", 8)}


def _pairs(t: Text, a: str, b: str) -> str:
    """The sum of the products of two numbers of 16 bits, in 32 lanes; it always fits."""
    name, width = PAIRS.get(native.vector_extension(), ("llvm.x86.sse2.pmadd.wd", 4))
    parts = []
    for first in range(0, WARP, width):
        order = _vector(range(first, first + width))
        halves = [t.emit(f"shufflevector <32 x i32> {v}, <32 x i32> poison, {order}") for v in (a, b)]
        short = [t.emit(f"bitcast <{width} x i32> {v} to <{2 * width} x i16>") for v in halves]
        ty = f"<{2 * width} x i16>"
        parts.append(t.emit(f"call <{width} x i32> @{name}({ty} {short[0]}, {ty} {short[1]})"))
    while len(parts) > 1:
        order = _vector(range(2 * width))
        ty = f"<{width} x i32>"
        parts = [
            t.emit(f"shufflevector {ty} {x}, {ty} {y}, {order}") for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
        width *= 2
    return parts[0]


def _spread(g: Codegen, operand: str, kind: str, values: Sequence[str], down: int) -> str:
    """Where an operand of these registers lies spread out."""
    lanes = WARP * down if operand == "a" else 8
    size = len(values) // down * 4 * INNER[kind] * lanes * _bytes(kind)
    family = f"mma.{operand}.{size}"
    key = (kind, *values)
    slot = g.spread.find(g.block, family, key)
    if slot is not None:
        return slot
    slot, fresh = g.spread.take(family, key, SLOTS[operand])
    line = f"  {slot} = alloca [{size} x i8], align 64"
    if fresh and line not in g.allocas:
        g.allocas.append(line)
    name = f"mma.spread.{operand}.{kind}.{len(values)}.{down}"
    if name not in g.helpers:
        make = _spread_a(name, kind, len(values), down) if operand == "a" else _spread_b(name, kind, len(values))
        g.helpers[name] = make
    ty = "<32 x double>" if kind == "f64" else "<32 x i32>"
    g.line(f"call {_convention()} void @{name}(ptr {slot}, {', '.join(f'{ty} {v}' for v in values)})")
    return slot


def product(
    g: Codegen, kinds: tuple[str, str], m: int, a: Sequence[str], b: Sequence[str], c: Sequence[str]
) -> list[str]:
    """A B + C of one mma.sync from the values of its registers; C in f32, f64 or i32 (which wraps)."""
    down = max(m // 8, 1)
    kind, ty = kinds[0], f"<32 x {ELEMENT[kinds[0]]}>"
    at_a, at_b = _spread(g, "a", kinds[0], a, down), _spread(g, "b", kinds[1], b, 1)
    name = f"mma.{ELEMENT[kind]}.{INNER[kind]}.{len(b)}.{down}"
    if name not in g.helpers:
        g.helpers[name] = _multiply(name, kind, len(b), down)
        if ELEMENT[kind] == "i32":
            intrinsic, width = PAIRS.get(native.vector_extension(), ("llvm.x86.sse2.pmadd.wd", 4))
            g.declare(intrinsic, f"<{width} x i32>", ", ".join([f"<{2 * width} x i16>"] * 2))
        else:
            g.declare(f"llvm.fma.{'v32f32' if ELEMENT[kind] == 'float' else 'v32f64'}", ty, f"{ty}, {ty}, {ty}")
    many = "{ " + ", ".join([ty] * len(c)) + " }"
    given = ", ".join(f"{ty} {v}" for v in c)
    found = g.emit(f"call {_convention()} {many} @{name}({given}, ptr {at_a}, ptr {at_b})")
    return [g.emit(f"extractvalue {many} {found}, {n}") for n in range(len(c))]


def saturated_product(
    g: Codegen, kinds: tuple[str, str], m: int, a: Sequence[str], b: Sequence[str], c: Sequence[str]
) -> list[str]:  # fmt: skip
    """The same of integers, held at the ends of the range: A B alone always fits."""
    sums = product(g, kinds, m, a, b, ["zeroinitializer"] * len(c))
    return [g.call("llvm.sadd.sat", "s32", x, y) for x, y in zip(sums, c, strict=True)]


@rule(
    "mma", "f16 bf16 tf32 f64 s8 u8 f32 s32",
    "sync aligned row col satfinite m8n8k4 m8n8k16 m16n8k4 m16n8k8 m16n8k16 m16n8k32",
)  # fmt: skip
def mma(g: Codegen, ins: Instruction) -> None:
    shape = next(p for p in ins.parts if p.startswith("m") and p[1].isdigit())
    out, kind_a, kind_b, into = ins.parts[-4:]
    if shape not in SHAPES[kind_a] or "row" not in ins.parts or "col" not in ins.parts:
        g.unsupported(ins, f"mma of {shape} and {kind_a} in this form")
    layouts = fragment_layouts(shape, kind_a)
    g.vector = True
    a, b = (
        [g.read(r, "f64" if kind_a == "f64" else "b32", vector=True) for r in items_of(ins.operands[n])] for n in (1, 2)
    )
    for have, layout in zip((a, b), layouts, strict=False):
        if len(have) * max(32 // BITS[kind_a], 1) != layout.elements:
            g.unsupported(ins, f"{len(have)} registers for an operand of {layout.elements} elements")
    m = int(shape[1 : shape.index("n")])
    c = accumulators_of(g, items_of(ins.operands[3]), into)
    if len(c) != layouts[2].elements:
        g.unsupported(ins, f"{len(c)} accumulators of {layouts[2].elements}")
    multiply = saturated_product if "satfinite" in ins.parts else product
    sums = multiply(g, (kind_a, kind_b), m, a, b, c)
    write_accumulators(g, items_of(ins.operands[0]), sums, out)


def items_of(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def accumulators_of(g: Codegen, registers: Sequence[Operand], kind: str) -> list[str]:
    if kind == "f16":
        halves = [half for r in registers for half in split(g, g.read(r, "b32", vector=True))]
        return [widen(g, half, "f16") for half in halves]
    return [g.read(r, kind, vector=True) for r in registers]


def write_accumulators(g: Codegen, registers: Sequence[Operand], values: Sequence[str], kind: str) -> None:
    if kind == "f16":
        halves = [narrow(g, v, "f16") for v in values]
        for n, register in enumerate(registers):
            g.write(register, pack(g, halves[2 * n], halves[2 * n + 1]), "b32", vector=True)
        return
    for register, value in zip(registers, values, strict=True):
        g.write(register, value, kind, vector=True)
