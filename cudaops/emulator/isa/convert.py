"""mov, with packing and unpacking, and cvt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator.isa.floating import directed, rounded
from cudaops.emulator.isa.integer import BITS, INTS
from cudaops.emulator.isa.table import rule
from cudaops.emulator.ptx import TYPE_BITS, Instruction, Reg, Sym, Vec

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

NARROW = "s8 u8"


@rule("mov", f"pred {BITS} {INTS} f32 f64")
def mov(g: Codegen, ins: Instruction) -> None:
    target, source = ins.operands[0], ins.operands[1]
    bits = TYPE_BITS[ins.type]
    if isinstance(target, Vec):
        ty, value = g.ty(ins.type), g.src(ins, 1)
        part = bits // len(target.items)
        for n, item in enumerate(target.items):
            if isinstance(item, Reg):
                moved = g.binary("lshr", ty, value, g.splat(f"i{bits}", n * part))
                g.write(item, g.emit(f"trunc {ty} {moved} to {g.vector_of(f'i{part}')}"), f"b{part}")
        return
    if isinstance(source, Vec):
        part = bits // len(source.items)
        ty, total = g.ty(ins.type), ""
        for n, item in enumerate(source.items):
            up = g.emit(f"zext {g.vector_of(f'i{part}')} {g.read(item, f'b{part}', g.vector)} to {ty}")
            up = g.binary("shl", ty, up, g.splat(f"i{bits}", n * part)) if n else up
            total = g.binary("or", ty, total, up) if total else up
        g.result(ins, total)
        return
    if isinstance(source, Sym):
        g.result(ins, g.symbol_address(ins, source.name, bits))
        return
    g.result(ins, g.src(ins, 1))


INTEGER_ROUNDING = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@rule("cvt", f"{INTS} {NARROW} f32 f64", "rn rz rm rp rni rzi rmi rpi ftz sat")
def cvt(g: Codegen, ins: Instruction) -> None:
    to, source = ins.parts[-2], ins.parts[-1]
    if to[0] == "f":
        (_float_to_float if source[0] == "f" else _int_to_float)(g, ins, to, source)
    elif source[0] == "f":
        _float_to_int(g, ins, to, source)
    else:
        _int_to_int(g, ins, to, source)


def _int_to_int(g: Codegen, ins: Instruction, to: str, source: str) -> None:
    value = g.src(ins, 1, source)
    n, m = TYPE_BITS[to], TYPE_BITS[source]
    if "sat" in ins.parts:
        element = g.element(source)
        low = -(1 << (n - 1)) if to[0] == "s" else 0
        high = (1 << (n - 1)) - 1 if to[0] == "s" else (1 << n) - 1
        if source[0] == "s":
            if low > -(1 << (m - 1)):
                value = g.call("llvm.smax", source, value, g.splat(element, low))
            if high < (1 << (m - 1)) - 1:
                value = g.call("llvm.smin", source, value, g.splat(element, high))
        elif high < (1 << m) - 1:
            value = g.call("llvm.umin", source, value, g.splat(element, high))
    g.result(ins, g.resize(value, source, to), to)


def to_integer(g: Codegen, ins: Instruction, value: str, source: str) -> None:
    """Write a float of type `source` as an integer; it saturates.

    NaN gives 0, and 0x80... (the sign bit alone) where either side has 64 bits.
    """
    to = ins.parts[-2]
    mode = next((INTEGER_ROUNDING[p] for p in ins.parts if p in INTEGER_ROUNDING), "trunc")
    if mode != "trunc":
        value = g.call(f"llvm.{mode}", source, value)
    kind = "fptosi" if to[0] == "s" else "fptoui"
    result = g.call_raw(f"llvm.{kind}.sat", to, f"{g.ty(source)} {value}", g.ty(to), suffix=g.suffix(source))
    if source == "f64" or TYPE_BITS[to] == 64:
        nan = g.emit(f"fcmp uno {g.ty(source)} {value}, {value}")
        odd = g.splat(g.element(to), -(1 << (TYPE_BITS[to] - 1)))
        result = g.emit(f"select {g.vector_of('i1')} {nan}, {g.ty(to)} {odd}, {g.ty(to)} {result}")
    g.result(ins, result, to)


def _float_to_int(g: Codegen, ins: Instruction, to: str, source: str) -> None:
    value = g.src(ins, 1, source)
    to_integer(g, ins, g.flush(value) if "ftz" in ins.parts and source == "f32" else value, source)


def _int_to_float(g: Codegen, ins: Instruction, to: str, source: str) -> None:
    value = g.src(ins, 1, source)
    op = "sitofp" if source[0] == "s" else "uitofp"
    mode = directed(ins)
    if mode is None:
        result = g.emit(f"{op} {g.ty(source)} {value} to {g.ty(to)}")
    elif TYPE_BITS[source] > 32:
        result = rounded(g, op, mode, to, (source, value))
    else:
        result = g.emit(f"{op} {g.ty(source)} {value} to {g.ty('f64')}")  # exact
        if to == "f32":
            result = rounded(g, "fptrunc", mode, to, ("f64", result))
    if "sat" in ins.parts:
        result = g.saturate(result, to)
    g.result(ins, result, to)


def _float_to_float(g: Codegen, ins: Instruction, to: str, source: str) -> None:
    value = g.src(ins, 1, source)
    if "ftz" in ins.parts and source == "f32":
        value = g.flush(value)
    mode = directed(ins)
    integral = next((INTEGER_ROUNDING[p] for p in ins.parts if p in INTEGER_ROUNDING), None)
    if integral is not None:
        value = g.call(f"llvm.{integral}", source, value)
    if (to, source) == ("f64", "f32"):
        value = g.emit(f"fpext {g.ty(source)} {value} to {g.ty(to)}")
    elif (to, source) == ("f32", "f64"):
        if mode is None:
            value = g.emit(f"fptrunc {g.ty(source)} {value} to {g.ty(to)}")
        else:
            value = rounded(g, "fptrunc", mode, to, (source, value))
    if "sat" in ins.parts:
        value = g.saturate(value, to)
    if "ftz" in ins.parts and to == "f32":
        value = g.flush(value)
    g.result(ins, value, to)


@rule("cvta", "u64", "to global shared local const param")
def cvta(g: Codegen, ins: Instruction) -> None:
    """Generic, global, const and local addresses are host addresses; those of shared memory and of parameters are
    offsets into the block's shared memory and into the argument block."""
    value, ty = g.src(ins, 1), g.ty(ins.type)
    shared = any(part.startswith("shared") for part in ins.parts)
    if shared or "param" in ins.parts:
        base = g.scalar_to_shape("i64", g.shared_base() if shared else g.argument_address())
        value = g.binary("sub" if "to" in ins.parts else "add", ty, value, base)
    g.result(ins, value)
