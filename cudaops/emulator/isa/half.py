"""f16 and bf16, one value or two packed in 32 bits.

Sums, products and quotients are worked out in f32, which is wide enough (24 >= 2 * 11 + 2 bits) that rounding twice is
rounding once. An fma is not: it is worked out in f64 and rounded to odd on the way, which keeps what the last rounding
needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cudaops.emulator.isa.convert import INTEGER_ROUNDING, to_integer
from cudaops.emulator.isa.floating import two_sum_error
from cudaops.emulator.isa.integer import COMPARE
from cudaops.emulator.isa.table import rule
from cudaops.emulator.ptx import Instruction, Pair

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

HALVES = "f16 bf16 f16x2 bf16x2"


def widen(g: Codegen, value: str, kind: str) -> str:
    """16 bits of an f16 or bf16 as f32: exact."""
    short, ty = g.vector_of("i16"), g.ty("f32")
    if kind == "bf16":
        up = g.emit(f"zext {short} {value} to {g.vector_of('i32')}")
        up = g.binary("shl", g.vector_of("i32"), up, g.splat("i32", 16))
        return g.emit(f"bitcast {g.vector_of('i32')} {up} to {ty}")
    half = g.emit(f"bitcast {short} {value} to {g.vector_of('half')}")
    return g.emit(f"fpext {g.vector_of('half')} {half} to {ty}")


def narrow(g: Codegen, value: str, kind: str) -> str:
    """An f32 rounded to nearest even as the 16 bits of an f16 or bf16; a NaN becomes 0x7FFF, as on the hardware."""
    short, ty, word = g.vector_of("i16"), g.ty("f32"), g.vector_of("i32")
    if kind == "f16":
        rounded = g.emit(f"fptrunc {ty} {value} to {g.vector_of('half')}")
        bits = g.emit(f"bitcast {g.vector_of('half')} {rounded} to {short}")
    else:  # LLVM would call a library for bfloat
        raw = g.emit(f"bitcast {ty} {value} to {word}")
        sixteen = g.splat("i32", 16)
        last = g.binary("and", word, g.binary("lshr", word, raw, sixteen), g.splat("i32", 1))
        up = g.binary("add", word, raw, g.binary("add", word, last, g.splat("i32", 0x7FFF)))
        bits = g.emit(f"trunc {word} {g.binary('lshr', word, up, sixteen)} to {short}")
    nan = g.emit(f"fcmp uno {ty} {value}, {value}")
    return g.emit(f"select {g.vector_of('i1')} {nan}, {short} {g.splat('i16', 0x7FFF)}, {short} {bits}")


def split(g: Codegen, value: str) -> tuple[str, str]:
    """The low and high 16 bits of a 32-bit value."""
    wide, short = g.vector_of("i32"), g.vector_of("i16")
    low = g.emit(f"trunc {wide} {value} to {short}")
    high = g.emit(f"trunc {wide} {g.binary('lshr', wide, value, g.splat('i32', 16))} to {short}")
    return low, high


def pack(g: Codegen, low: str, high: str) -> str:
    wide, short = g.vector_of("i32"), g.vector_of("i16")
    top = g.binary("shl", wide, g.emit(f"zext {short} {high} to {wide}"), g.splat("i32", 16))
    return g.binary("or", wide, top, g.emit(f"zext {short} {low} to {wide}"))


def each(g: Codegen, ins: Instruction, count: int, act: Callable[[Sequence[str], str], str]) -> None:
    """Apply `act` (16-bit values, 'f16' or 'bf16') to one value or to both of a packed pair, and write the result."""
    kind, packed = ins.type.removesuffix("x2"), ins.type.endswith("x2")
    values = [g.src(ins, n + 1, "b32" if packed else "b16") for n in range(count)]
    if not packed:
        g.result(ins, act(values, kind), "b16")
        return
    halves = [split(g, v) for v in values]
    g.result(ins, pack(g, act([h[0] for h in halves], kind), act([h[1] for h in halves], kind)), "b32")


def flushed(g: Codegen, ins: Instruction, bits: str, kind: str) -> str:
    """.ftz for f16: a subnormal becomes zero and keeps its sign."""
    if "ftz" not in ins.parts or kind != "f16":
        return bits
    short = g.vector_of("i16")
    exponent = g.binary("and", short, bits, g.splat("i16", 0x7C00))
    tiny = g.emit(f"icmp eq {short} {exponent}, {g.splat('i16', 0)}")
    sign = g.binary("and", short, bits, g.splat("i16", -0x8000))
    return g.emit(f"select {g.vector_of('i1')} {tiny}, {short} {sign}, {short} {bits}")


def clamped(g: Codegen, ins: Instruction, value: str) -> str:
    """.sat and .relu of an f32."""
    if "sat" in ins.parts:
        value = g.saturate(value, "f32")
    if "relu" in ins.parts:
        nan = g.emit(f"fcmp uno {g.ty('f32')} {value}, {value}")
        above = g.call("llvm.maximumnum", "f32", value, g.constant("f32", 0))
        value = g.emit(f"select {g.vector_of('i1')} {nan}, {g.ty('f32')} {value}, {g.ty('f32')} {above}")
    return value


def closing(g: Codegen, ins: Instruction, value: str, kind: str) -> str:
    """Saturate, clamp (.relu) and round an f32 result."""
    return flushed(g, ins, narrow(g, clamped(g, ins, value), kind), kind)


@rule("add sub mul", HALVES, "rn ftz sat")
def arithmetic(g: Codegen, ins: Instruction) -> None:
    def act(values: Sequence[str], kind: str) -> str:
        a, b = (widen(g, flushed(g, ins, v, kind), kind) for v in values)
        return closing(g, ins, g.binary(f"f{ins.base}", g.ty("f32"), a, b), kind)

    each(g, ins, 2, act)


def round_to_odd(g: Codegen, near: str, gap: str) -> str:
    """The exact value near + gap, `near` an f32 next to it, rounded to odd: rounding that again rounds once."""
    single, double, word, bools = g.ty("f32"), g.ty("f64"), g.vector_of("i32"), g.vector_of("i1")
    raw = g.emit(f"bitcast {single} {near} to {word}")
    even = g.emit(f"icmp eq {word} {g.binary('and', word, raw, g.splat('i32', 1))}, {g.splat('i32', 0)}")
    inexact = g.emit(f"fcmp one {double} {gap}, {g.constant('f64', 0)}")
    # The neighbour on the other side of the exact value is odd when this one is even.
    negative = g.emit(f"icmp slt {word} {raw}, {g.splat('i32', 0)}")
    above = g.emit(f"fcmp ogt {double} {gap}, {g.constant('f64', 0)}")
    outward = g.emit(f"xor {bools} {negative}, {above}")
    step = g.emit(f"select {bools} {outward}, {word} {g.splat('i32', 1)}, {word} {g.splat('i32', -1)}")
    move = g.emit(f"and {bools} {even}, {inexact}")
    moved = g.emit(f"select {bools} {move}, {word} {g.binary('add', word, raw, step)}, {word} {raw}")
    return g.emit(f"bitcast {word} {moved} to {single}")


def odd_sum(g: Codegen, a: str, b: str, c: str) -> str:
    """a * b + c of f32 values that came from 16 bits, as an f32 rounded to odd."""
    single, double = g.ty("f32"), g.ty("f64")
    x, y, z = (g.emit(f"fpext {single} {v} to {double}") for v in (a, b, c))
    product = g.binary("fmul", double, x, y)  # exact: 22 bits at most
    total = g.binary("fadd", double, product, z)
    rest = two_sum_error(g, double, product, z, total)
    near = g.emit(f"fptrunc {double} {total} to {single}")
    back = g.emit(f"fpext {single} {near} to {double}")
    return round_to_odd(g, near, g.binary("fadd", double, g.binary("fsub", double, total, back), rest))


@rule("fma", HALVES, "rn ftz sat relu")
def fma(g: Codegen, ins: Instruction) -> None:
    def act(values: Sequence[str], kind: str) -> str:
        a, b, c = (widen(g, flushed(g, ins, v, kind), kind) for v in values)
        return closing(g, ins, odd_sum(g, a, b, c), kind)

    each(g, ins, 3, act)


@rule("min max", HALVES, "ftz NaN xorsign abs")
def extremum(g: Codegen, ins: Instruction) -> None:
    suffix = "" if "NaN" in ins.parts else "num"
    short = g.vector_of("i16")

    def act(values: Sequence[str], kind: str) -> str:
        sizes = values
        if "xorsign" in ins.parts:  # of the sizes, with the sign of the product
            sizes = [g.binary("and", short, v, g.splat("i16", 0x7FFF)) for v in values]
        a, b = (widen(g, flushed(g, ins, v, kind), kind) for v in sizes)
        found = g.call(f"llvm.{ins.base}imum{suffix}", "f32", a, b)
        bits = narrow(g, found, kind)
        if "xorsign" not in ins.parts:
            return bits
        sign = g.binary("and", short, g.binary("xor", short, *values), g.splat("i16", -0x8000))
        nan = g.emit(f"fcmp uno {g.ty('f32')} {found}, {found}")
        sign = g.emit(f"select {g.vector_of('i1')} {nan}, {short} {g.splat('i16', 0)}, {short} {sign}")
        return g.binary("or", short, bits, sign)

    each(g, ins, 2, act)


@rule("neg abs", HALVES, "ftz")
def sign(g: Codegen, ins: Instruction) -> None:
    op, mask = ("xor", -0x8000) if ins.base == "neg" else ("and", 0x7FFF)

    def act(values: Sequence[str], kind: str) -> str:
        return g.binary(op, g.vector_of("i16"), flushed(g, ins, values[0], kind), g.splat("i16", mask))

    each(g, ins, 1, act)


@rule("ex2", HALVES, "approx ftz")
@rule("tanh", HALVES, "approx")
def approximation(g: Codegen, ins: Instruction) -> None:
    def act(values: Sequence[str], kind: str) -> str:
        return narrow(g, g.call(f"cudaops.{ins.base}", "f32", widen(g, values[0], kind)), kind)

    each(g, ins, 1, act)


_PREDICATE = " ".join(COMPARE) + " and or xor ftz"


@rule("setp", HALVES, _PREDICATE)
def setp(g: Codegen, ins: Instruction) -> None:
    """Of a pair: p from the low halves, q from the high ones."""
    kind, packed = ins.type.removesuffix("x2"), ins.type.endswith("x2")
    a, b = (g.src(ins, n, "b32" if packed else "b16") for n in (1, 2))
    pairs = zip(split(g, a), split(g, b), strict=True) if packed else [(a, b)]
    tests = [_test(g, ins, x, y, kind) for x, y in pairs]
    bools = g.vector_of("i1")
    join = next((part for part in ins.parts[2:] if part in ("and", "or", "xor")), None)
    other = g.src(ins, 3, "pred") if join is not None else ""
    target = ins.operands[0]
    outputs = [target.first, target.second] if isinstance(target, Pair) else [target]
    if len(outputs) > len(tests):
        tests.append(g.emit(f"xor {bools} {tests[0]}, {g.splat('i1', -1)}"))
    joined = [g.emit(f"{join} {bools} {t}, {other}") if join is not None else t for t in tests]
    for output, value in zip(outputs, joined, strict=False):
        g.write(output, value, "pred")


def _test(g: Codegen, ins: Instruction, x: str, y: str, kind: str) -> str:
    a, b = (widen(g, flushed(g, ins, v, kind), kind) for v in (x, y))
    return g.emit(f"fcmp {COMPARE[ins.parts[1]][2]} {g.ty('f32')} {a}, {b}")


@rule("set", f"{HALVES} u16 s16 u32 s32", _PREDICATE)
def set_(g: Codegen, ins: Instruction) -> None:
    """1.0 (all ones for an integer result) where the comparison holds, else 0."""
    to, kind = ins.parts[-2], ins.type.removesuffix("x2")
    if any(part in ("and", "or", "xor") for part in ins.parts[2:-2]):
        g.unsupported(ins, "set with a second predicate on half types")
    one = {"f16": 0x3C00, "bf16": 0x3F80}.get(to.removesuffix("x2"), -1)
    bools, short = g.vector_of("i1"), g.vector_of("i16")
    if ins.type.endswith("x2"):
        pairs = zip(split(g, g.src(ins, 1, "b32")), split(g, g.src(ins, 2, "b32")), strict=True)
        tests = [_test(g, ins, x, y, kind) for x, y in pairs]
        low, high = (
            g.emit(f"select {bools} {t}, {short} {g.splat('i16', one)}, {short} {g.splat('i16', 0)}") for t in tests
        )
        g.result(ins, pack(g, low, high), "b32")
        return
    test = _test(g, ins, g.src(ins, 1, "b16"), g.src(ins, 2, "b16"), kind)
    bits = 32 if to in ("u32", "s32") else 16
    ty = g.vector_of(f"i{bits}")
    g.result(
        ins,
        g.emit(f"select {bools} {test}, {ty} {g.splat(f'i{bits}', one)}, {ty} {g.splat(f'i{bits}', 0)}"),
        f"b{bits}",
    )


TYPES = "f16 bf16 f16x2 bf16x2 f32 f64 u8 s8 u16 s16 u32 s32 u64 s64"


def _cvt(g: Codegen, ins: Instruction) -> None:
    """Conversions to and from f16 and bf16; a packed result has its first operand in the high half."""
    to, source = ins.parts[-2], ins.parts[-1]
    if to.endswith("x2"):
        kind = to.removesuffix("x2")
        high, low = (_round(g, ins, _single(g, ins, n), kind) for n in (1, 2))
        g.result(ins, pack(g, low, high), "b32")
        return
    single = g.ty("f32")
    if source in ("f16", "bf16"):
        value = widen(g, g.src(ins, 1, "b16"), source)
        mode = next((INTEGER_ROUNDING[p] for p in ins.parts if p in INTEGER_ROUNDING), None)
        if to[0] in "us":
            to_integer(g, ins, value, "f32")
            return
        if mode is not None:
            value = g.call(f"llvm.{mode}", "f32", value)
        if to == "f64":
            g.result(ins, g.emit(f"fpext {single} {value} to {g.ty('f64')}"), "f64")
        elif to == "f32":
            g.result(ins, g.saturate(value, "f32") if "sat" in ins.parts else value, "f32")
        else:
            g.result(ins, _round(g, ins, value, to), "b16")
        return
    if source == "f32":
        g.result(ins, _round(g, ins, _single(g, ins, 1), to), "b16")
        return
    if source == "f64":
        exact = g.src(ins, 1, "f64")
    else:
        op = "sitofp" if source[0] == "s" else "uitofp"
        value = g.src(ins, 1, source)
        if source[1:] == "64":
            value = _odd_integer(g, value, source[0] == "s")
        exact = g.emit(f"{op} {g.ty(source)} {value} to {g.ty('f64')}")
    g.result(ins, _round(g, ins, _odd(g, exact), to), "b16")


def _single(g: Codegen, ins: Instruction, place: int) -> str:
    """An f32 operand; .ftz of a conversion is about f32 alone."""
    value = g.src(ins, place, "f32")
    return g.flush(value) if "ftz" in ins.parts else value


def _odd_integer(g: Codegen, value: str, signed: bool) -> str:
    """A 64-bit integer, rounded to odd at bit 12 where it has more bits than an f64."""
    ty, low = g.vector_of("i64"), 1 << 12
    rest = g.binary("and", ty, value, g.splat("i64", low - 1))
    some = g.emit(f"icmp ne {ty} {rest}, {g.splat('i64', 0)}")
    sticky = g.emit(f"select {g.vector_of('i1')} {some}, {ty} {g.splat('i64', low)}, {ty} {g.splat('i64', 0)}")
    cut = g.binary("or", ty, g.binary("and", ty, value, g.splat("i64", -low)), sticky)
    shifted = g.binary("add", ty, value, g.splat("i64", 1 << 52)) if signed else value
    small = g.emit(f"icmp ult {ty} {shifted}, {g.splat('i64', 1 << 53)}")
    return g.emit(f"select {g.vector_of('i1')} {small}, {ty} {value}, {ty} {cut}")


def _odd(g: Codegen, exact: str) -> str:
    """An f64 rounded to odd in f32."""
    single, double = g.ty("f32"), g.ty("f64")
    near = g.emit(f"fptrunc {double} {exact} to {single}")
    return round_to_odd(g, near, g.binary("fsub", double, exact, g.emit(f"fpext {single} {near} to {double}")))


def _round(g: Codegen, ins: Instruction, value: str, kind: str) -> str:
    """An f32 as 16 bits, rounded as the conversion says."""
    mode = next((p for p in ins.parts if p in ("rz", "rm", "rp")), None)
    value = clamped(g, ins, value)
    bits = narrow(g, value, kind)
    if mode is None:
        return bits
    single, short, bools = g.ty("f32"), g.vector_of("i16"), g.vector_of("i1")
    back = widen(g, bits, kind)
    # One step where rounding to nearest went to the wrong side; an infinity steps back to the largest number.
    high = g.emit(f"fcmp ogt {single} {back}, {value}")
    low = g.emit(f"fcmp olt {single} {back}, {value}")
    negative = g.emit(f"icmp slt {short} {bits}, {g.splat('i16', 0)}")
    one, minus, none = (g.splat("i16", n) for n in (1, -1, 0))
    towards_minus = g.emit(f"select {bools} {negative}, {short} {one}, {short} {minus}")
    towards_plus = g.emit(f"select {bools} {negative}, {short} {minus}, {short} {one}")
    if mode == "rm":
        step = g.emit(f"select {bools} {high}, {short} {towards_minus}, {short} {none}")
    elif mode == "rp":
        step = g.emit(f"select {bools} {low}, {short} {towards_plus}, {short} {none}")
    else:
        grew = g.emit(f"select {bools} {negative}, {bools} {low}, {bools} {high}")
        step = g.emit(f"select {bools} {grew}, {short} {minus}, {short} {none}")
    return g.binary("add", short, bits, step)


rule("cvt", TYPES, "rn rz rm rp rni rzi rmi rpi ftz sat relu")(_cvt)


@rule("cvt", "f32", "rna rn rz relu", needs="tf32")
def cvt_tf32(g: Codegen, ins: Instruction) -> None:
    """An f32 with 10 fraction bits; rna rounds to nearest, ties away from zero."""
    word, single, bools = g.vector_of("i32"), g.ty("f32"), g.vector_of("i1")
    value = clamped(g, ins, g.src(ins, 1, "f32"))
    bits = g.emit(f"bitcast {single} {value} to {word}")
    nan = g.emit(f"fcmp uno {single} {value}, {value}")
    up = g.splat("i32", 0x1000 if "rna" in ins.parts else 0)
    if "rn" in ins.parts:  # half less one, and one more for an odd number
        last = g.binary("and", word, g.binary("lshr", word, bits, g.splat("i32", 13)), g.splat("i32", 1))
        up = g.binary("add", word, last, g.splat("i32", 0xFFF))
    rounded = g.binary("and", word, g.binary("add", word, bits, up), g.splat("i32", -0x2000))
    g.result(ins, g.emit(f"select {bools} {nan}, {word} {bits}, {word} {rounded}"), "b32")
