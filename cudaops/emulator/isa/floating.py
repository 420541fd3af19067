"""f32 and f64 arithmetic. An fma rounds once; approximations meet the error bounds of the PTX ISA, not more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator.isa.table import rule
from cudaops.emulator.ptx import TYPE_BITS, Instruction

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


CONTROL = {"rm": 0x3F80, "rp": 0x5F80, "rz": 0x7F80, "rn": 0x1F80}  # MXCSR: exceptions masked, subnormals kept


def rounded(g: Codegen, operation: str, mode: str, result: str, *values: tuple[str, str]) -> str:
    """`operation` (an LLVM constrained intrinsic) with the CPU's rounding mode set; `result` and values' types in PTX.

    The mode is set in a function of its own: LLVM may move other floating-point instructions across the switch.
    """
    types = [source for source, _ in values]
    kinds = [g.ty(t) for t in types]
    overload = g.suffix(result) + ("" if set(types) == {result} else f".{g.suffix(types[0])}")
    name = f"cudaops_{operation}_{mode}_{overload.replace('.', '_')}"
    if name not in g.helpers:
        ty, control = g.ty(result), g.declare("llvm.x86.sse.ldmxcsr", "void", "ptr")
        full = g.declare(
            f"llvm.experimental.constrained.{operation}.{overload}", ty, ", ".join([*kinds, "metadata", "metadata"])
        )
        given = ", ".join(f"{kind} %x{n}" for n, kind in enumerate(kinds))
        g.helpers[name] = f"""
define internal {ty} @{name}({given}) noinline strictfp #0 {{
  %csr = alloca i32, align 4
  store i32 {CONTROL[mode]}, ptr %csr, align 4
  call void @{control}(ptr %csr) strictfp
  %result = call {ty} @{full}({given}, metadata !"round.dynamic", metadata !"fpexcept.strict") strictfp
  store i32 {CONTROL["rn"]}, ptr %csr, align 4
  call void @{control}(ptr %csr) strictfp
  ret {ty} %result
}}"""
    given = ", ".join(f"{kind} {value}" for kind, (_, value) in zip(kinds, values, strict=True))
    return g.emit(f"call {g.ty(result)} @{name}({given})")


def binary(g: Codegen, ins: Instruction, operation: str, a: str, b: str) -> str:
    """fadd, fsub, fmul or fdiv, rounded as the instruction says."""
    mode = directed(ins)
    if mode is None:
        return g.emit(f"{operation} {g.ty(ins.type)} {a}, {b}")
    return rounded(g, operation, mode, ins.type, (ins.type, a), (ins.type, b))


@rule("add sub mul", FLOATS, "rn rz rm rp ftz sat")
def arithmetic(g: Codegen, ins: Instruction) -> None:
    finish(g, ins, binary(g, ins, f"f{ins.base}", *sources(g, ins, 2)))


@rule("fma mad", FLOATS, "rn rz rm rp ftz sat")
def fma(g: Codegen, ins: Instruction) -> None:
    values = sources(g, ins, 3)
    mode = directed(ins)
    if mode is None:
        value = g.call("llvm.fma", ins.type, *values)
    else:
        value = rounded(g, "fma", mode, ins.type, *((ins.type, v) for v in values))
    finish(g, ins, value)


def two_sum_error(g: Codegen, ty: str, a: str, b: str, s: str) -> str:
    """a + b - s exactly, for s = fl(a + b) (Knuth's TwoSum)."""
    bb = g.binary("fsub", ty, s, a)
    first = g.binary("fsub", ty, a, g.binary("fsub", ty, s, bb))
    return g.binary("fadd", ty, first, g.binary("fsub", ty, b, bb))


@rule("div", FLOATS, "rn rz rm rp approx full ftz")
def divide(g: Codegen, ins: Instruction) -> None:
    a, b = sources(g, ins, 2)
    ty = g.ty(ins.type)
    value = binary(g, ins, "fdiv", a, b)
    if "approx" in ins.parts:  # beyond 2^126 the divisor's reciprocal is taken for 0
        size = g.call("llvm.fabs", ins.type, b)
        large = g.emit(f"fcmp ogt {ty} {size}, {g.constant('f32', 0x7E800000)}")
        nothing = g.binary("fmul", ty, a, g.call("llvm.copysign", ins.type, g.constant("f32", 0), b))
        finite = g.emit(f"fcmp olt {ty} {size}, {g.constant('f32', 0x7F800000)}")
        beyond = g.emit(f"and {g.vector_of('i1')} {large}, {finite}")
        value = g.emit(f"select {g.vector_of('i1')} {beyond}, {ty} {nothing}, {ty} {value}")
    finish(g, ins, value)


def one(g: Codegen, ins: Instruction) -> str:
    return g.constant(ins.type, 0x3F800000 if ins.type == "f32" else 0x3FF0000000000000)


@rule("rcp", FLOATS, "rn rz rm rp approx ftz")
def reciprocal(g: Codegen, ins: Instruction) -> None:
    ty = g.ty(ins.type)
    if _gross(ins):
        g.result(ins, _upper_half(g, g.binary("fdiv", ty, one(g, ins), _upper_half(g, g.src(ins, 1)))))
        return
    (a,) = sources(g, ins, 1)
    finish(g, ins, binary(g, ins, "fdiv", one(g, ins), a))


@rule("sqrt", FLOATS, "rn rz rm rp approx ftz")
def square_root(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    mode = directed(ins)
    if mode is None:
        value = g.call("llvm.sqrt", ins.type, a)
    else:
        value = rounded(g, "sqrt", mode, ins.type, (ins.type, a))
    finish(g, ins, value)


@rule("rsqrt", FLOATS, "approx ftz")
def reciprocal_root(g: Codegen, ins: Instruction) -> None:
    ty = g.ty(ins.type)
    if _gross(ins):
        root = g.call("llvm.sqrt", ins.type, _upper_half(g, g.src(ins, 1)))
        g.result(ins, _upper_half(g, g.binary("fdiv", ty, one(g, ins), root)))
        return
    (a,) = sources(g, ins, 1)
    finish(g, ins, g.binary("fdiv", ty, one(g, ins), g.call("llvm.sqrt", ins.type, a)))


def _gross(ins: Instruction) -> bool:
    """rcp and rsqrt.approx.ftz.f64 read and give the upper 32 bits alone."""
    return "ftz" in ins.parts and ins.type == "f64"


def _upper_half(g: Codegen, value: str) -> str:
    """An f64 without the lower 32 bits; a subnormal becomes zero and keeps its sign."""
    ty, integer, bools = g.ty("f64"), g.vector_of("i64"), g.vector_of("i1")
    bits = g.emit(f"bitcast {ty} {value} to {integer}")
    exponent = g.binary("and", integer, bits, g.splat("i64", 0x7FF << 52))
    tiny = g.emit(f"icmp eq {integer} {exponent}, {g.splat('i64', 0)}")
    cut, sign = (g.binary("and", integer, bits, g.splat("i64", m)) for m in (-(1 << 32), -(1 << 63)))
    kept = g.emit(f"select {bools} {tiny}, {integer} {sign}, {integer} {cut}")
    return g.emit(f"bitcast {integer} {kept} to {ty}")


@rule("ex2 lg2 sin cos", "f32", "approx ftz")
@rule("tanh", "f32", "approx")
def transcendental(g: Codegen, ins: Instruction) -> None:
    (a,) = sources(g, ins, 1)
    finish(g, ins, g.call(f"cudaops.{ins.base}", "f32", a))


@rule("min max", FLOATS, "NaN ftz xorsign abs")
def extremum(g: Codegen, ins: Instruction) -> None:
    """The number of a number and a NaN unless .NaN; -0 is below +0. .xorsign.abs: of the sizes, signed by both."""
    a, b = sources(g, ins, 2)
    name = f"llvm.{ins.base}imum" + ("" if "NaN" in ins.parts else "num")
    if "xorsign" not in ins.parts:
        finish(g, ins, g.call(name, ins.type, a, b))
        return
    ty, integer = g.ty(ins.type), g.vector_of(f"i{TYPE_BITS[ins.type]}")
    size = g.call(name, ins.type, *(g.call("llvm.fabs", ins.type, v) for v in (a, b)))
    signs = g.binary("xor", integer, *(g.emit(f"bitcast {ty} {v} to {integer}") for v in (a, b)))
    finish(g, ins, g.call("llvm.copysign", ins.type, size, g.emit(f"bitcast {integer} {signs} to {ty}")))


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


# Classes of llvm.is.fpclass; zeros count as normal numbers.
TESTS = {"finite": 0x1F8, "infinite": 0x204, "number": 0x3FC, "notanumber": 0x3, "normal": 0x168, "subnormal": 0x90}


@rule("testp", FLOATS, " ".join(TESTS))
def testp(g: Codegen, ins: Instruction) -> None:
    ty = g.ty(ins.type)
    value = g.call_raw(
        "llvm.is.fpclass", ins.type, f"{ty} {g.src(ins, 1)}, i32 {TESTS[ins.parts[1]]}", g.vector_of("i1")
    )
    g.result(ins, value, "pred")
