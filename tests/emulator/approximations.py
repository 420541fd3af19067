"""Instructions that the PTX ISA bounds: the bounds, the special values, and operands to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.emulator.reference import BITS, FLOATS, INF, evaluate, flushed, is_nan, sign_bit

Exact = Callable[[float], float]


@dataclass(frozen=True)
class Approximation:
    """relative / absolute: the error allowed, 0 if the other bound holds alone; special: operand bits -> result bits."""

    opcode: str
    exact: Exact
    relative: float = 0.0
    absolute: float = 0.0
    low: float = -math.inf  # operands that the bound is given for
    high: float = math.inf
    special: dict[int, int] = field(default_factory=dict)

    @property
    def type(self) -> str:
        return self.opcode.split(".")[-1].removesuffix("x2")


P, M = 0x7F800000, 0xFF800000  # infinities
NAN, ZERO, MINUS_ZERO, F1, MINUS_1 = -1, 0, 0x80000000, 0x3F800000, 0xBF800000


def _reciprocal_root(x: float) -> float:
    return 1 / math.sqrt(x)


def _power(x: float) -> float:
    return 2.0**x if x < 1024 else math.inf


EVEN = {P: NAN, M: NAN}
SINGLE = [
    Approximation("rcp.approx.f32", lambda x: 1 / x, 2.0**-23, special={P: 0, M: 1 << 31, 0: P, 1 << 31: M}),
    Approximation("sqrt.approx.f32", math.sqrt, 2.0**-23, low=0, special={P: P, M: NAN, 0: 0, 1 << 31: 1 << 31, MINUS_1: NAN}),
    Approximation("rsqrt.approx.f32", _reciprocal_root, 2.0**-22.4, low=0, special={P: 0, M: NAN, 0: P, 1 << 31: M, MINUS_1: NAN}),
    Approximation("ex2.approx.f32", _power, 2.0**-22, special={P: P, M: 0, 0: F1, 1 << 31: F1, 1: F1}),
    Approximation("lg2.approx.f32", math.log2, 2.0**-22, 2.0**-22, low=0, special={P: P, M: NAN, 0: M, 1 << 31: M, F1: 0, MINUS_1: NAN}),
    Approximation("sin.approx.f32", math.sin, 0, 2.0**-20.5, -2 * math.pi, 2 * math.pi, {**EVEN, 0: 0, 1 << 31: 1 << 31}),
    Approximation("cos.approx.f32", math.cos, 0, 2.0**-20.5, -2 * math.pi, 2 * math.pi, {**EVEN, 0: F1, 1 << 31: F1}),
    Approximation("tanh.approx.f32", math.tanh, 2.0**-10.987, special={P: F1, M: MINUS_1, 0: 0, 1 << 31: 1 << 31}),
]  # fmt: skip
FLUSHED = [
    Approximation(a.opcode.replace(".approx", ".approx.ftz"), a.exact, a.relative, a.absolute, a.low, a.high, a.special)
    for a in SINGLE if not a.opcode.startswith("tanh")
]  # fmt: skip
INVERSE = {INF["f64"]: 0, 0: INF["f64"], 1 << 63: INF["f64"] | 1 << 63}
DOUBLE = [
    Approximation("rsqrt.approx.f64", _reciprocal_root, 2.0**-51, low=0, special=INVERSE),
    Approximation("rcp.approx.ftz.f64", lambda x: 1 / x, 2.0**-19, special=INVERSE),
    Approximation("rsqrt.approx.ftz.f64", _reciprocal_root, 2.0**-19, low=0, special=INVERSE),
]
HALF = [
    Approximation("ex2.approx.f16", _power, 2.0**-9.9, special={0x7C00: 0x7C00, 0xFC00: 0, 0: 0x3C00}),
    Approximation("ex2.approx.ftz.bf16", _power, 2.0**-7, special={0x7F80: 0x7F80, 0xFF80: 0, 0: 0x3F80}),
    Approximation("tanh.approx.f16", math.tanh, 0, 2.0**-10.987, special={0x7C00: 0x3C00, 0: 0, 0x8000: 0x8000}),
    Approximation("tanh.approx.bf16", math.tanh, 0, 2.0**-8, special={0x7F80: 0x3F80, 0: 0}),
]
PACKED = [Approximation(f"{a.opcode}x2", a.exact, a.relative, a.absolute, special=a.special) for a in HALF]
ONE_OPERAND = [*SINGLE, *FLUSHED, *DOUBLE, *HALF, *PACKED]
QUOTIENTS = ["div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32"]
OPCODES = [a.opcode for a in ONE_OPERAND] + QUOTIENTS


def number(bits: int, type_: str) -> float:
    """The value of a float, as Python has it."""
    if type_ == "f64":
        return float(np.uint64(bits).view(np.float64))
    if type_ == "f32":
        return float(np.uint32(bits).view(np.float32))
    if type_ == "f16":
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 16).view(np.float32))


def operands(a: Approximation, source: np.random.Generator, count: int) -> list[int]:
    """Special values; numbers of every size, and many of the sizes where the function does something."""
    width = BITS[a.type]
    found = [*a.special, *(int(source.integers(1 << width, dtype=np.uint64)) for _ in range(count))]
    to = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(a.type, np.float32)
    some = source.uniform(max(a.low, -20), min(a.high, 20), count).astype(to)
    word = {2: np.uint16, 4: np.uint32, 8: np.uint64}[some.itemsize]
    bits = [int(b) for b in some.view(word)]
    return found + ([b >> 16 for b in bits] if a.type == "bf16" else bits)


def wrong(a: Approximation, bits: int, got: int) -> str:
    """What is wrong with a result, or nothing."""
    type_ = a.type
    ftz = ".ftz" in a.opcode
    say = f"{a.opcode} of {bits:#x} ({number(bits, type_)}) is {got:#x} ({number(got, type_)})"
    if is_nan(bits, type_):
        return "" if is_nan(got, type_) else say
    wanted = a.special.get(flushed(bits, type_) if ftz else bits, a.special.get(bits))
    if wanted is not None:
        good = is_nan(got, type_) if wanted == NAN else got == wanted
        return "" if good else f"{say}, not {wanted:#x}"
    x = number(flushed(bits, type_) if ftz else bits, type_)
    if x < a.low:
        return "" if is_nan(got, type_) or a.low < 0 else say
    if not a.low <= x <= a.high:
        return ""
    exact = a.exact(x)
    value = number(got, type_)
    precision, least, _ = FLOATS[type_]
    tiny = 2.0 ** (least - precision + 1) if not ftz else 2.0**least  # a flushed result may be 0 for less than this
    largest = number(INF[type_] - 1, type_)
    if abs(exact) > largest:
        return "" if math.isinf(value) or abs(value) == largest else f"{say}, not infinite"
    bound = max(a.relative * abs(exact), a.absolute, tiny) + abs(exact) * 2.0**-precision * (type_ in ("f16", "bf16"))
    return "" if abs(value - exact) <= bound else f"{say}: error {abs(value - exact):.3g}, at most {bound:.3g}"


def wrong_quotient(opcode: str, a: int, b: int, got: int) -> str:
    """div.approx: 2 ulp where 2^-126 <= |b| <= 2^126; beyond, 0, or NaN for an infinite a. div.full: 2 ulp."""
    if ".ftz" in opcode:
        a, b = flushed(a, "f32"), flushed(b, "f32")
    say = f"{opcode} {a:#x}, {b:#x} is {got:#x}"
    size = b & 0x7FFFFFFF
    minus = (a ^ b) & sign_bit("f32")
    if not is_nan(a, "f32") and not is_nan(b, "f32") and "approx" in opcode and 0x7E800000 < size < INF["f32"]:
        if a & 0x7FFFFFFF == INF["f32"]:
            return "" if is_nan(got, "f32") else f"{say}, not NaN"
        return "" if got == minus else f"{say}, not 0"
    if 0 < size < 0x00800000:
        return ""  # nothing is promised for a subnormal divisor
    wanted = evaluate("div.rn.f32", a, b)
    if wanted == NAN:
        return "" if is_nan(got, "f32") else f"{say}, not NaN"
    if ".ftz" in opcode and 0 < wanted & 0x7FFFFFFF <= 0x00800002 and got & 0x7FFFFFFF == 0:
        return ""
    return (
        ""
        if abs((got & 0x7FFFFFFF) - (wanted & 0x7FFFFFFF)) <= 2 and not (got ^ wanted) >> 31
        else f"{say}, not {wanted:#x}"
    )
