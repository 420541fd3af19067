"""f16 and bf16, alone and in pairs: bit for bit what exact arithmetic (fractions) gives, rounded once."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.emulator import harness

U16, U32 = np.uint16, np.uint32
NAN = 0x7FFF


@dataclass(frozen=True)
class Format:
    """A 16-bit float: precision with the hidden bit, exponent of the smallest normal number."""

    precision: int
    smallest: int

    @property
    def infinity(self) -> int:
        return 0x8000 - (1 << (self.precision - 1))

    def value(self, bits: int) -> float:
        low = self.precision - 1
        size, sign = bits & 0x7FFF, -1.0 if bits & 0x8000 else 1.0
        if size >= self.infinity:
            return sign * math.inf if size == self.infinity else math.nan
        exponent, fraction = size >> low, size & ((1 << low) - 1)
        if exponent:
            fraction |= 1 << low
        return sign * math.ldexp(fraction, self.smallest - low + max(exponent - 1, 0))

    def bits(self, x: Fraction, mode: str, minus_zero: bool) -> int:
        """The number next to `x` in the direction of the rounding mode."""
        if x == 0:
            return 0x8000 if minus_zero else 0
        negative, x = x < 0, abs(x)
        exponent = x.numerator.bit_length() - x.denominator.bit_length()
        exponent -= x < Fraction(2) ** exponent
        exponent = max(exponent, self.smallest)
        quotient = x / Fraction(2) ** (exponent - self.precision + 1)
        whole = math.floor(quotient)
        rest = quotient - whole
        away = {"rz": False, "rm": negative, "rp": not negative}.get(mode)
        if away is None:
            whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
        else:
            whole += away and rest > 0
        found = ((exponent - self.smallest) << (self.precision - 1)) + whole
        if found >= self.infinity:
            found = self.infinity - (away is False)
        return found | (0x8000 if negative else 0)

    def of(self, x: float | Fraction, mode: str = "rn", minus_zero: bool = False) -> int:
        if isinstance(x, float):
            if math.isnan(x):
                return NAN
            if math.isinf(x):
                return self.infinity | (0x8000 if x < 0 else 0)
            minus_zero = math.copysign(1, x) < 0
        return self.bits(Fraction(x), mode, minus_zero)

    def flushed(self, bits: int) -> int:
        return bits if bits & self.infinity else bits & 0x8000


FORMATS = {"f16": Format(11, -14), "bf16": Format(8, -126)}


def corners(kind: str) -> list[int]:
    inf = FORMATS[kind].infinity
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    step = 1 << (FORMATS[kind].precision - 1)  # the smallest normal number
    positive = [0, 1, 2, step - 1, step, step + 1, one - 1, one, one + 1, inf - 1, inf, inf + 1, NAN, one + step]
    return [s | p for p in positive for s in (0, 0x8000)]


def operands(kind: str, count: int, size: int = 480) -> list[np.ndarray]:
    """Every pair of corner values, then random bits, then numbers of like size, where sums cancel and round."""
    rng = np.random.default_rng()
    special = corners(kind)
    pairs = [(a, b) for a in special for b in special]
    columns = [list(c) for c in zip(*pairs, strict=True)]
    columns += [list(rng.permutation(columns[0])) for _ in range(count - 2)]
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    spread = 6 << (FORMATS[kind].precision - 1)
    found = []
    for column in columns[:count]:
        anything = rng.integers(0, 1 << 16, size // 2)
        near = one + rng.integers(-spread, spread, size // 2) | rng.integers(0, 2, size // 2) << 15
        found.append(np.concatenate([column, anything, near]).astype(U16))
    padding = -len(found[0]) % 64
    return [np.concatenate([f, f[:padding]]) for f in found]


def kernel(instruction: str, inputs: int, packed: bool, outputs: int = 1) -> harness.Kernel:
    """`instruction` with %d and %a %b %c for the operands, on each element (pair of elements)."""
    bits = 32 if packed else 16
    names = "abc"[:inputs]
    loads = "\n".join(f"ld.param.u64 %p, [{n}]; add.u64 %p, %p, %o; ld.global.b{bits} %{n}, [%p];" for n in names)
    return harness.ptx(
        f"""
        .reg .b{bits} %a, %b, %c, %d;
        .reg .b32 %t, %u;
        .reg .b64 %p, %o;
        .reg .pred %q, %r;
        mov.u32 %t, %ctaid.x;
        mov.u32 %u, %ntid.x;
        mul.lo.u32 %t, %t, %u;
        mov.u32 %u, %tid.x;
        add.u32 %t, %t, %u;
        mul.wide.u32 %o, %t, {bits // 8};
        {loads}
        {instruction}
        ld.param.u64 %p, [out];
        add.u64 %p, %p, %o;
        st.global.b{bits} [%p], %d;
        ret;""",
        params=", ".join(f".param .u64 {n}" for n in ("out", *names)),
    )  # fmt: skip


def launched(instruction: str, values: list[np.ndarray], packed: bool) -> np.ndarray:
    out = harness.poisoned(len(values[0]), U16)
    threads = len(out) // (2 if packed else 1)
    harness.run(kernel(instruction, len(values), packed), threads // 32, 32, out, *values)
    return out


def same(found: np.ndarray, expected: list[int], *inputs: np.ndarray) -> None:
    wrong = np.flatnonzero(found != np.array(expected, U16))
    if len(wrong):
        n = wrong[0]
        given = ", ".join(f"{v[n]:#06x}" for v in inputs)
        pytest.fail(f"{len(wrong)} of {len(found)} wrong: ({given}) gave {found[n]:#06x}, not {expected[n]:#06x}")


def exact(op: str, x: tuple[float, ...]) -> tuple[float | Fraction, bool]:
    """(the exact result, or what IEEE gives for infinities and NaN; the sign if it is zero)"""
    a, b = x[0], x[1]
    with np.errstate(all="ignore"):
        f = [np.float64(v) for v in x]
        ieee = {"add": f[0] + f[1], "sub": f[0] - f[1], "mul": f[0] * f[1]}.get(op)
        if op == "fma":
            ieee = f[0] * f[1] + f[2]
    assert ieee is not None
    if not all(map(math.isfinite, x)):
        return float(ieee), False
    u, v = Fraction(a), Fraction(b)
    result = {"add": u + v, "sub": u - v, "mul": u * v}.get(op)
    if op == "fma":
        result = u * v + Fraction(x[2])
    assert result is not None
    return result, bool(np.signbit(ieee))


def modelled(op: str, kind: str, bits: tuple[int, ...], mods: set[str]) -> int:
    form = FORMATS[kind]
    if "ftz" in mods:
        bits = tuple(map(form.flushed, bits))
    result, minus = exact(op, tuple(map(form.value, bits)))
    is_nan = isinstance(result, float) and math.isnan(result)
    if "sat" in mods:
        if is_nan or result <= 0:
            return 0
        result = min(result, Fraction(1))
    if "relu" in mods and not is_nan and result <= 0:
        return 0
    found = form.of(result, minus_zero=minus)
    if "relu" in mods and found == 0x8000:
        return 0
    return form.flushed(found) if "ftz" in mods and not is_nan else found


ARITHMETIC = [
    *[f"{op}{m}.{k}" for op in ("add", "sub", "mul") for m in ("", ".rn", ".ftz", ".sat", ".rn.ftz.sat")
      for k in ("f16", "f16x2")],
    *[f"{op}{m}.{k}" for op in ("add", "sub", "mul") for m in ("", ".rn") for k in ("bf16", "bf16x2")],
    *[f"fma.rn{m}.{k}" for m in ("", ".ftz", ".sat", ".ftz.sat", ".relu", ".ftz.relu") for k in ("f16", "f16x2")],
    *[f"fma.rn{m}.{k}" for m in ("", ".relu") for k in ("bf16", "bf16x2")],
]  # fmt: skip


@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_arithmetic_rounds_once(opcode: str) -> None:
    op, *mods, type_ = opcode.split(".")
    packed, kind = type_.endswith("x2"), type_.removesuffix("x2")
    count = 3 if op == "fma" else 2
    values = operands(kind, count)
    found = launched(f"{opcode} %d, %a, %b{', %c' if count == 3 else ''};", values, packed)
    expected = [modelled(op, kind, tuple(map(int, row)), set(mods)) for row in zip(*values, strict=True)]
    same(found, expected, *values)


def test_fma_where_rounding_twice_differs() -> None:
    """1 + 2^-11 exactly between two numbers, tipped by a product far below: f32 would lose it."""
    one, tiny = 0x3C00, 0x0001  # 2^-24
    a = np.array([0x1000, 0x1000, 0x9000, 0x1000] * 16, U16)  # 2^-11
    form = FORMATS["f16"]
    c = np.array([one, one + 1, one, 0xBC00] * 16, U16)
    b = np.array([0x3C01, 0x3C01, 0x3C01, 0x3BFF] * 16, U16)
    assert form.value(tiny) == 2.0**-24
    found = launched("fma.rn.f16 %d, %a, %b, %c;", [a, b, c], False)
    expected = [modelled("fma", "f16", tuple(map(int, row)), set()) for row in zip(a, b, c, strict=True)]
    same(found, expected, a, b, c)
    assert expected[0] == one + 1


def extreme(op: str, kind: str, bits: tuple[int, int], mods: set[str]) -> int:
    form = FORMATS[kind]
    a, b = map(form.flushed, bits) if "ftz" in mods else bits
    sign = 0
    if "xorsign" in mods:
        sign = (a ^ b) & 0x8000
        a, b = a & 0x7FFF, b & 0x7FFF
    x, y = form.value(a), form.value(b)
    if math.isnan(x) or math.isnan(y):
        if "NaN" in mods or (math.isnan(x) and math.isnan(y)):
            return NAN
        return (b if math.isnan(x) else a) | sign

    def key(v: int) -> tuple[float, float]:
        return form.value(v), math.copysign(1, form.value(v))  # -0 below +0

    return (min if op == "min" else max)((a, b), key=key) | sign


@pytest.mark.parametrize("type_", ["f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize("mods", ["", ".NaN", ".ftz", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max(op: str, mods: str, type_: str) -> None:
    if "ftz" in mods and type_.startswith("b"):
        mods = mods.replace(".ftz", "")  # there is none for bf16
    kind = type_.removesuffix("x2")
    values = operands(kind, 2)
    found = launched(f"{op}{mods}.{type_} %d, %a, %b;", values, type_ != kind)
    expected = [extreme(op, kind, (int(a), int(b)), set(mods.split("."))) for a, b in zip(*values, strict=True)]
    same(found, expected, *values)


@pytest.mark.parametrize("type_", ["f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize("op", ["neg", "abs", "neg.ftz", "abs.ftz"])
def test_sign(op: str, type_: str) -> None:
    kind = type_.removesuffix("x2")
    if kind == "bf16":
        op = op.split(".")[0]
    (a,) = operands(kind, 2)[:1]
    found = launched(f"{op}.{type_} %d, %a;", [a], type_ != kind)
    start = [FORMATS[kind].flushed(int(v)) if "ftz" in op else int(v) for v in a]
    expected = [v ^ 0x8000 if op.startswith("neg") else v & 0x7FFF for v in start]
    numbers = np.array([not math.isnan(FORMATS[kind].value(int(v))) for v in a])
    same(found[numbers], [e for e, n in zip(expected, numbers, strict=True) if n], a[numbers])
    assert all(math.isnan(FORMATS[kind].value(int(v))) for v in found[~numbers])


ORDERED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
           "ge": operator.ge}  # fmt: skip


def holds(test: str, a: float, b: float) -> bool:
    unordered = math.isnan(a) or math.isnan(b)
    if test in ("num", "nan"):
        return unordered is (test == "nan")
    if test.endswith("u") and test[:-1] in ORDERED:
        return unordered or ORDERED[test[:-1]](a, b)
    return not unordered and ORDERED[test](a, b)


TESTS = [*ORDERED, *(t + "u" for t in ORDERED), "num", "nan"]


@pytest.mark.parametrize("type_", ["f16", "f16x2", "bf16", pytest.param("bf16x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("test", TESTS)
def test_setp(test: str, type_: str) -> None:
    kind = type_.removesuffix("x2")
    values = operands(kind, 2)
    if type_ == kind:
        text = f"setp.{test}.{type_} %q, %a, %b; selp.b16 %d, 1, 0, %q;"
    else:
        text = f"""setp.{test}.{type_} %q|%r, %a, %b; selp.b32 %d, 1, 0, %q; @%r or.b32 %d, %d, 0x10000;"""
    found = launched(text, values, type_ != kind)
    form = FORMATS[kind]
    same(found, [int(holds(test, form.value(int(a)), form.value(int(b)))) for a, b in zip(*values, strict=True)],
         *values)  # fmt: skip


@pytest.mark.parametrize("type_", ["f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize("test", ["lt", "geu"])
def test_set(test: str, type_: str) -> None:
    kind = type_.removesuffix("x2")
    values, form = operands(kind, 2), FORMATS[kind]
    found = launched(f"set.{test}.{type_}.{type_} %d, %a, %b;", values, type_ != kind)
    one = form.of(1.0)
    same(found, [one * holds(test, form.value(int(a)), form.value(int(b))) for a, b in zip(*values, strict=True)],
         *values)  # fmt: skip


# -- conversions ------------------------------------------------------------------------------------------------------
def convert(opcode: str, source: np.ndarray, to: np.dtype, width: int, reads: int | None = None) -> np.ndarray:
    """`cvt` of each element; `width` bits of register for the result."""
    reads = reads or 8 * source.itemsize
    register = f"f{reads}" if source.dtype.kind == "f" and reads > 16 else f"b{max(reads, 16)}"
    out = harness.poisoned(len(source), to)
    target = f"f{width}" if to.kind == "f" and width > 16 else f"b{width}"
    compiled = harness.ptx(
        f"""
        .reg .{register} %a;
        .reg .{target} %d;
        .reg .b32 %t, %u;
        .reg .b64 %p, %o;
        mov.u32 %t, %ctaid.x;
        mov.u32 %u, %ntid.x;
        mul.lo.u32 %t, %t, %u;
        mov.u32 %u, %tid.x;
        add.u32 %t, %t, %u;
        ld.param.u64 %p, [a];
        mul.wide.u32 %o, %t, {reads // 8};
        add.u64 %p, %p, %o;
        ld.global.{"b" if register[0] == "b" else "f"}{reads} %a, [%p];
        {opcode} %d, %a;
        ld.param.u64 %p, [out];
        mul.wide.u32 %o, %t, {to.itemsize};
        add.u64 %p, %p, %o;
        st.global.{"f" if target[0] == "f" else "b"}{8 * to.itemsize} [%p], %d;
        ret;""",
        params=".param .u64 out, .param .u64 a",
    )
    assert len(source) % 32 == 0
    harness.run(compiled, len(source) // 32, 32, out, source)
    return out


def floats(kind: str, dtype: type, count: int = 600) -> np.ndarray:
    """Neighbourhoods of the 16-bit numbers and of the middles between them, and anything else."""
    rng = np.random.default_rng()
    form = FORMATS[kind]
    bits = [*corners(kind), *rng.integers(0, 1 << 16, count)]
    numbers = []
    for b in bits:
        x = form.value(int(b))
        numbers.append(x)
        if math.isfinite(x):
            middle = (x + form.value(int(b) ^ 1)) / 2 if math.isfinite(form.value(int(b) ^ 1)) else x
            with np.errstate(all="ignore"):
                near = dtype(middle)
                numbers += [near, np.nextafter(near, dtype(np.inf)), np.nextafter(near, dtype(-np.inf))]
    edge = form.value(form.infinity - 1)
    numbers += [edge * (1 + 2.0**-n) for n in range(4, 14)] + [1e38, -1e38, 1e-45, -1e-45, 1e-60]
    with np.errstate(all="ignore"):
        found = np.array(numbers, dtype=dtype)
    return found[: len(found) // 32 * 32]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_convert_from_float(kind: str, source: str, mode: str) -> None:
    x = floats(kind, np.float32 if source == "f32" else np.float64)
    found = convert(f"cvt.{mode}.{kind}.{source}", x, np.dtype(U16), 16)
    expected = [FORMATS[kind].of(float(v), mode) for v in x]
    same(found, expected, x.view(U32 if source == "f32" else np.uint64))


@pytest.mark.parametrize("mods", [".relu", ".sat"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_convert_with_relu_or_saturation(kind: str, mods: str) -> None:
    x = floats(kind, np.float32)
    found = convert(f"cvt.rn{mods}.{kind}.f32", x, np.dtype(U16), 16)
    expected = []
    for v in map(float, x):
        if math.isnan(v):
            expected.append(0 if mods == ".sat" else NAN)
        else:
            expected.append(FORMATS[kind].of(min(max(v, 0.0), 1.0 if mods == ".sat" else math.inf)) & 0x7FFF)
    same(found, expected, x.view(U32))


@pytest.mark.parametrize("mode", ["rn", "rz", "rn.relu"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_convert_to_a_pair_puts_the_first_operand_high(kind: str, mode: str) -> None:
    x = floats(kind, np.float32)
    x = np.concatenate([x, x[::-1]])
    out = harness.poisoned(len(x), U16)
    compiled = harness.ptx(
        f"""
        .reg .f32 %a, %b;
        .reg .b32 %t, %u, %d;
        .reg .b64 %p, %o;
        mov.u32 %t, %ctaid.x;
        shl.b32 %t, %t, 5;
        mov.u32 %u, %tid.x;
        add.u32 %t, %t, %u;
        ld.param.u64 %p, [a];
        mul.wide.u32 %o, %t, 8;
        add.u64 %p, %p, %o;
        ld.global.v2.f32 {{%a, %b}}, [%p];
        cvt.{mode}.{kind}x2.f32 %d, %a, %b;
        ld.param.u64 %p, [out];
        mul.wide.u32 %o, %t, 4;
        add.u64 %p, %p, %o;
        st.global.b32 [%p], %d;
        ret;""",
        params=".param .u64 out, .param .u64 a",
    )
    harness.run(compiled, len(x) // 64, 32, out, x)
    expected = [FORMATS[kind].of(float(v), mode[:2]) for v in x]
    if "relu" in mode:
        expected = [e if e == NAN or not e & 0x8000 else 0 for e in expected]
    same(out.reshape(-1, 2)[:, ::-1].ravel(), expected, x.view(U32))


@pytest.mark.parametrize("to", ["f32", "f64"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_convert_to_float_is_exact(kind: str, to: str) -> None:
    bits = np.arange(1 << 16, dtype=U16)
    dtype = np.dtype(np.float32 if to == "f32" else np.float64)
    found = convert(f"cvt.{to}.{kind}", bits, dtype, 8 * dtype.itemsize)
    expected = np.array([FORMATS[kind].value(int(b)) for b in bits], dtype)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found)[~np.isnan(found)], np.signbit(expected)[~np.isnan(found)])


INTEGERS = {f"{s}{n}": np.dtype(f"{'i' if s == 's' else 'u'}{n // 8}") for s in "su" for n in (8, 16, 32, 64)}
ROUND: dict[str, Callable[[float], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def conversions(modes: Iterable[str]) -> Any:
    """Kind, integer type and rounding; narrow integers of bf16 only with the slow tests."""
    cases = [(kind, integer, mode) for kind in FORMATS for integer in INTEGERS for mode in modes]
    slow = {c: [pytest.mark.slow] * (c[0] == "bf16" and c[1][1:] in ("8", "16")) for c in cases}
    return pytest.mark.parametrize(("kind", "integer", "mode"), [pytest.param(*c, marks=slow[c]) for c in cases])


@conversions(ROUND)
def test_convert_to_integer_saturates(kind: str, integer: str, mode: str) -> None:
    bits = np.concatenate([corners(kind), np.random.default_rng().integers(0, 1 << 16, 3044)]).astype(U16)
    bits = bits[: len(bits) // 32 * 32]
    dtype = INTEGERS[integer]
    found = convert(f"cvt.{mode}.{integer}.{kind}", bits, dtype, max(8 * dtype.itemsize, 16))
    limits = np.iinfo(dtype)
    expected = []
    for b in bits:
        x = FORMATS[kind].value(int(b))
        if math.isnan(x):  # 0, or the sign bit alone where the integer has 64 bits
            expected.append(0 if dtype.itemsize < 8 else int(limits.min) or 1 << 63)
        elif math.isinf(x):
            expected.append(limits.max if x > 0 else limits.min)
        else:
            expected.append(min(max(ROUND[mode](x), int(limits.min)), int(limits.max)))
    np.testing.assert_array_equal(found, np.array(expected, dtype))


@conversions(["rn", "rz", "rm", "rp"])
def test_convert_from_integer(kind: str, integer: str, mode: str) -> None:
    rng = np.random.default_rng()
    dtype = INTEGERS[integer]
    limits = np.iinfo(dtype)
    bits = 8 * dtype.itemsize
    powers = [s * (1 << n) + d for n in range(bits) for d in (-1, 0, 1) for s in (1, -1)]
    halves = [((1 << m) + (1 << n)) + d for m in range(8, bits) for n in range(max(m - 13, 0), m) for d in (-1, 0, 1)]
    anything = [int(v) >> int(s) for v, s in zip(rng.integers(limits.min, limits.max, 999, dtype=dtype, endpoint=True),
                                                   rng.integers(0, bits, 999), strict=True)]  # fmt: skip
    x = np.array([v for v in [*powers, *halves, *anything] if limits.min <= v <= limits.max], dtype)
    x = np.concatenate([x, x[: -len(x) % 32]])
    found = convert(f"cvt.{mode}.{kind}.{integer}", x, np.dtype(U16), 16)
    same(found, [FORMATS[kind].of(Fraction(int(v)), mode) for v in x], x.astype(np.uint64))


@pytest.mark.parametrize("mode", ROUND)
def test_round_to_an_integer_and_stay_f16(mode: str) -> None:
    (a,) = operands("f16", 2)[:1]
    found = launched(f"cvt.{mode}.f16.f16 %d, %a;", [a], False)
    form, expected = FORMATS["f16"], []
    for b in map(int, a):
        x = form.value(b)
        expected.append(form.of(x) if not math.isfinite(x) else form.of(math.copysign(float(ROUND[mode](x)), x)))
    same(found, expected, a)


def test_tf32_rounds_to_10_bits_ties_away() -> None:
    rng = np.random.default_rng()
    bits = rng.integers(0, 1 << 32, 4096, dtype=np.uint64).astype(U32)
    bits[:1024] = bits[:1024] & 0xFFFFE000 | rng.choice([0, 0xFFF, 0x1000, 0x1001, 0x1FFF], 1024)
    bits[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x1000, 0x80000FFF]
    found = convert("cvt.rna.tf32.f32", bits.view(np.float32), np.dtype(U32), 32)
    number = ~np.isnan(bits.view(np.float32))
    expected = (bits.astype(np.uint64) + 0x1000 & 0xFFFFE000).astype(U32)
    np.testing.assert_array_equal(found[number] & 0xFFFFE000, expected[number])
    assert np.isnan(found[~number].view(np.float32)).all()


# -- approximations ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("opcode", "relative", "absolute"),
    [
        ("ex2.approx.f16", 2**-9.9, 2**-24), ("ex2.approx.f16x2", 2**-9.9, 2**-24),
        ("ex2.approx.ftz.bf16", 2**-7, 2**-126), ("ex2.approx.ftz.bf16x2", 2**-7, 2**-126),
        ("tanh.approx.f16", 0, 2**-10.987), ("tanh.approx.f16x2", 0, 2**-10.987),
        ("tanh.approx.bf16", 0, 2**-8), ("tanh.approx.bf16x2", 0, 2**-8),
    ],
)  # fmt: skip
def test_approximations_are_within_the_bounds_of_the_isa(opcode: str, relative: float, absolute: float) -> None:
    type_ = opcode.split(".")[-1]
    kind = type_.removesuffix("x2")
    (a,) = operands(kind, 2)[:1]
    found = launched(f"{opcode} %d, %a;", [a], type_ != kind)
    form = FORMATS[kind]
    for b, r in zip(map(int, a), map(int, found), strict=True):
        x, y = form.value(b), form.value(r)
        if math.isnan(x):
            assert math.isnan(y)
            continue
        right = math.tanh(x) if opcode.startswith("tanh") else 2.0 ** min(x, 1000.0) if x > -1000 else 0.0
        if right >= form.value(form.infinity - 1):
            assert y >= form.value(form.infinity - 1) * (1 - relative)
        else:
            assert abs(y - right) <= relative * right + absolute, (x, y, right)


# -- through CUDA's own types -----------------------------------------------------------------------------------------
def test_cuda_half_and_bfloat_types() -> None:
    source = """#include <cuda_fp16.h>
    #include <cuda_bf16.h>
    __global__ void k(__half2* o, const __half2* a, const __half2* b, __nv_bfloat16* p, const __nv_bfloat16* c) {
        int i = threadIdx.x;
        o[i] = __hfma2(a[i], b[i], __float2half2_rn(1.5f));
        o[i + 64] = __hlt2(a[i], b[i]);
        o[i + 128] = __lows2half2(a[i], b[i]);
        p[i] = __hmul(c[i], c[i ^ 1]) + __float2bfloat16(0.25f);
    }"""
    rng = np.random.default_rng()
    a, b = (rng.standard_normal((64, 2)).astype(np.float16) for _ in range(2))
    c = (rng.standard_normal(64).astype(np.float32).view(U32) >> 16).astype(U16)
    o, p = harness.poisoned((192, 2), np.float16), harness.poisoned(64, U16)
    harness.run(harness.cuda(source), 1, 64, o, a, b, p, c)
    form, bform = FORMATS["f16"], FORMATS["bf16"]
    fma = [form.of(Fraction(float(x)) * Fraction(float(y)) + Fraction(3, 2))
           for x, y in zip(a.ravel(), b.ravel(), strict=True)]  # fmt: skip
    np.testing.assert_array_equal(o[:64].view(U16).ravel(), fma)
    np.testing.assert_array_equal(o[64:128], (a < b).astype(np.float16))
    np.testing.assert_array_equal(o[128:], np.stack([a[:, 0], b[:, 0]], 1))
    for i in range(64):
        x, y = bform.value(int(c[i])), bform.value(int(c[i ^ 1]))
        twice = bform.of(Fraction(bform.value(bform.of(Fraction(x) * Fraction(y)))) + Fraction(1, 4))
        assert int(p[i]) in (twice, bform.of(Fraction(x) * Fraction(y) + Fraction(1, 4)))
