"""f32 and f64 arithmetic. An fma rounds once; approximations meet the error bounds of the PTX ISA, not more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator.isa.table import rule
from cudaops.emulator.ptx import Instruction

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

FLOATS = "f32 f64"
DIRECTED = ("rz", "rm", "rp")


def sources(g: Codegen, ins: Instruction, count: int) -> list[str]:
    values = [g.src(ins, n + 1) for n in range(count)]
    return [g.flush(v) for v in values] if "ftz" in ins.parts else values


def finish(g: Codegen, ins: Instruction, value: str) -> None:
    if "sat" in ins.parts:
        value = g.saturate(value, ins.type)
    if "ftz" in ins.parts:
        value = g.flush(value)
    g.result(ins, value)


def directed(ins: Instruction) -> str | None:
    return next((part for part in ins.parts if part in DIRECTED), None)


@rule("add sub mul", FLOATS, "rn rz rm rp ftz sat")
def arithmetic(g: Codegen, ins: Instruction) -> None:
    a, b = sources(g, ins, 2)
    ty, mode = g.ty(ins.type), directed(ins)
    value = g.emit(f"f{ins.base} {ty} {a}, {b}")
    if mode is not None:
        if ins.base == "mul":
            error = g.call("llvm.fma", ins.type, a, b, g.emit(f"fneg {ty} {value}"))
        else:
            error = two_sum_error(g, ty, a, b if ins.base == "add" else g.emit(f"fneg {ty} {b}"), value)
        value = nudge(g, ins.type, value, error, mode)
    finish(g, ins, value)


@rule("fma mad", FLOATS, "rn rz rm rp ftz sat")
def fma(g: Codegen, ins: Instruction) -> None:
    a, b, c = sources(g, ins, 3)
    value = g.call("llvm.fma", ins.type, a, b, c)
    mode = directed(ins)
    if mode is not None:
        value = nudge(g, ins.type, value, fma_error(g, ins.type, a, b, c, value), mode)
    finish(g, ins, value)


def two_sum_error(g: Codegen, ty: str, a: str, b: str, s: str) -> str:
    """a + b - s exactly, for s = fl(a + b) (Knuth's TwoSum)."""
    bb = g.binary("fsub", ty, s, a)
    first = g.binary("fsub", ty, a, g.binary("fsub", ty, s, bb))
    return g.binary("fadd", ty, first, g.binary("fsub", ty, b, bb))


def fma_error(g: Codegen, t: str, a: str, b: str, c: str, value: str) -> str:
    """A number with the sign of a * b + c - value, for value = fl(a * b + c)."""
    if t == "f32":
        ty, wide = g.ty("f32"), g.ty("f64")
        x, y, z, r = (g.emit(f"fpext {ty} {v} to {wide}") for v in (a, b, c, value))
        product = g.binary("fmul", wide, x, y)  # exact: 48 bits
        total = g.binary("fadd", wide, product, z)
        rest = two_sum_error(g, wide, product, z, total)
        # total and value are close (or equal): their difference is exact.
        return g.binary("fadd", wide, g.binary("fsub", wide, total, r), rest)
    ty = g.ty("f64")
    product = g.binary("fmul", ty, a, b)
    low = g.call("llvm.fma", "f64", a, b, g.emit(f"fneg {ty} {product}"))
    total = g.binary("fadd", ty, product, c)
    rest = two_sum_error(g, ty, product, c, total)
    return g.binary("fadd", ty, g.binary("fsub", ty, total, value), g.binary("fadd", ty, rest, low))


def nudge(g: Codegen, t: str, value: str, error: str, mode: str) -> str:
    """Move a round-to-nearest result one step where the exact result lies on the side that `mode` asks for.

    `error` has the sign of exact - value; it is f64 where it came from fma_error of f32.
    """
    ty, bools = g.ty(t), g.vector_of("i1")
    integer, bits = g.vector_of(f"i{t[1:]}"), int(t[1:])
    wide = g.ty("f64") if g.type_of(error) == "double" else ty
    zero = g.constant("f64" if wide == g.ty("f64") else t, 0)
    above = g.emit(f"fcmp ogt {wide} {error}, {zero}")  # exact > value
    below = g.emit(f"fcmp olt {wide} {error}, {zero}")
    raw = g.emit(f"bitcast {ty} {value} to {integer}")
    one, none = g.splat(f"i{bits}", 1), g.splat(f"i{bits}", 0)
    negative = g.emit(f"icmp slt {integer} {raw}, {none}")
    minus = g.splat(f"i{bits}", -1)
    up = g.emit(f"select {bools} {negative}, {integer} {minus}, {integer} {one}")  # towards +infinity
    down = g.emit(f"select {bools} {negative}, {integer} {one}, {integer} {minus}")
    if mode == "rp":
        step = g.emit(f"select {bools} {above}, {integer} {up}, {integer} {none}")
    elif mode == "rm":
        step = g.emit(f"select {bools} {below}, {integer} {down}, {integer} {none}")
    else:
        inward = g.emit(f"select {bools} {negative}, {bools} {above}, {bools} {below}")
        step = g.emit(f"select {bools} {inward}, {integer} {minus}, {integer} {none}")
    return g.emit(f"bitcast {integer} {g.binary('add', integer, raw, step)} to {ty}")


@rule("div", FLOATS, "rn approx full ftz")
def divide(g: Codegen, ins: Instruction) -> None:
    a, b = sources(g, ins, 2)
    finish(g, ins, g.binary("fdiv", g.ty(ins.type), a, b))


@rule("rcp", FLOATS, "rn approx ftz")
def reciprocal(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    one = g.constant(ins.type, 0x3F800000 if ins.type == "f32" else 0x3FF0000000000000)
    finish(g, ins, g.binary("fdiv", g.ty(ins.type), one, a))


@rule("sqrt", FLOATS, "rn approx ftz")
def square_root(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    finish(g, ins, g.call("llvm.sqrt", ins.type, a))


@rule("rsqrt", FLOATS, "approx ftz")
def reciprocal_root(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    one = g.constant(ins.type, 0x3F800000 if ins.type == "f32" else 0x3FF0000000000000)
    finish(g, ins, g.binary("fdiv", g.ty(ins.type), one, g.call("llvm.sqrt", ins.type, a)))


@rule("ex2 lg2 sin cos tanh", "f32", "approx ftz")
def transcendental(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    finish(g, ins, g.call(f"cudaops.{ins.base}", "f32", a))


@rule("min max", FLOATS, "NaN ftz xorsign abs")
def extremum(g: Codegen, ins: Instruction) -> None:
    """The number of a number and a NaN unless .NaN; -0 is below +0."""
    a, b = sources(g, ins, 2)
    name = f"llvm.{ins.base}imum"
    if "NaN" in ins.parts:
        value = g.call(name, ins.type, a, b)
    else:
        value = g.call(name + "num", ins.type, a, b)
    finish(g, ins, value)


@rule("abs", FLOATS, "ftz")
def absolute(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    finish(g, ins, g.call("llvm.fabs", ins.type, a))


@rule("neg", FLOATS, "ftz")
def negate(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    finish(g, ins, g.emit(f"fneg {g.ty(ins.type)} {a}"))


@rule("copysign", FLOATS)
def copysign(g: Codegen, ins: Instruction) -> None:
    """The magnitude of b with the sign of a."""
    g.result(ins, g.call("llvm.copysign", ins.type, g.src(ins, 2), g.src(ins, 1)))


TESTS = {"finite": 0x1F8, "infinite": 0x204, "number": 0x3FC, "notanumber": 0x3, "normal": 0x108, "subnormal": 0x90}


@rule("testp", FLOATS, " ".join(TESTS))
def testp(g: Codegen, ins: Instruction) -> None:
    ty = g.ty(ins.type)
    value = g.call_raw(
        "llvm.is.fpclass", ins.type, f"{ty} {g.src(ins, 1)}, i32 {TESTS[ins.parts[1]]}", g.vector_of("i1")
    )
    g.result(ins, value, "pred")
