"""Integer and logic instructions, comparisons and selections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator.isa.table import rule
from cudaops.emulator.ptx import TYPE_BITS, Imm, Instruction, Pair

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

INTS = "s16 u16 s32 u32 s64 u64"
BITS = "b16 b32 b64"


@rule("add sub", INTS)
def add(g: Codegen, ins: Instruction) -> None:
    g.result(ins, g.emit(f"{ins.base} {g.ty(ins.type)} {g.src(ins, 1)}, {g.src(ins, 2)}"))


@rule("mul", INTS, "lo hi wide")
def mul(g: Codegen, ins: Instruction) -> None:
    g.result(ins, _product(g, ins), _product_type(ins))


@rule("mad", INTS, "lo hi wide")
def mad(g: Codegen, ins: Instruction) -> None:
    wide = _product_type(ins)
    g.result(ins, g.emit(f"add {g.ty(wide)} {_product(g, ins)}, {g.src(ins, 3, wide)}"), wide)


def _product_type(ins: Instruction) -> str:
    return f"{ins.type[0]}{2 * TYPE_BITS[ins.type]}" if "wide" in ins.parts else ins.type


def _product(g: Codegen, ins: Instruction) -> str:
    t = ins.type
    a, b = g.src(ins, 1), g.src(ins, 2)
    if "lo" in ins.parts:
        return g.emit(f"mul {g.ty(t)} {a}, {b}")
    bits = TYPE_BITS[t]
    narrow, wide = g.ty(t), g.vector_of(f"i{2 * bits}")
    extend = "sext" if t[0] == "s" else "zext"
    x = g.emit(f"{extend} {narrow} {a} to {wide}")
    y = g.emit(f"{extend} {narrow} {b} to {wide}")
    product = g.emit(f"mul {wide} {x}, {y}")
    if "wide" in ins.parts:
        return product
    high = g.emit(f"lshr {wide} {product}, {g.splat(f'i{2 * bits}', bits)}")
    return g.emit(f"trunc {wide} {high} to {narrow}")


WORDS = "s32 u32 s64 u64"


@rule("add sub", WORDS, needs="cc")
@rule("addc subc", WORDS, "cc")
@rule("mad", WORDS, "lo hi", needs="cc")
@rule("madc", WORDS, "lo hi cc")
def with_carry(g: Codegen, ins: Instruction) -> None:
    """d = a + b + carry (sub: a - b - borrow), and the carry out with .cc; see ptx._with_carry."""
    ty, bools, bits = g.ty(ins.type), g.vector_of("i1"), TYPE_BITS[ins.type]
    mad, subtracts = ins.base.startswith("mad"), ins.base.startswith("sub")
    a = _product(g, ins) if mad else g.src(ins, 1)
    b = g.src(ins, 3 if mad else 2)
    op = "sub" if subtracts else "add"
    total = g.binary(op, ty, a, b)
    carry = g.emit(f"icmp ult {ty} {a}, {b}" if subtracts else f"icmp ult {ty} {total}, {a}")
    if ins.base.endswith("c"):
        given = g.src(ins, 4 if mad else 3, "pred")
        first = total
        total = g.binary(op, ty, first, g.emit(f"zext {bools} {given} to {ty}"))
        # only all ones carries on, only zero borrows on
        edge = g.emit(f"icmp eq {ty} {first}, {g.splat(f'i{bits}', 0 if subtracts else -1)}")
        carry = g.binary("or", bools, carry, g.binary("and", bools, edge, given))
    target = ins.operands[0]
    if isinstance(target, Pair):
        g.write(target.first, total, ins.type)
        g.write(target.second, carry, "pred")
    else:
        g.write(target, total, ins.type)


@rule("mul24 mad24", "s32 u32", "lo hi")
def mul24(g: Codegen, ins: Instruction) -> None:
    ty, wide = g.ty(ins.type), g.vector_of("i64")
    shift = "ashr" if ins.type[0] == "s" else "lshr"
    extend = "sext" if ins.type[0] == "s" else "zext"
    eight = g.splat("i32", 8)
    parts = []
    for n in (1, 2):
        up = g.emit(f"shl {ty} {g.src(ins, n)}, {eight}")
        parts.append(g.emit(f"{extend} {ty} {g.emit(f'{shift} {ty} {up}, {eight}')} to {wide}"))
    product = g.emit(f"mul {wide} {parts[0]}, {parts[1]}")
    if "hi" in ins.parts:
        product = g.emit(f"lshr {wide} {product}, {g.splat('i64', 16)}")
    value = g.emit(f"trunc {wide} {product} to {ty}")
    if ins.base == "mad24":
        value = g.emit(f"add {ty} {value}, {g.src(ins, 3)}")
    g.result(ins, value)


@rule("div rem", INTS)
def div(g: Codegen, ins: Instruction) -> None:
    """Division by zero gives all ones, and so does its remainder, as on the hardware; INT_MIN / -1 wraps."""
    t = ins.type
    ty, bits, signed = g.ty(t), TYPE_BITS[t], t[0] == "s"
    a, b = g.src(ins, 1), g.src(ins, 2)
    element = f"i{bits}"
    bools = g.vector_of("i1")
    zero = g.emit(f"icmp eq {ty} {b}, {g.splat(element, 0)}")
    safe = g.emit(f"select {bools} {zero}, {ty} {g.splat(element, 1)}, {ty} {b}")
    if bits <= 32 and g.vector:
        # Every 32-bit integer is exact in f64, and a quotient that is not an integer is at least 2^-32 away from one.
        double = g.vector_of("double")
        to, back = ("sitofp", "fptosi") if signed else ("uitofp", "fptoui")
        x, y = g.emit(f"{to} {ty} {a} to {double}"), g.emit(f"{to} {ty} {safe} to {double}")
        quotient = g.emit(f"fdiv {double} {x}, {y}")
        wide = g.emit(f"{back} {double} {quotient} to {g.vector_of('i64')}")
        q = g.emit(f"trunc {g.vector_of('i64')} {wide} to {ty}")
    else:
        if signed:
            minus = g.emit(f"icmp eq {ty} {safe}, {g.splat(element, -1)}")
            safe = g.emit(f"select {bools} {minus}, {ty} {g.splat(element, 1)}, {ty} {safe}")
            q = g.emit(f"sdiv {ty} {a}, {safe}")
            negated = g.emit(f"sub {ty} {g.splat(element, 0)}, {a}")
            q = g.emit(f"select {bools} {minus}, {ty} {negated}, {ty} {q}")
        else:
            q = g.emit(f"udiv {ty} {a}, {safe}")
    if ins.base == "rem":
        q = g.emit(f"sub {ty} {a}, {g.emit(f'mul {ty} {q}, {b}')}")
    g.result(ins, g.emit(f"select {bools} {zero}, {ty} {g.splat(element, -1)}, {ty} {q}"))


@rule("min max", INTS)
def extremum(g: Codegen, ins: Instruction) -> None:
    name = ("s" if ins.type[0] == "s" else "u") + ins.base
    g.result(ins, g.call(f"llvm.{name}", ins.type, g.src(ins, 1), g.src(ins, 2)))


@rule("abs neg", "s16 s32 s64")
def negate(g: Codegen, ins: Instruction) -> None:
    ty, a = g.ty(ins.type), g.src(ins, 1)
    minus = g.emit(f"sub {ty} {g.splat(g.element(ins.type), 0)}, {a}")
    g.result(ins, minus if ins.base == "neg" else g.call("llvm.smax", ins.type, a, minus))


@rule("sad", INTS)
def sad(g: Codegen, ins: Instruction) -> None:
    ty, a, b = g.ty(ins.type), g.src(ins, 1), g.src(ins, 2)
    kind = "s" if ins.type[0] == "s" else "u"
    high, low = g.call(f"llvm.{kind}max", ins.type, a, b), g.call(f"llvm.{kind}min", ins.type, a, b)
    g.result(ins, g.emit(f"add {ty} {g.emit(f'sub {ty} {high}, {low}')}, {g.src(ins, 3)}"))


@rule("and or xor", f"pred {BITS}")
def bitwise(g: Codegen, ins: Instruction) -> None:
    g.result(ins, g.emit(f"{ins.base} {g.ty(ins.type)} {g.src(ins, 1)}, {g.src(ins, 2)}"))


@rule("not", f"pred {BITS}")
def invert(g: Codegen, ins: Instruction) -> None:
    g.result(ins, g.emit(f"xor {g.ty(ins.type)} {g.src(ins, 1)}, {g.splat(g.element(ins.type), -1)}"))


@rule("cnot", BITS)
def cnot(g: Codegen, ins: Instruction) -> None:
    ty, zero = g.ty(ins.type), g.splat(g.element(ins.type), 0)
    is_zero = g.emit(f"icmp eq {ty} {g.src(ins, 1)}, {zero}")
    g.result(ins, g.emit(f"zext {g.vector_of('i1')} {is_zero} to {ty}"))


@rule("shl", BITS)
@rule("shr", f"{BITS} {INTS}")
def shift(g: Codegen, ins: Instruction) -> None:
    """Counts past the width give 0 (signed shr: the sign); LLVM's own shifts would be undefined there."""
    t = ins.type
    bits, ty, element = TYPE_BITS[t], g.ty(t), g.element(t)
    signed = ins.base == "shr" and t[0] == "s"
    op = "shl" if ins.base == "shl" else "ashr" if signed else "lshr"
    count = ins.operands[2]
    if isinstance(count, Imm):
        n = count.value & 0xFFFFFFFF
        if n >= bits and not signed:
            g.result(ins, g.splat(element, 0))
        else:
            g.result(ins, g.emit(f"{op} {ty} {g.src(ins, 1)}, {g.splat(element, min(n, bits - 1))}"))
        return
    n32 = g.src(ins, 2, "u32")
    over = g.emit(f"icmp ugt {g.ty('u32')} {n32}, {g.splat('i32', bits - 1)}")
    capped = g.call("llvm.umin", "u32", n32, g.splat("i32", bits - 1))
    value = g.emit(f"{op} {ty} {g.src(ins, 1)}, {g.resize(capped, 'u32', f'u{bits}')}")
    if not signed:
        value = g.emit(f"select {g.vector_of('i1')} {over}, {ty} {g.splat(element, 0)}, {ty} {value}")
    g.result(ins, value)


@rule("shf", "b32", "l r clamp wrap")
def funnel(g: Codegen, ins: Instruction) -> None:
    """shf.l: the high word of {b, a} << n; shf.r: the low word of {b, a} >> n."""
    ty, wide = g.ty("u32"), g.vector_of("i64")
    n = g.src(ins, 3, "u32")
    if "wrap" in ins.parts:
        n = g.emit(f"and {ty} {n}, {g.splat('i32', 31)}")
    else:
        n = g.call("llvm.umin", "u32", n, g.splat("i32", 32))
    low = g.emit(f"zext {ty} {g.src(ins, 1, 'u32')} to {wide}")
    high = g.emit(f"zext {ty} {g.src(ins, 2, 'u32')} to {wide}")
    half = g.splat("i64", 32)
    both = g.binary("or", wide, g.binary("shl", wide, high, half), low)
    count = g.emit(f"zext {ty} {n} to {wide}")
    if "l" in ins.parts:
        both = g.binary("lshr", wide, g.binary("shl", wide, both, count), half)
    else:
        both = g.emit(f"lshr {wide} {both}, {count}")
    g.result(ins, g.emit(f"trunc {wide} {both} to {ty}"))


def _byte(g: Codegen, ins: Instruction, place: int) -> str:
    """Operand modulo 256, as bfe and bfi read position and length."""
    return g.binary("and", g.ty("u32"), g.src(ins, place, "u32"), g.splat("i32", 255))


def _low_mask(g: Codegen, t: str, length: str) -> str:
    """(1 << length) - 1 with length given as u32; all ones from the width on."""
    bits, ty, element = TYPE_BITS[t], g.ty(t), g.element(t)
    capped = g.call("llvm.umin", "u32", length, g.splat("i32", bits - 1))
    one = g.emit(f"shl {ty} {g.splat(element, 1)}, {g.resize(capped, 'u32', f'u{bits}')}")
    short = g.emit(f"sub {ty} {one}, {g.splat(element, 1)}")
    full = g.emit(f"icmp uge {g.ty('u32')} {length}, {g.splat('i32', bits)}")
    return g.emit(f"select {g.vector_of('i1')} {full}, {ty} {g.splat(element, -1)}, {ty} {short}")


def _shifted(g: Codegen, t: str, op: str, value: str, count: str) -> str:
    """value shifted by a u32 count below 256; 0 (ashr: the sign) from the width on."""
    bits, ty, element = TYPE_BITS[t], g.ty(t), g.element(t)
    capped = g.call("llvm.umin", "u32", count, g.splat("i32", bits - 1))
    moved = g.emit(f"{op} {ty} {value}, {g.resize(capped, 'u32', f'u{bits}')}")
    if op == "ashr":
        return moved
    over = g.emit(f"icmp uge {g.ty('u32')} {count}, {g.splat('i32', bits)}")
    return g.emit(f"select {g.vector_of('i1')} {over}, {ty} {g.splat(element, 0)}, {ty} {moved}")


@rule("bfe", "s32 u32 s64 u64")
def bfe(g: Codegen, ins: Instruction) -> None:
    t = ins.type
    bits, ty, element, bools = TYPE_BITS[t], g.ty(t), g.element(t), g.vector_of("i1")
    a, pos, length = g.src(ins, 1), _byte(g, ins, 2), _byte(g, ins, 3)
    mask = _low_mask(g, t, length)
    field = g.emit(f"and {ty} {_shifted(g, t, 'lshr', a, pos)}, {mask}")
    if t[0] == "s":
        # The sign is bit min(pos + len - 1, msb) of a; with len 0 the result is 0.
        u32 = g.ty("u32")
        end = g.binary("sub", u32, g.binary("add", u32, pos, length), g.splat("i32", 1))
        end = g.call("llvm.umin", "u32", end, g.splat("i32", bits - 1))
        sign = g.emit(f"lshr {ty} {a}, {g.resize(end, 'u32', f'u{bits}')}")
        sign = g.emit(f"and {ty} {sign}, {g.splat(element, 1)}")
        fill = g.emit(f"sub {ty} {g.splat(element, 0)}, {sign}")
        # Bits of the field that a really has: below msb - pos.
        have = g.call("llvm.usub.sat", "u32", g.splat("i32", bits), pos)
        width = g.call("llvm.umin", "u32", length, have)
        outside = g.emit(f"xor {ty} {_low_mask(g, t, width)}, {g.splat(element, -1)}")
        field = g.emit(f"or {ty} {field}, {g.emit(f'and {ty} {fill}, {outside}')}")
        empty = g.emit(f"icmp eq {u32} {length}, {g.splat('i32', 0)}")
        field = g.emit(f"select {bools} {empty}, {ty} {g.splat(element, 0)}, {ty} {field}")
    g.result(ins, field)


@rule("bfi", "b32 b64")
def bfi(g: Codegen, ins: Instruction) -> None:
    t = ins.type
    ty, element = g.ty(t), g.element(t)
    pos, length = _byte(g, ins, 3), _byte(g, ins, 4)
    mask = _shifted(g, t, "shl", _low_mask(g, t, length), pos)
    put = g.emit(f"and {ty} {_shifted(g, t, 'shl', g.src(ins, 1), pos)}, {mask}")
    keep = g.emit(f"and {ty} {g.src(ins, 2)}, {g.emit(f'xor {ty} {mask}, {g.splat(element, -1)}')}")
    g.result(ins, g.emit(f"or {ty} {put}, {keep}"))


@rule("bmsk", "b32", "clamp wrap")
def bmsk(g: Codegen, ins: Instruction) -> None:
    ty = g.ty("b32")
    a, b = g.src(ins, 1), g.src(ins, 2)
    if "wrap" in ins.parts:
        a = g.emit(f"and {ty} {a}, {g.splat('i32', 31)}")
        b = g.emit(f"and {ty} {b}, {g.splat('i32', 31)}")
    g.result(ins, _shifted(g, "b32", "shl", _low_mask(g, "b32", b), a))


@rule("clz popc brev", "b32 b64")
def count(g: Codegen, ins: Instruction) -> None:
    a, t = g.src(ins, 1), ins.type
    if ins.base == "brev":
        g.result(ins, g.call("llvm.bitreverse", t, a))
        return
    if ins.base == "popc":
        value = g.call("llvm.ctpop", t, a)
    else:
        value = g.call_raw("llvm.ctlz", t, f"{g.ty(t)} {a}, i1 false")
    g.result(ins, g.resize(value, t, "u32"), "u32")


@rule("bfind", "u32 s32 u64 s64", "shiftamt")
def bfind(g: Codegen, ins: Instruction) -> None:
    t = ins.type
    bits, ty, element, bools = TYPE_BITS[t], g.ty(t), g.element(t), g.vector_of("i1")
    a = g.src(ins, 1)
    if t[0] == "s":  # negative: the highest bit that is 0
        a = g.binary("xor", ty, a, g.binary("ashr", ty, a, g.splat(element, bits - 1)))
    zeros = g.call_raw("llvm.ctlz", t, f"{ty} {a}, i1 false")
    none = g.emit(f"icmp eq {ty} {a}, {g.splat(element, 0)}")
    place = zeros if "shiftamt" in ins.parts else g.emit(f"sub {ty} {g.splat(element, bits - 1)}, {zeros}")
    value = g.emit(f"select {bools} {none}, {ty} {g.splat(element, -1)}, {ty} {place}")
    g.result(ins, g.resize(value, t, "u32"), "u32")


@rule("prmt", "b32")
def prmt(g: Codegen, ins: Instruction) -> None:
    """Each nibble of c picks a byte of {b, a}; its top bit replicates that byte's sign instead."""
    ty, wide = g.ty("u32"), g.vector_of("i64")
    low = g.emit(f"zext {ty} {g.src(ins, 1, 'u32')} to {wide}")
    high = g.emit(f"zext {ty} {g.src(ins, 2, 'u32')} to {wide}")
    half = g.splat("i64", 32)
    both = g.binary("or", wide, g.binary("shl", wide, high, half), low)
    selector = g.src(ins, 3, "u32")
    total = g.splat("i32", 0)
    for n in range(4):
        nibble = g.emit(f"lshr {ty} {selector}, {g.splat('i32', 4 * n)}")
        pick = g.binary("shl", ty, g.binary("and", ty, nibble, g.splat("i32", 7)), g.splat("i32", 3))
        moved = g.emit(f"lshr {wide} {both}, {g.emit(f'zext {ty} {pick} to {wide}')}")
        byte = g.binary("and", ty, g.emit(f"trunc {wide} {moved} to {ty}"), g.splat("i32", 255))
        sign = g.emit(f"icmp ugt {ty} {byte}, {g.splat('i32', 127)}")
        bools = g.vector_of("i1")
        filled = g.emit(f"select {bools} {sign}, {ty} {g.splat('i32', 255)}, {ty} {g.splat('i32', 0)}")
        wants = g.emit(f"and {ty} {nibble}, {g.splat('i32', 8)}")
        replicate = g.emit(f"icmp ne {ty} {wants}, {g.splat('i32', 0)}")
        byte = g.emit(f"select {bools} {replicate}, {ty} {filled}, {ty} {byte}")
        total = g.binary("or", ty, total, g.binary("shl", ty, byte, g.splat("i32", 8 * n)))
    g.result(ins, total)


@rule("lop3", "b32")
def lop3(g: Codegen, ins: Instruction) -> None:
    ty = g.ty("b32")
    table = ins.operands[4]
    assert isinstance(table, Imm)
    a, b, c = (g.src(ins, n) for n in (1, 2, 3))
    ones = g.splat("i32", -1)
    inverse = {x: g.emit(f"xor {ty} {x}, {ones}") for x in {a, b, c}}
    total = g.splat("i32", 0)
    for n in range(8):
        if table.value >> n & 1:
            term = g.emit(f"and {ty} {a if n & 4 else inverse[a]}, {b if n & 2 else inverse[b]}")
            term = g.emit(f"and {ty} {term}, {c if n & 1 else inverse[c]}")
            total = g.emit(f"or {ty} {total}, {term}")
    g.result(ins, total)


@rule("dp4a", "u32 s32")
@rule("dp2a", "u32 s32", "lo hi")
def dot_product(g: Codegen, ins: Instruction) -> None:
    """d = c + the products of four bytes of a and b, or of two halves of a and two bytes of b, its low or high ones."""
    ty = g.ty("b32")
    total = g.src(ins, 3, "b32")
    count, bits = (4, 8) if ins.base == "dp4a" else (2, 16)
    first = 2 if "hi" in ins.parts else 0
    for n in range(count):
        parts = []
        for place, kind, width, at in ((1, ins.parts[-2], bits, n), (2, ins.parts[-1], 8, first + n)):
            up = g.binary("shl", ty, g.src(ins, place, "b32"), g.splat("i32", 32 - width * (at + 1)))
            parts.append(g.binary("ashr" if kind[0] == "s" else "lshr", ty, up, g.splat("i32", 32 - width)))
        total = g.emit(f"add {ty} {total}, {g.emit(f'mul {ty} {parts[0]}, {parts[1]}')}")
    g.result(ins, total)


COMPARE = {
    "eq": ("eq", "eq", "oeq"), "ne": ("ne", "ne", "one"),
    "lt": ("slt", "ult", "olt"), "le": ("sle", "ule", "ole"), "gt": ("sgt", "ugt", "ogt"), "ge": ("sge", "uge", "oge"),
    "lo": ("ult", "ult", ""), "ls": ("ule", "ule", ""), "hi": ("ugt", "ugt", ""), "hs": ("uge", "uge", ""),
    "equ": ("", "", "ueq"), "neu": ("", "", "une"), "ltu": ("", "", "ult"), "leu": ("", "", "ule"),
    "gtu": ("", "", "ugt"), "geu": ("", "", "uge"), "num": ("", "", "ord"), "nan": ("", "", "uno"),
}  # fmt: skip


def compare(g: Codegen, ins: Instruction, t: str) -> str:
    kind = COMPARE[ins.parts[1]]
    a, b = g.src(ins, 1, t), g.src(ins, 2, t)
    if t[0] == "f":
        if "ftz" in ins.parts:
            a, b = g.flush(a), g.flush(b)
        return g.emit(f"fcmp {kind[2]} {g.ty(t)} {a}, {b}")
    return g.emit(f"icmp {kind[0] if t[0] == 's' else kind[1]} {g.ty(t)} {a}, {b}")


@rule("setp", f"{BITS} {INTS} f32 f64", " ".join(COMPARE) + " and or xor ftz")
def setp(g: Codegen, ins: Instruction) -> None:
    p = compare(g, ins, ins.type)
    bools = g.vector_of("i1")
    join = next((part for part in ins.parts[2:] if part in ("and", "or", "xor")), None)
    target = ins.operands[0]
    first = p
    if join is not None:
        first = g.emit(f"{join} {bools} {p}, {g.src(ins, 3, 'pred')}")
    if isinstance(target, Pair):
        second = g.emit(f"xor {bools} {p}, {g.splat('i1', -1)}")
        if join is not None:
            second = g.emit(f"{join} {bools} {second}, {g.src(ins, 3, 'pred')}")
        g.write(target.second, second, "pred")
        g.write(target.first, first, "pred")
    else:
        g.write(target, first, "pred")


@rule("set", f"{BITS} {INTS} f32 f64", " ".join(COMPARE) + " and or xor ftz")
def set_(g: Codegen, ins: Instruction) -> None:
    to = ins.parts[-2]
    p = compare(g, ins, ins.type)
    bools = g.vector_of("i1")
    join = next((part for part in ins.parts[2:-2] if part in ("and", "or", "xor")), None)
    if join is not None:
        p = g.emit(f"{join} {bools} {p}, {g.src(ins, 3, 'pred')}")
    one = g.constant(to, 0x3F800000 if to == "f32" else -1)
    g.result(ins, g.emit(f"select {bools} {p}, {g.ty(to)} {one}, {g.ty(to)} {g.constant(to, 0)}"), to)


@rule("selp", f"{BITS} {INTS} f32 f64")
def selp(g: Codegen, ins: Instruction) -> None:
    ty = g.ty(ins.type)
    p = g.src(ins, 3, "pred")
    g.result(ins, g.emit(f"select {g.vector_of('i1')} {p}, {ty} {g.src(ins, 1)}, {ty} {g.src(ins, 2)}"))


@rule("slct", f"{BITS} {INTS} f32 f64", "ftz")
def slct(g: Codegen, ins: Instruction) -> None:
    t = ins.parts[-2]
    ty, c = g.ty(t), g.src(ins, 3, ins.type)
    if ins.type == "f32":
        if "ftz" in ins.parts:
            c = g.flush(c)
        test = g.emit(f"fcmp oge {g.ty('f32')} {c}, {g.constant('f32', 0)}")
    else:
        test = g.emit(f"icmp sge {g.ty('s32')} {c}, {g.splat('i32', 0)}")
    g.result(ins, g.emit(f"select {g.vector_of('i1')} {test}, {ty} {g.src(ins, 1, t)}, {ty} {g.src(ins, 2, t)}"), t)
