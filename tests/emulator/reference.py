"""What PTX instructions mean, in Python's integers and fractions: exact, one lane at a time, slow.

Operands and results are bits, as unsigned integers; a predicate is 0 or 1. NAN stands for any NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

BITS = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 64),
}
NAN = -1  # as an expected result: any NaN
FLOATS = {  # significand bits, least and greatest exponent
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "f32": (24, -126, 127),
    "f64": (53, -1022, 1023),
}


def evaluate(opcode: str, *operands: int) -> int:
    """The result of one instruction, as bits of its result type (two halves: `evaluate_pair`)."""
    parts = opcode.split(".")
    return MEANING[parts[0]](parts, *operands)


def evaluate_pair(opcode: str, *operands: int) -> tuple[int, int]:
    """(low, high) half of an instruction on f16x2 or bf16x2 operands, or of a packed conversion."""
    single = opcode.replace("f16x2", "f16")
    if single.startswith("cvt"):  # the first operand goes to the high half
        return evaluate(single, operands[1]), evaluate(single, operands[0])
    low, high = (evaluate(single, *(o >> shift & 0xFFFF for o in operands)) for shift in (0, 16))
    return low, high


def signed(bits: int, width: int) -> int:
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits


def number(bits: int, type_: str) -> int:
    """The integer that `bits` are in an integer type."""
    width = BITS[type_]
    return signed(bits, width) if type_[0] == "s" else bits & ((1 << width) - 1)


def cut(value: int, type_: str) -> int:
    return value & ((1 << BITS[type_]) - 1)


def limits(type_: str) -> tuple[int, int]:
    width = BITS[type_]
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if type_[0] == "s" else (0, (1 << width) - 1)


def clamp(value: int, type_: str) -> int:
    low, high = limits(type_)
    return min(max(value, low), high)


# -- floating point -----------------------------------------------------------------------------------------------------
INF = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF0000000000000}
ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000, "f64": 0x3FF0000000000000}


def sign_bit(type_: str) -> int:
    return 1 << (BITS[type_] - 1)


def is_nan(bits: int, type_: str) -> bool:
    return bits == NAN or bits & (sign_bit(type_) - 1) > INF[type_]


def is_inf(bits: int, type_: str) -> bool:
    return bits & (sign_bit(type_) - 1) == INF[type_]


def negative(bits: int, type_: str) -> bool:
    return bool(bits & sign_bit(type_))


def exact(bits: int, type_: str) -> Fraction:
    """The value of a finite float."""
    precision, least, _ = FLOATS[type_]
    fraction = bits & ((1 << (precision - 1)) - 1)
    exponent = (bits & (sign_bit(type_) - 1)) >> (precision - 1)
    if exponent:
        fraction |= 1 << (precision - 1)
    power = max(exponent, 1) - 1 + least - (precision - 1)
    value = Fraction(fraction) * Fraction(2) ** power
    return -value if negative(bits, type_) else value


def rounded(value: Fraction, type_: str, mode: str = "rn", minus_zero: bool = False) -> int:
    """The bits of `value` rounded; `minus_zero` says which zero a value of exactly zero is."""
    precision, least, greatest = FLOATS[type_]
    if value == 0:
        return sign_bit(type_) if minus_zero else 0
    minus = value < 0
    size = abs(value)
    exponent = max(_log2_floor(size), least)
    unit = Fraction(2) ** (exponent - (precision - 1))
    steps = _integer(size / unit, mode, minus)
    if steps == 1 << precision:
        steps, exponent = steps >> 1, exponent + 1
    if exponent > greatest:
        outward = mode == "rn" or (mode == "rp" and not minus) or (mode == "rm" and minus)
        bits = INF[type_] if outward else INF[type_] - 1
    elif steps < 1 << (precision - 1):  # subnormal, or zero
        bits = steps
    else:
        bits = ((exponent - least) << (precision - 1)) + steps
    return bits | (sign_bit(type_) if minus else 0)


def _log2_floor(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def _integer(size: Fraction, mode: str, minus: bool) -> int:
    """A non-negative number rounded to an integer; `minus`: it stands for a negative one."""
    low = math.floor(size)
    rest = size - low
    if rest == 0:
        return low
    up = {
        "rz": False,
        "rp": not minus,
        "rm": minus,
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low & 1),
    }
    return low + bool(up[mode])


def flushed(bits: int, type_: str) -> int:
    """.ftz"""
    if bits != NAN and 0 < bits & (sign_bit(type_) - 1) < 1 << (FLOATS[type_][0] - 1):
        return bits & sign_bit(type_)
    return bits


def saturated(bits: int, type_: str) -> int:
    if is_nan(bits, type_) or negative(bits, type_):
        return 0
    return min(bits, ONE[type_])


def _mode(parts: list[str]) -> str:
    return next((p for p in parts if p in ("rn", "rz", "rm", "rp")), "rn")


def _float(operation: Callable[..., int]) -> Callable[..., int]:
    """An operation on floats of the instruction's type, with .ftz and .sat around it."""

    def run(parts: list[str], *operands: int) -> int:
        type_ = parts[-1]
        if "ftz" in parts:
            operands = tuple(flushed(o, type_) for o in operands)
        result = operation(parts, type_, *operands)
        if "sat" in parts:
            result = saturated(result, type_)
        if "relu" in parts and result != NAN and negative(result, type_):
            result = 0
        return flushed(result, type_) if "ftz" in parts else result

    return run


def _sum(parts: list[str], type_: str, a: int, b: int) -> int:
    if is_nan(a, type_) or is_nan(b, type_):
        return NAN
    if is_inf(a, type_) or is_inf(b, type_):
        if is_inf(a, type_) and is_inf(b, type_) and a != b:
            return NAN
        return a if is_inf(a, type_) else b
    return _total(exact(a, type_), negative(a, type_), exact(b, type_), negative(b, type_), type_, _mode(parts))


def _total(x: Fraction, x_minus: bool, y: Fraction, y_minus: bool, type_: str, mode: str) -> int:
    """x + y; of opposite zeros, or numbers that cancel, the sum is -0 only under rm."""
    both = x_minus and y_minus
    neither = not x_minus and not y_minus
    return rounded(x + y, type_, mode, both or (mode == "rm" and not neither))


def _difference(parts: list[str], type_: str, a: int, b: int) -> int:
    return _sum(parts, type_, a, b ^ sign_bit(type_))


def _product(parts: list[str], type_: str, a: int, b: int) -> int:
    if is_nan(a, type_) or is_nan(b, type_):
        return NAN
    minus = negative(a, type_) != negative(b, type_)
    if is_inf(a, type_) or is_inf(b, type_):
        magnitudes = [x & (sign_bit(type_) - 1) for x in (a, b)]
        return NAN if 0 in magnitudes else INF[type_] | (sign_bit(type_) if minus else 0)
    return rounded(exact(a, type_) * exact(b, type_), type_, _mode(parts), minus)


def _fma(parts: list[str], type_: str, a: int, b: int, c: int) -> int:
    if any(is_nan(x, type_) for x in (a, b, c)):
        return NAN
    minus = negative(a, type_) != negative(b, type_)
    if is_inf(a, type_) or is_inf(b, type_):
        product = _product(parts, type_, a, b)
        return NAN if product == NAN or (is_inf(c, type_) and negative(c, type_) != minus) else product
    if is_inf(c, type_):
        return c
    product_value = exact(a, type_) * exact(b, type_)
    return _total(product_value, minus, exact(c, type_), negative(c, type_), type_, _mode(parts))


def _quotient(parts: list[str], type_: str, a: int, b: int) -> int:
    if is_nan(a, type_) or is_nan(b, type_):
        return NAN
    minus = sign_bit(type_) if negative(a, type_) != negative(b, type_) else 0
    zero_a, zero_b = (x & (sign_bit(type_) - 1) == 0 for x in (a, b))
    if (zero_a and zero_b) or (is_inf(a, type_) and is_inf(b, type_)):
        return NAN
    if zero_b or is_inf(a, type_):
        return INF[type_] | minus
    if is_inf(b, type_):
        return minus
    return rounded(exact(a, type_) / exact(b, type_), type_, _mode(parts), bool(minus))


def _root(parts: list[str], type_: str, a: int) -> int:
    if is_nan(a, type_):
        return NAN
    if a & (sign_bit(type_) - 1) == 0:
        return a
    if negative(a, type_):
        return NAN
    if is_inf(a, type_):
        return a
    # The root of an integer scaled up by 2^400, with a bit that says whether something is left over.
    value = exact(a, type_) * Fraction(4) ** 1400
    root = math.isqrt(int(value))
    sticky = 2 * root + (root * root != value)
    return rounded(Fraction(sticky, 2) / Fraction(2) ** 1400, type_, _mode(parts))


def _extremum(parts: list[str], type_: str, a: int, b: int) -> int:
    if is_nan(a, type_) or is_nan(b, type_):
        if "NaN" in parts or (is_nan(a, type_) and is_nan(b, type_)):
            return NAN
        result = b if is_nan(a, type_) else a
        return _with_sign(parts, type_, a, b, result)
    if "abs" in parts:
        first, second = (x & (sign_bit(type_) - 1) for x in (a, b))
    else:
        first, second = a, b
    # Sign and magnitude compare as integers do; -0 is below +0.
    order = sorted((first, second), key=lambda x: -(x & (sign_bit(type_) - 1)) - 1 if negative(x, type_) else x)
    return _with_sign(parts, type_, a, b, order[0] if parts[0] == "min" else order[1])


def _absolute(parts: list[str], type_: str, a: int) -> int:
    return NAN if is_nan(a, type_) else a & (sign_bit(type_) - 1)


def _negative(parts: list[str], type_: str, a: int) -> int:
    return NAN if is_nan(a, type_) else a ^ sign_bit(type_)


def _with_sign(parts: list[str], type_: str, a: int, b: int, result: int) -> int:
    if "xorsign" not in parts:
        return result
    return (result & (sign_bit(type_) - 1)) | ((a ^ b) & sign_bit(type_))


def _compare(kind: str, type_: str, a: int, b: int, ftz: bool = False) -> int:
    if type_ in FLOATS:
        if ftz:
            a, b = flushed(a, type_), flushed(b, type_)
        unordered = is_nan(a, type_) or is_nan(b, type_)
        if kind in ("num", "nan"):
            return int(unordered == (kind == "nan"))
        if unordered:
            return int(kind in ("equ", "neu", "ltu", "leu", "gtu", "geu"))
        kind = kind.removesuffix("u") if kind in ("equ", "neu", "ltu", "leu", "gtu", "geu") else kind
        x, y = _ordinal(a, type_), _ordinal(b, type_)
    else:
        unsigned = kind in ("lo", "ls", "hi", "hs") or type_[0] != "s"
        kind = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(kind, kind)
        x, y = (number(v, ("u" if unsigned else "s") + type_[1:]) for v in (a, b))
    return int({"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[kind])


def _ordinal(bits: int, type_: str) -> int:
    """An integer that orders the floats of a type; both zeros are 0."""
    size = bits & (sign_bit(type_) - 1)
    return -size if negative(bits, type_) else size


def _boolean(parts: list[str], first: int, c: int | None) -> int:
    join = next((p for p in parts[2:] if p in ("and", "or", "xor")), None)
    if join is None or c is None:
        return first
    return {"and": first & c, "or": first | c, "xor": first ^ c}[join]


def _setp(parts: list[str], a: int, b: int, c: int | None = None) -> int:
    return _boolean(parts, _compare(parts[1], parts[-1], a, b, "ftz" in parts), c)


def setp_pair(opcode: str, a: int, b: int, c: int | None = None) -> tuple[int, int]:
    """Both results of setp p|q."""
    parts = opcode.split(".")
    test = _compare(parts[1], parts[-1], a, b, "ftz" in parts)
    return _boolean(parts, test, c), _boolean(parts, 1 - test, c)


def _set(parts: list[str], a: int, b: int, c: int | None = None) -> int:
    to = parts[-2]
    true = ONE[to] if to in ONE else (1 << BITS[to]) - 1
    return true if _setp(parts, a, b, c) else 0


def _slct(parts: list[str], a: int, b: int, c: int) -> int:
    if parts[-1] == "f32":
        if "ftz" in parts:
            c = flushed(c, "f32")
        chosen = not is_nan(c, "f32") and _ordinal(c, "f32") >= 0
    else:
        chosen = number(c, "s32") >= 0
    return a if chosen else b


def _testp(parts: list[str], a: int) -> int:
    type_, size = parts[-1], a & (sign_bit(parts[-1]) - 1)
    least = 1 << (FLOATS[type_][0] - 1)
    return int(
        {
            "finite": size < INF[type_],
            "infinite": size == INF[type_],
            "number": size <= INF[type_],
            "notanumber": size > INF[type_],
            "normal": least <= size < INF[type_] or size == 0,
            "subnormal": 0 < size < least,
        }[parts[1]]
    )


# -- conversions --------------------------------------------------------------------------------------------------------
def _cvt(parts: list[str], a: int) -> int:
    to, source = parts[-2], parts[-1]
    if to == "tf32":
        return _tf32(parts, a)
    if source == "f32" and "ftz" in parts:
        a = flushed(a, source)
    if source in FLOATS:
        result = _from_float(parts, to, source, a)
    else:
        value = number(a, source)
        if to in FLOATS:
            result = rounded(Fraction(value), to, _mode(parts))
        else:
            result = cut(clamp(value, to) if "sat" in parts else value, to)
    if to in FLOATS and "sat" in parts:
        result = saturated(result, to)
    if "relu" in parts and result != NAN and negative(result, to):
        result = 0
    return flushed(result, to) if to == "f32" and "ftz" in parts else result


def _tf32(parts: list[str], a: int) -> int:
    """The upper 19 bits of an f32, rounded; rna: to nearest, ties away from zero."""
    if is_nan(a, "f32"):
        return NAN
    if is_inf(a, "f32"):
        bits = a
    else:
        low = a & 0x1FFF
        up = {"rna": low >= 0x1000, "rz": False, "rn": low > 0x1000 or (low == 0x1000 and a >> 13 & 1)}
        bits = (a - low) + 0x2000 * bool(up[parts[1]])
    return 0 if "relu" in parts and negative(bits, "f32") else bits


def _from_float(parts: list[str], to: str, source: str, a: int) -> int:
    integral = next((p for p in parts if p in ("rni", "rzi", "rmi", "rpi")), None)
    if to not in FLOATS:
        if is_nan(a, source):
            return 0 if source != "f64" and BITS[to] < 64 else 1 << (BITS[to] - 1)
        low, high = limits(to)
        if is_inf(a, source):
            return cut(low if negative(a, source) else high, to)
        assert integral is not None
        return cut(clamp(_whole(exact(a, source), integral), to), to)
    if is_nan(a, source):
        return NAN
    minus = negative(a, source)
    if is_inf(a, source):
        return INF[to] | (sign_bit(to) if minus else 0)
    value = exact(a, source)
    if integral is not None:
        value = Fraction(_whole(value, integral))
    return rounded(value, to, _mode(parts), minus)


def _whole(value: Fraction, mode: str) -> int:
    size = _integer(abs(value), mode[:2], value < 0)
    return -size if value < 0 else size


# -- integers -----------------------------------------------------------------------------------------------------------
def _integers(operation: Callable[..., int]) -> Callable[..., int]:
    """An operation on integers of the instruction's type, its result cut to that."""

    def run(parts: list[str], *operands: int) -> int:
        return cut(operation(parts, parts[-1], *(number(o, parts[-1]) for o in operands)), parts[-1])

    return run


def _add_integers(parts: list[str], type_: str, a: int, b: int) -> int:
    value = a + b if parts[0] == "add" else a - b
    return clamp(value, type_) if "sat" in parts else value


def _mul(parts: list[str], a: int, b: int) -> int:
    return _mad(parts, a, b, 0)


def _mad(parts: list[str], a: int, b: int, c: int) -> int:
    type_ = parts[-1]
    width = BITS[type_]
    product = number(a, type_) * number(b, type_)
    if "wide" in parts:
        return (product + c) & ((1 << 2 * width) - 1)
    return cut((product >> width if "hi" in parts else product) + c, type_)


def _mad24(parts: list[str], a: int, b: int, c: int = 0) -> int:
    x, y = (signed(v, 24) if parts[-1] == "s32" else v & 0xFFFFFF for v in (a, b))
    product = x * y
    return cut((product >> 16 if "hi" in parts else product) + c, "u32")


def _div(parts: list[str], type_: str, a: int, b: int) -> int:
    """Towards zero; by zero all ones, the remainder too."""
    if b == 0:
        return -1
    quotient = abs(a) // abs(b)
    if (a < 0) != (b < 0):
        quotient = -quotient
    return quotient if parts[0] == "div" else a - quotient * b


def _shift(parts: list[str], a: int, b: int) -> int:
    type_ = parts[-1]
    count = min(b & 0xFFFFFFFF, BITS[type_])
    return cut(a << count, type_) if parts[0] == "shl" else cut(number(a, type_) >> count, type_)


def _shf(parts: list[str], a: int, b: int, c: int) -> int:
    n = c & 31 if "wrap" in parts else min(c, 32)
    both = b << 32 | a
    return cut(both << n >> 32 if "l" in parts else both >> n, "u32")


def _bfe(parts: list[str], a: int, b: int, c: int) -> int:
    type_ = parts[-1]
    top, pos, length = BITS[type_] - 1, b & 255, c & 255
    sign = a >> min(pos + length - 1, top) & 1 if type_[0] == "s" and length else 0
    bits = (a >> (pos + i) & 1 if i < length and pos + i <= top else sign for i in range(top + 1))
    return sum(bit << i for i, bit in enumerate(bits))


def _bfi(parts: list[str], a: int, b: int, c: int, d: int) -> int:
    top, pos, length = BITS[parts[-1]] - 1, c & 255, d & 255
    for i in range(length):
        if pos + i <= top:
            b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
    return b


def _bmsk(parts: list[str], a: int, b: int) -> int:
    if "wrap" in parts:
        a, b = a & 31, b & 31
    return cut(((1 << min(b, 32)) - 1) << a, "b32") if a < 32 else 0


def _bfind(parts: list[str], a: int) -> int:
    width = BITS[parts[-1]]
    if parts[-1][0] == "s" and a >> (width - 1):
        a ^= (1 << width) - 1
    place = a.bit_length() - 1
    if place >= 0 and "shiftamt" in parts:
        place = width - 1 - place
    return place & 0xFFFFFFFF


def _prmt(parts: list[str], a: int, b: int, c: int) -> int:
    both, result = b << 32 | a, 0
    for n in range(4):
        selector = c >> 4 * n & 15
        byte = both >> 8 * (selector & 7) & 255
        if selector & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << 8 * n
    return result


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def _dp4a(parts: list[str], a: int, b: int, c: int) -> int:
    total = c
    for n in range(4):
        x, y = (number(v >> 8 * n, kind[0] + "8") for v, kind in zip((a, b), parts[1:3], strict=True))
        total += x * y
    return cut(total, "u32")


def _dp2a(parts: list[str], a: int, b: int, c: int) -> int:
    total, first = c, 16 if parts[1] == "hi" else 0
    for n in range(2):
        total += number(a >> 16 * n, parts[2][0] + "16") * number(b >> first + 8 * n, parts[3][0] + "8")
    return cut(total, "u32")


def _bits(operation: Callable[..., int]) -> Callable[..., int]:
    return lambda parts, *operands: cut(operation(*operands), parts[-1])


def _both(on_integers: Callable[..., int], on_floats: Callable[..., int]) -> Callable[..., int]:
    return lambda parts, *operands: (on_floats if parts[-1] in FLOATS else on_integers)(parts, *operands)


MEANING: dict[str, Callable[..., int]] = {
    "add": _both(_integers(_add_integers), _float(_sum)),
    "sub": _both(_integers(_add_integers), _float(_difference)),
    "mul": _both(_mul, _float(_product)),
    "mad": _both(_mad, _float(_fma)),
    "fma": _float(_fma),
    "mul24": _mad24,
    "mad24": _mad24,
    "div": _both(_integers(_div), _float(_quotient)),
    "rem": _integers(_div),
    "rcp": _float(lambda parts, type_, a: _quotient(parts, type_, ONE[type_], a)),
    "sqrt": _float(_root),
    "min": _both(_integers(lambda parts, type_, a, b: min(a, b)), _float(_extremum)),
    "max": _both(_integers(lambda parts, type_, a, b: max(a, b)), _float(_extremum)),
    "abs": _both(_integers(lambda parts, type_, a: abs(a)), _float(_absolute)),
    "neg": _both(_integers(lambda parts, type_, a: -a), _float(_negative)),
    "copysign": lambda parts, a, b: (b & (sign_bit(parts[-1]) - 1)) | (a & sign_bit(parts[-1])),
    "testp": _testp,
    "sad": _integers(lambda parts, type_, a, b, c: abs(a - b) + c),
    "and": _bits(lambda a, b: a & b),
    "or": _bits(lambda a, b: a | b),
    "xor": _bits(lambda a, b: a ^ b),
    "not": _bits(lambda a: ~a),
    "cnot": _bits(lambda a: int(a == 0)),
    "shl": _shift,
    "shr": _shift,
    "shf": _shf,
    "bfe": _bfe,
    "bfi": _bfi,
    "bmsk": _bmsk,
    "clz": lambda parts, a: BITS[parts[-1]] - a.bit_length(),
    "popc": lambda parts, a: a.bit_count(),
    "brev": lambda parts, a: int(f"{a:0{BITS[parts[-1]]}b}"[::-1], 2),
    "bfind": _bfind,
    "prmt": _prmt,
    "dp4a": _dp4a,
    "dp2a": _dp2a,
    "setp": _setp,
    "set": _set,
    "selp": lambda parts, a, b, c: a if c else b,
    "slct": _slct,
    "cvt": _cvt,
    "mov": lambda parts, a: a,
}
