"""The steps that random integer programs are made of, and numbers near where integers wrap."""

from __future__ import annotations

from dataclasses import dataclass

TABLE_WORDS = 64
CONSTANTS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 24, 28, 31, 32, 33, 60, 63, 64, 100, 127, 128, 255, 256, 1000, 4095, 65535,
             65536, 0x7FFFFF, 0x1FFFFFFF, 0x3FFFFFFF, 0x40000000, 0x7FFFFFF0, 0x7FFFFFFF, 0x80000000, 0x80000001,
             0xFFFF0000, 0xFFFFFF00, 0xFFFFFF80, 0xFFFFFFE0, 0xFFFFFFF0, 0xFFFFFFF8, 0xFFFFFFFC, 0xFFFFFFFE, 0xFFFFFFFF)  # fmt: skip
SHIFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 24, 27, 28, 29, 30, 31, 32, 33, 63, 64, 70)
BLOCKS = ((32, 1, 1), (64, 1, 1), (128, 1, 1), (40, 1, 1), (8, 8, 1), (16, 4, 2), (4, 2, 8), (5, 7, 1), (64, 2, 1), (2, 3, 7), (1, 1, 40))  # fmt: skip

# Steps that keep what a value is across the lanes come up more often.
_PATTERNED = """
    add.s32 r r c; add.s32 r r r; sub.s32 r r r; mul.lo.s32 r r c; mad.lo.s32 r r c r; shl.b32 r r s; shr.u32 r r s
    shr.s32 r r s; and.b32 r r c; or.b32 r r c; or.b32 r r r; xor.b32 r r c; bfi.b32 r r r s s; bfe.u32 r r s s
    mul.wide.s32 q r c; mul.wide.u32 q r c; mad.wide.s32 q r c q; cvt.s64.s32 q r; cvt.u64.u32 q r; cvt.u32.u64 r q
    cvt.u16.u32 h r; cvt.s8.s32 r r; cvt.s32.s8 r r; cvt.u32.u16 r h; add.s64 q q q; shl.b64 q q s; shr.s64 q q s;
"""
# opcode, class of the result, classes of the operands: r 32 bits, q 64, h 16, p predicate, c constant, s shift count
STEPS = tuple(
    (text.split()[0], text.split()[1], tuple(text.split()[2:]))
    for text in (
        4 * _PATTERNED
        + """
    add.s32 r r r; add.s32 r r c; sub.s32 r r r; sub.s32 r c r; sub.s32 r r c; mul.lo.s32 r r c; mul.lo.s32 r r r
    mad.lo.s32 r r c r; mad.lo.s32 r r r r; mad.lo.s32 r c r c; neg.s32 r r; abs.s32 r r; not.b32 r r; mul.hi.u32 r r c
    mul.hi.s32 r r r; shl.b32 r r s; shl.b32 r r s; shl.b32 r r r; shr.u32 r r s; shr.s32 r r s; shr.u32 r r r
    shr.s32 r r r; and.b32 r r c; and.b32 r c r; and.b32 r r r; or.b32 r r c; or.b32 r r r; xor.b32 r r c; xor.b32 r r r
    bfe.u32 r r s s; bfe.s32 r r s s; bfe.u32 r r r s; bfi.b32 r r r s s; bfi.b32 r r c s s; bfi.b32 r r r r s
    min.s32 r r c; min.u32 r r c; max.s32 r r c; max.u32 r r c; min.s32 r r r; max.u32 r r r; min.u32 r r r
    div.u32 r r c; div.s32 r r c; div.u32 r r r; div.s32 r r r; rem.u32 r r c; rem.s32 r r c; rem.u32 r r r; rem.s32 r r r
    selp.b32 r r r p; selp.b32 r r c p; sad.u32 r r c r; prmt.b32 r r r c; shf.l.wrap.b32 r r r s; shf.r.clamp.b32 r r r s
    clz.b32 r r; popc.b32 r r; bfind.u32 r r; brev.b32 r r; mul24.lo.u32 r r c; cvt.u32.u64 r q; cvt.s32.s64 r q
    cvt.s32.s8 r r; cvt.u32.u8 r r; cvt.s32.s16 r h; cvt.u32.u16 r h; cvt.s8.s32 r r; cvt.u8.u32 r r; cvt.s8.s8 r r
    cvt.sat.u8.s32 r r; cvt.sat.s16.s32 r r; cvt.sat.u32.s32 r r; cvt.sat.s32.u32 r r; mul.wide.u16 r h c; mul.wide.s16 r h h
    mul.wide.s32 q r c; mul.wide.u32 q r c; mul.wide.s32 q r r; mul.wide.u32 q r r; mad.wide.s32 q r c q
    mad.wide.u32 q r c q; cvt.u64.u32 q r; cvt.s64.s32 q r; cvt.s64.s8 q r; cvt.u64.u16 q h; cvt.s64.s16 q h
    add.s64 q q q; add.s64 q q c; sub.s64 q q q; mul.lo.s64 q q c; mad.lo.s64 q q c q; shl.b64 q q s; shr.u64 q q s
    shr.s64 q q s; and.b64 q q c; or.b64 q q q; or.b64 q q c; xor.b64 q q c; bfi.b64 q q q s s; bfe.u64 q q s s
    bfe.s64 q q s s; min.s64 q q c; max.u64 q q q; neg.s64 q q; div.u64 q q c; div.s64 q q c; rem.s64 q q q
    selp.b64 q q q p; cvt.u16.u32 h r; cvt.u16.u64 h q; cvt.s16.s8 h r; cvt.u16.u8 h h; add.s16 h h c; sub.s16 h h h
    mul.lo.s16 h h c; mad.lo.u16 h h c h; shl.b16 h h s; shr.u16 h h s; shr.s16 h h s; and.b16 h h c; or.b16 h h h
    min.s16 h h h; max.u16 h h c; div.s16 h h c; rem.u16 h h h; neg.s16 h h; selp.b16 h h h p
    setp.lt.s32 p r c; setp.ge.s32 p r r; setp.lo.u32 p r c; setp.eq.s32 p r r; setp.ne.s32 p r c; setp.gt.u32 p r r
    setp.lt.s64 p q c; setp.hi.u64 p q q; setp.le.s16 p h c; and.pred p p p; xor.pred p p p; not.pred p p
    """
    )
    .replace("\n", ";")
    .split(";")
    if text.strip()
)
# Several steps as one; '.' is the result of the step before.
COMPOUNDS = tuple(
    tuple((part.split()[0], part.split()[1], tuple(part.split()[2:])) for part in text.split("+"))
    for text in """
    shl.b32 r r s + shr.s32 r . s; shl.b32 r r s + shr.u32 r . s; shl.b32 r r s + or.b32 r . r; neg.s32 r r + mul.wide.s32 q . c
    mul.lo.s32 r r c + shr.s32 r . s + and.b32 r . c; cvt.s64.s32 q r + shl.b64 q . s + shr.s64 q . s; add.s32 r r c + mul.wide.s32 q . c
    and.b32 r r c + shl.b32 r . s + or.b32 r . r; shl.b32 r r s + bfe.s32 r . s s; bfi.b32 r r r s s + bfe.u32 r . s s
    sub.s32 r c r + mul.wide.u32 q . c; mul.lo.s32 r r c + xor.b32 r . c + cvt.s64.s32 q .; cvt.u64.u32 q r + sub.s64 q . q
    add.s32 r r c + cvt.s8.s32 r .; mul.lo.s32 r r c + cvt.u16.u32 h . + cvt.u32.u16 r .; shr.u32 r r s + bfi.b32 r r . s s
    """.replace("\n", ";").split(";")
    if text.strip()
)
REGISTER = {"r": "b32", "q": "b64", "h": "b16", "p": "pred"}
# How a look-up in the table gets its index from a 32-bit register.
INDEX = (("and.b32", 63), ("shr.u32", 26), ("bfe.u32", 5, 6), ("rem.u32", 64), ("min.u32", 63))


@dataclass(frozen=True)
class Step:
    """opcode of STEPS or 'look up' or 'loop' / 'end'; numbers that choose operands, whatever is in the pools."""

    opcode: str
    result: str
    operands: tuple[str, ...]
    choices: tuple[int, ...]
