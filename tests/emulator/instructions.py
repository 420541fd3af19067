"""Runs many instructions, each on many operands, in one kernel; and which opcodes there are to run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.emulator import harness
from tests.emulator.reference import (
    BITS,
    FLOATS,
    INF,
    NAN,
    ONE,
    evaluate,
    evaluate_pair,
    is_nan,
    limits,
    lop3,
    sign_bit,
)

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
WORDS = ("b16", "b32", "b64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
ROUNDINGS = ("", ".rn", ".rz", ".rm", ".rp")
FORMS = ("vector", "uniform")  # every lane its own operands; all lanes the same ones, which is scalar code


@dataclass(frozen=True)
class Signature:
    results: tuple[str, ...]
    operands: tuple[str, ...]


def signature(opcode: str) -> Signature:
    """Types of what an instruction gives and takes; `opcode` may end in a blank and literal last operands."""
    parts = opcode.split(" ")[0].split(".")
    base, type_ = parts[0], parts[-1]
    joined = ("pred",) if {"and", "or", "xor"} & set(parts[2:]) and base in ("set", "setp") else ()
    wide = f"{type_[0]}{2 * BITS[type_]}" if "wide" in parts else type_
    if base in ("shl", "shr"):
        return Signature((type_,), (type_, "u32"))
    if base in ("mul", "mul24"):
        return Signature((wide,), (type_, type_))
    if base in ("mad", "mad24"):
        return Signature((wide,), (type_, type_, wide))
    if base in ("bfe", "bfi"):
        return Signature((type_,), (type_,) * (2 if base == "bfi" else 1) + ("u32", "u32"))
    if base in ("clz", "popc", "bfind"):
        return Signature(("u32",), (type_,))
    if base == "setp":
        pair = (parts[1] in COMPARISONS and type_ == "s32") or type_.endswith("x2")
        return Signature(("pred", "pred") if pair else ("pred",), (type_, type_, *joined))
    if base == "set":
        return Signature((parts[-2],), (type_, type_, *joined))
    if base == "selp":
        return Signature((type_,), (type_, type_, "pred"))
    if base == "slct":
        return Signature((parts[-2],), (parts[-2], parts[-2], type_))
    if base == "testp":
        return Signature(("pred",), (type_,))
    if base == "cvt":
        return Signature((parts[-2],), (type_, type_) if parts[-2].endswith("x2") else (type_,))
    if base in ("dp4a", "dp2a"):
        return Signature(("u32",), ("u32", "u32", "u32"))
    return Signature((type_,), (type_,) * _COUNT.get(base, 2))


_COUNT = {
    **dict.fromkeys(
        ["abs", "neg", "not", "cnot", "brev", "mov", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"], 1
    ),
    **dict.fromkeys(["fma", "sad", "shf", "prmt", "lop3"], 3),
}
_REGISTER = {1: "pred", 8: "b16", 16: "b16", 32: "b32", 64: "b64"}  # 8-bit values live in 16-bit registers


def register_type(type_: str) -> str:
    return type_ if type_ in ("f32", "f64") else _REGISTER[BITS[type_]]


def kernel_of(opcodes: Sequence[str], form: str) -> harness.Kernel:
    """For opcode n: operands at in[n][place][row], results at out[n][place][row], 8 bytes each."""
    index = "mov.u32 %t0, %ctaid.x; mov.u32 %t1, %ntid.x; mov.u32 %t2, %tid.x; mad.lo.s32 %row, %t0, %t1, %t2;"
    if form == "uniform":
        index = "mov.u32 %row, %ctaid.x;"
    lines = [
        ".reg .b64 %in, %out, %i, %o, %step, %wide; .reg .b32 %row, %t<4>, %rows; .reg .pred %z;",
        "ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; ld.param.u32 %rows, [rows];",
        "cvta.to.global.u64 %in, %in; cvta.to.global.u64 %out, %out; mul.wide.u32 %step, %rows, 8;",
        index,
        "mul.wide.u32 %wide, %row, 8; add.s64 %i, %in, %wide; add.s64 %o, %out, %wide;",
    ]
    for n, opcode in enumerate(opcodes):
        what = signature(opcode)
        lines.append("{")
        text, literal = (*opcode.split(" ", 1), "")[:2]
        for kind, types in (("d", what.results), ("s", what.operands)):
            lines += [f".reg .{register_type(t)} {kind}{k};" for k, t in enumerate(types)]
        for k in range(4):
            if k < len(what.operands):
                lines += _load(f"s{k}", what.operands[k])
            lines.append("add.s64 %i, %i, %step;")
        results = "|".join(f"d{k}" for k in range(len(what.results)))
        operands = [f"s{k}" for k in range(len(what.operands))] + ([literal] if literal else [])
        lines += [f".loc 1 {n + 1} 0", f"{text} {results}, {', '.join(operands)};"]
        for k in range(2):
            if k < len(what.results):
                lines += _store(f"d{k}", what.results[k])
            lines.append("add.s64 %o, %o, %step;")
        lines.append("}")
    lines.append("ret;")
    return harness.ptx("\n".join(lines), ".param .u64 out, .param .u64 in, .param .u32 rows")


def _load(register: str, type_: str) -> list[str]:
    if type_ == "pred":
        return ["ld.global.u32 %t0, [%i];", f"setp.ne.s32 {register}, %t0, 0;"]
    return [f"ld.global.{type_ if type_ in ('f32', 'f64') else f'b{BITS[type_]}'} {register}, [%i];"]


def _store(register: str, type_: str) -> list[str]:
    if type_ == "pred":
        return [f"selp.b64 %wide, 1, 0, {register};", "st.global.b64 [%o], %wide;"]
    if type_ in ("f32", "f64"):
        return [f"st.global.{type_} [%o], {register};"]
    return [f"st.global.b{BITS[register_type(type_)]} [%o], {register};"]


def run(opcodes: Sequence[str], rows: Sequence[Sequence[Sequence[int]]], form: str) -> list[list[tuple[int, ...]]]:
    """Results (as bits) of each opcode for each of its rows of operands."""
    count = -(-max(map(len, rows)) // 32) * 32
    data = np.zeros((len(opcodes), 4, count), np.uint64)
    for n, mine in enumerate(rows):
        for k, operand in enumerate(zip(*mine, strict=True)):
            data[n, k, : len(mine)] = operand
    out = np.zeros((len(opcodes), 2, count), np.uint64)
    grid = count // 32 if form == "vector" else count
    harness.run(kernel_of(opcodes, form), grid, 32, out, data, count)
    found = []
    for n, opcode in enumerate(opcodes):
        width = len(signature(opcode).results)
        found.append([tuple(int(out[n, k, row]) for k in range(width)) for row in range(len(rows[n]))])
    return found


def expected(opcode: str, operands: Sequence[int]) -> tuple[int, ...]:
    """By the reference; one number for each half of a packed result."""
    text, literal = (*opcode.split(" ", 1), "")[:2]
    parts = text.split(".")
    what = signature(opcode)
    if parts[0] == "lop3":
        return (lop3(*operands, int(literal, 0)),)
    if parts[-1].endswith("x2") or (parts[0] == "cvt" and parts[-2].endswith("x2")):
        return evaluate_pair(text, *operands) if parts[0] != "setp" else evaluate_pair(text, *operands[:2])
    first = evaluate(text, *operands)
    if what.results == ("pred", "pred"):
        other = evaluate(text.replace(f"setp.{parts[1]}", f"setp.{_NOT[parts[1]]}"), *operands)
        return first, other
    return (_extended(first, what.results[0]),)


_NOT = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def _extended(bits: int, type_: str) -> int:
    """8-bit results fill their 16-bit register by their sign."""
    return bits | 0xFF00 if type_ == "s8" and bits & 0x80 else bits


def same(opcode: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """NAN stands for any NaN of the type; a saturated -0 may be either zero."""
    what = signature(opcode).results
    if what[0].endswith("x2"):
        got, types = (got[0] & 0xFFFF, got[0] >> 16 & 0xFFFF), (what[0].removesuffix("x2"),) * 2
    else:
        types = ("f32" if what[0] == "tf32" else what[0], *what[1:])
    return all(
        is_nan(g, t) if w == NAN else g == w or (".sat" in opcode and t in FLOATS and w == 0 and g == sign_bit(t))
        for g, w, t in zip(got, wanted, types, strict=True)
    )


# -- operands worth trying ------------------------------------------------------------------------------------------------
def corners(type_: str) -> list[int]:
    if type_ == "pred":
        return [0, 1]
    if type_.endswith("x2"):
        halves = corners(type_.removesuffix("x2"))
        return [a | b << 16 for a, b in zip(halves, halves[3:] + halves[:3], strict=True)]
    if type_ in FLOATS:
        precision = FLOATS[type_][0]
        top = sign_bit(type_)
        least, one = 1 << (precision - 1), ONE[type_]
        some = [
            0, 1, 2, least - 1, least, least + 1, one, one + 1, one - 1, one + (least >> 1), one + least, one - least,
            INF[type_] - 1, INF[type_] - least, INF[type_], INF[type_] | least >> 1, one + 3 * least + 5, one // 2,
        ]  # fmt: skip
        return some + [x | top for x in some]
    width = BITS[type_]
    top = 1 << (width - 1)
    some = [0, 1, 2, 3, 7, 8, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 0x5A, (2 * top - 1) // 3, top // 2]
    return [x & (2 * top - 1) for x in some]


COUNTS = (0, 1, 5, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 255, 256, 257, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000001)


def operand_rows(opcode: str, source: np.random.Generator, most: int) -> list[tuple[int, ...]]:
    """Corner values against each other, as many as `most` allows, and random ones."""
    types = signature(opcode).operands
    base = opcode.split(".")[0]
    choices = []
    for place, type_ in enumerate(types):
        counting = base in ("shl", "shr", "shf", "bfe", "bfi", "bmsk") and place and type_ in ("u32", "b32")
        small = base in ("bfe", "bfi") and place >= len(types) - 2
        choices.append(
            list(COUNTS) if small or (counting and (base in ("shl", "shr", "bmsk") or place == 2)) else corners(type_)
        )
    total = int(np.prod([len(c) for c in choices]))
    if total <= most:
        rows = list(itertools.product(*choices))
    else:
        rows = [tuple(c[int(source.integers(len(c)))] for c in choices) for _ in range(most)]
    for _ in range(most // 4):
        rows.append(tuple(int(source.integers(1 << BITS[t], dtype=np.uint64)) for t in types))
    # Neighbours of each other, where sums cancel and quotients are near 1.
    if len(types) >= 2 and types[0] == types[1] and types[0] in FLOATS:
        for _ in range(most // 8):
            a = int(source.integers(1 << (BITS[types[0]] - 1)))
            b = a ^ int(source.integers(8)) ^ (sign_bit(types[0]) if source.integers(2) else 0)
            rest = tuple(int(source.choice(np.array(corners(t), np.uint64))) for t in types[2:])
            rows.append((a, b, *rest))
    return rows


# -- every opcode ----------------------------------------------------------------------------------------------------------
def exact_opcodes() -> Iterator[str]:
    """Every opcode, modifier and type whose result is defined to the bit."""
    for t in INTEGERS:
        yield from (f"{base}.{t}" for base in ("add", "sub", "div", "rem", "min", "max", "sad"))
        yield from (f"mul.{part}.{t}" for part in ("lo", "hi"))
        yield from (f"mad.{part}.{t}" for part in ("lo", "hi"))
        if BITS[t] < 64:
            yield from (f"mul.wide.{t}", f"mad.wide.{t}")
        yield from (f"{base}.{t}" for base in ("shr",))
        yield from (f"setp.{c}.{t}" for c in COMPARISONS)
        yield from (f"{base}.{t}" for base in ("selp", "mov"))
        yield f"setp.lt.and.{t}"
        yield f"set.gt.{'and' if t[0] == 's' else 'or'}.u32.{t}"
        yield from (f"set.{c}.{to}.{t}" for c, to in (("le", "u32"), ("ne", "s32"), ("gt", "f32")))
        yield f"slct.{t}.s32"
        yield f"slct.{t}.f32"
        if t[0] == "u":
            yield from (f"setp.{c}.{t}" for c in ("lo", "ls", "hi", "hs"))
            yield from (f"set.{c}.u32.{t}" for c in ("lo", "ls", "hi", "hs"))
        else:
            yield from (f"abs.{t}", f"neg.{t}")
    for t in WORDS:
        yield from (f"{base}.{t}" for base in ("and", "or", "xor", "not", "cnot", "shl", "shr", "selp", "mov"))
        yield from (f"setp.{c}.{t}" for c in ("eq", "ne"))
        yield f"set.eq.u32.{t}"
        yield f"slct.{t}.s32"
    yield from (f"{base}.pred" for base in ("and", "or", "xor", "not", "mov"))
    for t in ("s32", "u32"):
        yield from (f"{base}.{part}.{t}" for base in ("mul24", "mad24") for part in ("lo", "hi"))
        yield from (f"{base}.{t}.{u}" for base in ("dp4a", "dp2a.lo", "dp2a.hi") for u in ("s32", "u32"))
    yield from (f"bfe.{t}" for t in ("s32", "u32", "s64", "u64"))
    yield from (f"{base}.{t}" for base in ("bfi", "clz", "popc", "brev") for t in ("b32", "b64"))
    yield from (f"bfind{how}.{t}" for how in ("", ".shiftamt") for t in ("s32", "u32", "s64", "u64"))
    yield from (f"bmsk.{mode}.b32" for mode in ("clamp", "wrap"))
    yield from (f"shf.{side}.{mode}.b32" for side in "lr" for mode in ("clamp", "wrap"))
    yield "prmt.b32"
    yield from (f"lop3.b32 {table:#x}" for table in (0x00, 0x01, 0x80, 0x96, 0xE8, 0xCA, 0xF0, 0xCC, 0xAA, 0x1B, 0xFF))
    yield from (f"setp.{c}.{join}.s32" for c in COMPARISONS for join in ("and", "or", "xor"))
    yield from _float_opcodes()
    yield from _half_opcodes()
    yield from _conversions()


def _float_opcodes() -> Iterator[str]:
    for t in ("f32", "f64"):
        ends = ("", ".ftz", ".sat", ".ftz.sat") if t == "f32" else ("",)
        for mode in ROUNDINGS:
            yield from (f"{base}{mode}{end}.{t}" for base in ("add", "sub", "mul") for end in ends)
            if mode:
                yield from (f"fma{mode}{end}.{t}" for end in ends)
                yield from (f"mad{mode}{end}.{t}" for end in ends)
        flushes = ("", ".ftz") if t == "f32" else ("",)
        for flush in flushes:
            yield from (f"{base}{mode}{flush}.{t}" for base in ("div", "rcp", "sqrt") for mode in ROUNDINGS if mode)
            yield from (f"{base}{flush}.{t}" for base in ("min", "max", "abs", "neg"))
            yield from (f"setp.{c}{flush}.{t}" for c in (*COMPARISONS, *UNORDERED))
        yield from (f"setp.{c}.{join}.{t}" for c, join in (("lt", "and"), ("geu", "or"), ("num", "xor")))
        yield from (
            f"testp.{what}.{t}" for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
        )
        yield from (f"copysign.{t}", f"selp.{t}", f"mov.{t}", f"slct.{t}.s32", f"slct.{t}.f32")
        yield from (f"set.{c}.{to}.{t}" for c in (*COMPARISONS, *UNORDERED) for to in ("u32", "f32"))
        yield f"set.eq.xor.s32.{t}"
    yield from ("slct.ftz.f32.f32", "slct.ftz.u32.f32", "set.lt.ftz.f32.f32")
    for base, flush in itertools.product(("min", "max"), ("", ".ftz")):
        yield from (f"{base}{flush}{end}.f32" for end in (".NaN", ".xorsign.abs", ".NaN.xorsign.abs"))


def _half_opcodes() -> Iterator[str]:
    for t in HALVES:
        plain = not t.startswith("b")
        yield from (f"{base}{mode}.{t}" for base in ("add", "sub", "mul") for mode in ("", ".rn"))
        yield from (f"fma.rn{end}.{t}" for end in ("", ".relu"))
        yield from (
            f"{base}{end}.{t}" for base in ("min", "max") for end in ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs")
        )
        yield from (f"{base}.{t}" for base in ("neg", "abs"))
        yield from (f"setp.{c}.{t}" for c in (*COMPARISONS, *UNORDERED))
        if plain:
            yield from (f"{base}{end}.{t}" for base in ("add", "sub", "mul") for end in (".ftz", ".sat", ".ftz.sat"))
            yield from (f"fma.rn{end}.{t}" for end in (".ftz", ".sat", ".ftz.sat", ".ftz.relu"))
            yield from (f"{base}.ftz.{t}" for base in ("min", "max", "neg", "abs"))
            yield f"setp.lt.ftz.{t}"
        if not t.endswith("x2"):
            yield from (f"set.{c}.{to}.{t}" for c in ("eq", "ltu", "nan") for to in (t, "u32", "s32", "u16", "s16"))
            yield f"setp.lt.and.{t}"
        else:
            yield from (f"set.{c}.{t}.{t}" for c in ("eq", "geu", "num"))


def _conversions() -> Iterator[str]:
    narrow = ("s8", "u8", *INTEGERS)
    for to, source in itertools.product(narrow, repeat=2):
        yield f"cvt.{to}.{source}"
        (low, high), (least, greatest) = limits(to), limits(source)
        if least < low or high < greatest:
            yield f"cvt.sat.{to}.{source}"
    for to, source, mode in itertools.product(narrow, ("f32", "f64", "f16"), ("rni", "rzi", "rmi", "rpi")):
        yield f"cvt.{mode}.{to}.{source}"
        if source == "f32":
            yield f"cvt.{mode}.ftz.sat.{to}.f32"
    for to, source in itertools.product(("f32", "f64", "f16"), narrow):
        yield from (f"cvt.{mode}.{to}.{source}" for mode in ("rn", "rz", "rm", "rp"))
    yield from (
        "cvt.rn.sat.f32.s32",
        "cvt.rn.sat.f32.u64",
        "cvt.f64.f32",
        "cvt.f64.f16",
        "cvt.f32.f16",
        "cvt.f32.bf16",
        "cvt.ftz.f64.f32",
    )
    for mode in ("rn", "rz", "rm", "rp"):
        yield from (f"cvt.{mode}{end}.f32.f64" for end in ("", ".sat"))
        yield f"cvt.{mode}.f16.f64"
        yield from (f"cvt.{mode}{end}.f16.f32" for end in ("", ".ftz", ".sat"))
    for mode in ("rni", "rzi", "rmi", "rpi"):
        yield from (f"cvt.{mode}{end}.f32.f32" for end in ("", ".ftz", ".sat", ".ftz.sat"))
        yield from (f"cvt.{mode}.f64.f64", f"cvt.{mode}.f16.f16")
    yield from ("cvt.sat.f32.f32", "cvt.sat.f64.f64", "cvt.ftz.f32.f16", "cvt.sat.f32.f16")
    for mode, end in itertools.product(("rn", "rz"), ("", ".relu")):
        yield f"cvt.{mode}{end}.bf16.f32"
        yield f"cvt.{mode}{end}.bf16x2.f32"
        yield f"cvt.{mode}{end}.f16x2.f32"
        if end:
            yield f"cvt.{mode}{end}.f16.f32"
    yield "cvt.rna.tf32.f32"
    yield from (f"cvt.{mode}{end}.tf32.f32" for mode in ("rn", "rz") for end in ("", ".relu"))
