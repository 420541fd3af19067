"""Polynomials for the f32 approximations ex2, lg2, sin, cos and tanh.

Hardware does not define their bits. Everything is worked out in f64, so that the rounding to f32 is nearly all the
error; the polynomials (Chebyshev fits) are good to 5e-11, the PTX ISA asks for about 2^-22.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudaops.emulator.values import Values

# 2^f on [-1/2, 1/2]
EXP2 = (
    0.9999999999595482, 0.6931471805459289, 0.24022651213595694, 0.055504109412174145, 0.009618025602943408,
    0.0013333450559243328, 0.00015469731977187605, 1.5310081429436396e-05,
)  # fmt: skip
# log2((1 + s) / (1 - s)) / s in s^2, for the mantissa m = (1 + s) / (1 - s) in [sqrt(1/2), sqrt(2)]
LOG2 = (2.885390081790079, 0.9617966733613437, 0.5770835810463069, 0.41167295472237664, 0.340725772044112)
# sin(x) / x and cos(x) in x^2, on [-pi/4, pi/4]
SIN = (
    0.9999999999956777, -0.16666666631613555, 0.008333328784274435, -0.00019839202683440512, 2.7173495064876305e-06,
)  # fmt: skip
COS = (
    0.9999999999525451, -0.4999999961514604, 0.04166661671591332, -0.0013886618606109473, 2.43798804107397e-05,
)  # fmt: skip


def _double(g: Values, value: float) -> str:
    return g.constant("f64", struct.unpack("<Q", struct.pack("<d", value))[0])


def _polynomial(g: Values, x: str, coefficients: Sequence[float]) -> str:
    total = _double(g, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = g.call("llvm.fma", "f64", total, x, _double(g, c))
    return total


def _widen(g: Values, value: str) -> str:
    return g.emit(f"fpext {g.ty('f32')} {value} to {g.ty('f64')}")


def _narrow(g: Values, value: str) -> str:
    return g.emit(f"fptrunc {g.ty('f64')} {value} to {g.ty('f32')}")


def _select(g: Values, test: str, yes: str, no: str) -> str:
    ty = g.ty("f64")
    return g.emit(f"select {g.vector_of('i1')} {test}, {ty} {yes}, {ty} {no}")


def _power(g: Values, x: str) -> str:
    """2^x in f64 for x in f64; infinities and NaN as they should be."""
    ty, integer = g.ty("f64"), g.vector_of("i64")
    # Beyond these every f32 result is infinite or zero; a NaN stays one.
    bounded = g.call("llvm.minimum", "f64", g.call("llvm.maximum", "f64", x, _double(g, -300.0)), _double(g, 300.0))
    whole = g.call("llvm.roundeven", "f64", bounded)
    power = _polynomial(g, g.binary("fsub", ty, bounded, whole), EXP2)
    exponent = g.call_raw("llvm.fptosi.sat", "s64", f"{ty} {whole}", integer, suffix=g.suffix("f64"))
    biased = g.binary("add", integer, exponent, g.splat("i64", 1023))
    scale = g.emit(f"bitcast {integer} {g.binary('shl', integer, biased, g.splat('i64', 52))} to {ty}")
    return g.binary("fmul", ty, power, scale)


def ex2(g: Values, value: str) -> str:
    return _narrow(g, _power(g, _widen(g, value)))


def lg2(g: Values, value: str) -> str:
    ty, integer = g.ty("f64"), g.vector_of("i64")
    x = _widen(g, value)  # f32 subnormals are normal numbers in f64
    raw = g.emit(f"bitcast {ty} {x} to {integer}")
    # Subtracting the bits of sqrt(1/2) puts the mantissa in [sqrt(1/2), sqrt(2)).
    root = struct.unpack("<q", struct.pack("<d", math.sqrt(0.5)))[0]
    moved = g.binary("sub", integer, raw, g.splat("i64", root))
    exponent = g.binary("ashr", integer, moved, g.splat("i64", 52))
    mantissa = g.binary("sub", integer, raw, g.binary("shl", integer, exponent, g.splat("i64", 52)))
    m = g.emit(f"bitcast {integer} {mantissa} to {ty}")
    one = _double(g, 1.0)
    s = g.binary("fdiv", ty, g.binary("fsub", ty, m, one), g.binary("fadd", ty, m, one))
    series = g.binary("fmul", ty, s, _polynomial(g, g.binary("fmul", ty, s, s), LOG2))
    result = g.binary("fadd", ty, g.emit(f"sitofp {integer} {exponent} to {ty}"), series)
    zero = g.emit(f"fcmp oeq {ty} {x}, {_double(g, 0.0)}")
    result = _select(g, zero, _double(g, -math.inf), result)
    top = g.emit(f"fcmp oeq {ty} {x}, {_double(g, math.inf)}")
    result = _select(g, top, _double(g, math.inf), result)
    bad = g.emit(f"fcmp ult {ty} {x}, {_double(g, 0.0)}")  # negative or NaN
    return _narrow(g, _select(g, bad, _double(g, math.nan), result))


def _circular(g: Values, value: str, quarter: int) -> str:
    """sin(x + quarter * pi/2)"""
    ty, integer, bools = g.ty("f64"), g.vector_of("i64"), g.vector_of("i1")
    x = _widen(g, value)
    turns = g.call("llvm.roundeven", "f64", g.binary("fmul", ty, x, _double(g, 2 / math.pi)))
    minus = g.emit(f"fneg {ty} {turns}")
    rest = g.call("llvm.fma", "f64", minus, _double(g, math.pi / 2), x)
    rest = g.call("llvm.fma", "f64", minus, _double(g, 6.123233995736766e-17), rest)  # pi/2 - fl(pi/2)
    # Beyond this nothing is left of x, and hardware promises nothing: 0, and NaN for an infinity.
    small = g.emit(f"fcmp olt {ty} {g.call('llvm.fabs', 'f64', turns)}, {_double(g, 2.0**50)}")
    rest = _select(g, small, rest, g.binary("fsub", ty, x, x))
    near = g.emit(f"fcmp oeq {ty} {turns}, {_double(g, 0.0)}")
    rest = _select(g, near, x, rest)  # keeps the sign of -0
    count = g.call_raw("llvm.fptosi.sat", "s64", f"{ty} {turns}", integer, suffix=g.suffix("f64"))
    count = g.binary("add", integer, count, g.splat("i64", quarter))
    square = g.binary("fmul", ty, rest, rest)
    sine = g.binary("fmul", ty, rest, _polynomial(g, square, SIN))
    cosine = _polynomial(g, square, COS)
    bits = g.binary("and", integer, count, g.splat("i64", 1))
    odd = g.emit(f"icmp ne {integer} {bits}, {g.splat('i64', 0)}")
    result = g.emit(f"select {bools} {odd}, {ty} {cosine}, {ty} {sine}")
    bits = g.binary("and", integer, count, g.splat("i64", 2))
    flip = g.emit(f"icmp ne {integer} {bits}, {g.splat('i64', 0)}")
    return _narrow(g, _select(g, flip, g.emit(f"fneg {ty} {result}"), result))


def sin(g: Values, value: str) -> str:
    return _circular(g, value, 0)


def cos(g: Values, value: str) -> str:
    return _circular(g, value, 1)


def tanh(g: Values, value: str) -> str:
    """1 - 2 / (e^2x + 1), and x itself where that would cancel."""
    ty = g.ty("f64")
    x = _widen(g, value)
    power = _power(g, g.binary("fmul", ty, x, _double(g, 2 / math.log(2))))
    quotient = g.binary("fdiv", ty, _double(g, 2.0), g.binary("fadd", ty, power, _double(g, 1.0)))
    result = g.binary("fsub", ty, _double(g, 1.0), quotient)
    small = g.emit(f"fcmp olt {ty} {g.call('llvm.fabs', 'f64', x)}, {_double(g, 1e-4)}")
    return _narrow(g, _select(g, small, x, result))


APPROXIMATE: dict[str, Callable[[Values, str], str]] = {"ex2": ex2, "lg2": lg2, "sin": sin, "cos": cos, "tanh": tanh}
