"""The findings of `cudaops.sanitize()`: their kinds, their records, and the support functions that note them.

In code made for it, each ld, st, atom, ldmatrix and cp.async first shows its lanes' addresses to watch.py, or to
hull.py where they are a constant apart; what these know of memory is in shadow.py. Collectives look at the lanes that
take part, here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cudaops.emulator import layout
from cudaops.emulator.function import LANE_NUMBERS, V32, V64, Function
from cudaops.emulator.layout import LAUNCH

# Kinds of access: odd ones read. COPY is what cp.async asks for. STRONG ones may meet each other and atomics without a
# race.
READ, WRITE, ATOMIC, COPY, STRONG_READ, STRONG_WRITE = range(1, 7)

# Kinds of findings; those below 10 are the faults of layout.py.
RACE_SHARED, RACE_GLOBAL, UNINITIALISED, MISALIGNED, INACTIVE_LANE = 11, 12, 13, 14, 15
OTHER_BARRIER, NOT_MEMBER, MISSING_MEMBER, IN_FLIGHT = 16, 17, 18, 19
CHECKS = {
    layout.ERROR_ACCESS: "memcheck", layout.ERROR_STORE: "memcheck", layout.ERROR_BARRIER: "synccheck",
    layout.ERROR_DEADLOCK: "synccheck", layout.ERROR_ARRIVALS: "synccheck", layout.ERROR_NUMBER: "synccheck",
    RACE_SHARED: "racecheck", RACE_GLOBAL: "racecheck", UNINITIALISED: "initcheck", MISALIGNED: "memcheck",
    INACTIVE_LANE: "synccheck", OTHER_BARRIER: "synccheck", NOT_MEMBER: "synccheck", MISSING_MEMBER: "synccheck",
    IN_FLIGHT: "synccheck",
}  # fmt: skip

RECORD = "<qqqqqqqq"  # kind, site, other site, warp, lane, block, address, other (thread or block)
RECORD_BYTES = struct.calcsize(RECORD)
MOST_RECORDS = 4096
FINDINGS_BYTES = 8 + MOST_RECORDS * RECORD_BYTES
SEVERAL = -1  # the other: threads of several warps, or several blocks; -(warp + 2): several threads of that warp


@dataclass(frozen=True, slots=True)
class Record:
    kind: int
    site: int
    other_site: int
    warp: int
    lane: int
    block: int
    address: int
    other: int


def records(log: memoryview) -> list[Record]:
    count = min(int.from_bytes(log[:8], "little"), MOST_RECORDS)
    return [Record(*struct.unpack_from(RECORD, log, 8 + n * RECORD_BYTES)) for n in range(count)]


def first_of_each(found: Sequence[Record]) -> list[Record]:
    """One record for each kind and pair of places: the first block's, its first warp's."""
    kept: dict[tuple[int, int, int], Record] = {}
    for record in sorted(found, key=lambda r: (r.block, r.warp, r.lane)):
        kept.setdefault((record.kind, record.site, record.other_site), record)
    return sorted(kept.values(), key=lambda r: (r.block, r.warp, r.site))


def functions() -> list[Function]:
    return [_note(), _notes(), _meet(), _aligned(), _inactive(), _members()]


def call_notes(
    f: Function, mask: str, kind: int, sites: str = "splat (i32 -1)", addresses: str = "%addresses",
    others: str = "zeroinitializer",
) -> None:  # fmt: skip
    """A finding for each lane of the mask, at %site."""
    f.line(
        f"call void @cudaops_notes(ptr %ctx, i32 {mask}, i64 {kind}, i64 %site, {V32} {sites}, {V64} {addresses}, "
        f"{V32} {others})"
    )


def _note() -> Function:
    """note(ctx, kind, site, other site, lane, address, other): one finding in the launch's log."""
    f = Function(
        "void @cudaops_note(ptr %ctx, i64 %kind, i64 %site, i64 %other.site, i64 %lane, i64 %address, i64 %other) "
        "noinline"
    )
    log = f.at("findings", LAUNCH, f.field("launch", "ptr"), "ptr")
    f.branch(f.test("eq", "ptr", log, "null"), "out", "take")
    f.place("take")
    n = f.emit(f"atomicrmw add ptr {log}, i64 1 monotonic")
    f.branch(f.test("ult", "i64", n, str(MOST_RECORDS)), "put", "out")
    f.place("put")
    record = f.past(log, f.binary("add", "i64", f.binary("mul", "i64", n, str(RECORD_BYTES)), "8"))
    values = ["%kind", "%site", "%other.site", f.field("warp"), "%lane", f.field("block"), "%address", "%other"]
    for place, value in enumerate(values):
        f.line(f"store i64 {value}, ptr {f.element('i64', record, str(place))}, align 8")
    f.jump("out")
    f.place("out")
    f.line("ret void")
    return f


def _notes() -> Function:
    """notes(ctx, mask, kind, site, other sites, addresses, others): a finding for each lane of the mask."""
    f = Function(
        f"void @cudaops_notes(ptr %ctx, i32 %mask, i64 %kind, i64 %site, {V32} %sites, {V64} %addresses, "
        f"{V32} %others) noinline"
    )
    for name, ty in (("sites", "i32"), ("others", "i32"), ("addresses", "i64")):
        f.line(f"%{name}.at = alloca <32 x {ty}>, align 64")
        f.line(f"store <32 x {ty}> %{name}, ptr %{name}.at, align 64")
    f.jump("next")
    f.place("next")
    f.line("%lane = phi i64 [ 0, %entry ], [ %lane.next, %more ]")
    bit = f.binary("shl", "i32", "1", f.trunc("%lane"))
    f.branch(f.test("ne", "i32", f.binary("and", "i32", "%mask", bit), "0"), "do", "more")
    f.place("do")
    picked = {}
    for name, ty in (("sites", "i32"), ("others", "i32"), ("addresses", "i64")):
        value = f.load(ty, f.element(ty, f"%{name}.at", "%lane"), 4)
        picked[name] = f.emit(f"sext i32 {value} to i64") if ty == "i32" else value
    f.line(
        f"call void @cudaops_note(ptr %ctx, i64 %kind, i64 %site, i64 {picked['sites']}, i64 %lane, "
        f"i64 {picked['addresses']}, i64 {picked['others']})"
    )
    f.jump("more")
    f.place("more")
    f.line("%lane.next = add i64 %lane, 1")
    f.branch(f.test("eq", "i64", "%lane.next", "32"), "out", "next")
    f.place("out")
    f.line("ret void")
    return f


def _meet() -> Function:
    """meet(ctx, frame bytes, warps): a finding for each warp that waits for barrier 0 elsewhere than the first one."""
    f = Function("void @cudaops_meet(ptr %ctx, i64 %frame.bytes, i64 %warps) noinline")
    frames = f.field("frames", "ptr")
    f.branch(f.test("eq", "ptr", f.field("shadow", "ptr"), "null"), "out", "next")
    f.place("next")
    f.line("%w = phi i64 [ 0, %entry ], [ %w.next, %more ]")
    f.line("%first = phi i64 [ -1, %entry ], [ %first.next, %more ]")
    f.line("%first.site = phi i64 [ -1, %entry ], [ %first.site.next, %more ]")
    frame = f.past(frames, f.binary("mul", "i64", "%w", "%frame.bytes"))
    waits = f.test("ne", "i16", f.load("i16", f.past(frame, layout.FRAME["counts"]), 2), "0")
    site = f.emit(f"sext i32 {f.load('i32', f.past(frame, layout.FRAME['site']), 4)} to i64")
    f.branch(waits, "look", "more")
    f.place("look")
    f.line("%none = icmp eq i64 %first, -1")
    same = f.test("eq", "i64", site, "%first.site")
    f.line("%now = select i1 %none, i64 %w, i64 %first")
    f.line(f"%now.site = select i1 %none, i64 {site}, i64 %first.site")
    f.branch(f.binary("or", "i1", "%none", same), "more", "bad")
    f.place("bad")
    f.keep("warp", "%w")
    f.line(
        f"call void @cudaops_note(ptr %ctx, i64 {OTHER_BARRIER}, i64 {site}, i64 %first.site, i64 0, i64 0, i64 %first)"
    )
    f.jump("more")
    f.place("more")
    f.line("%first.next = phi i64 [ %first, %next ], [ %now, %look ], [ %first, %bad ]")
    f.line("%first.site.next = phi i64 [ %first.site, %next ], [ %now.site, %look ], [ %first.site, %bad ]")
    f.line("%w.next = add i64 %w, 1")
    f.branch(f.test("eq", "i64", "%w.next", "%warps"), "out", "next")
    f.place("out")
    f.line("ret void")
    return f


def _aligned() -> Function:
    """aligned(ctx, addresses, mask, bytes, site): the lanes whose addresses are multiples of bytes, a power of two."""
    f = Function(f"i32 @cudaops_aligned(ptr %ctx, {V64} %addresses, i32 %mask, i64 %bytes, i64 %site) noinline")
    low = f.splat("i64", f.binary("sub", "i64", "%bytes", "1"))
    odd = f.test("ne", V64, f.binary("and", V64, "%addresses", low), "zeroinitializer")
    bits = f.binary("and", "i32", f.bits(odd), "%mask")
    f.some(bits, "odd", "out")
    f.place("odd")
    call_notes(f, bits, MISALIGNED)
    f.jump("out")
    f.place("out")
    f.line(f"ret i32 {f.binary('and', 'i32', '%mask', f.binary('xor', 'i32', bits, '-1'))}")
    return f


def _inactive() -> Function:
    """inactive(ctx, lanes, sources, active, site): a finding for each lane of `lanes` whose source is not active."""
    f = Function(f"void @cudaops_inactive(ptr %ctx, i32 %lanes, {V32} %sources, i32 %active, i64 %site) noinline")
    bit = f.binary("lshr", V32, f.splat("i32", "%active"), "%sources")
    off = f.test("eq", V32, f.binary("and", V32, bit, "splat (i32 1)"), "zeroinitializer")
    bits = f.binary("and", "i32", f.bits(off), "%lanes")
    f.some(bits, "note", "out")
    f.place("note")
    call_notes(f, bits, INACTIVE_LANE, addresses="zeroinitializer", others="%sources")
    f.jump("out")
    f.place("out")
    f.line("ret void")
    return f


def _members() -> Function:
    """members(ctx, masks, active, live, site): does who executes a collective agree with each lane's member mask?

    A finding for each active lane that is not in its own mask, or that names a live lane which is not active.
    """
    f = Function(f"void @cudaops_members(ptr %ctx, {V32} %masks, i32 %active, i32 %live, i64 %site) noinline")
    own = f.binary("lshr", V32, "%masks", LANE_NUMBERS)
    out = f.test("eq", V32, f.binary("and", V32, own, "splat (i32 1)"), "zeroinitializer")
    away = f.splat("i32", f.binary("and", "i32", "%live", f.binary("xor", "i32", "%active", "-1")))
    named = f.binary("and", V32, "%masks", away)
    foreign = f.binary("and", "i32", f.bits(out), "%active")
    alone = f.binary("and", "i32", f.bits(f.test("ne", V32, named, "zeroinitializer")), "%active")
    f.some(foreign, "not.member", "look")
    f.place("not.member")
    call_notes(f, foreign, NOT_MEMBER, addresses="zeroinitializer")
    f.jump("look")
    f.place("look")
    f.some(alone, "missing", "out")
    f.place("missing")
    name = f.declare("llvm.cttz.v32i32", V32, f"{V32}, i1")
    first = f.emit(f"call {V32} @{name}({V32} {named}, i1 false)")
    call_notes(f, alone, MISSING_MEMBER, addresses="zeroinitializer", others=first)
    f.jump("out")
    f.place("out")
    f.line("ret void")
    return f
