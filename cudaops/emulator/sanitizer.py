"""The checks of `cudaops.sanitize()`: what watches every access, and what becomes of its findings.

In code made for it, each ld, st, atom, ldmatrix and cp.async first calls `watch` with its lanes' addresses. Beside the
memory there is shadow memory: for each granule of shared memory who wrote and read it last, and when by a clock that
barriers move on; for each granule of a buffer which block did; for each byte whether anything wrote it. A granule is
as large as the smallest access of the kernel to that kind of memory, at most a word.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cudaops.emulator import layout
from cudaops.emulator.access import Site
from cudaops.emulator.layout import LAUNCH, WORKER
from cudaops.emulator.text import Text

READ, WRITE, ATOMIC = 1, 2, 3

# Kinds of findings; those below 10 are the faults of layout.py.
RACE_SHARED, RACE_GLOBAL, UNINITIALISED, MISALIGNED, INACTIVE_LANE = 11, 12, 13, 14, 15
OTHER_BARRIER = 16
CHECKS = {
    layout.ERROR_ACCESS: "memcheck", layout.ERROR_STORE: "memcheck", layout.ERROR_BARRIER: "synccheck",
    layout.ERROR_DEADLOCK: "synccheck", layout.ERROR_ARRIVALS: "synccheck",
    RACE_SHARED: "racecheck", RACE_GLOBAL: "racecheck", UNINITIALISED: "initcheck", MISALIGNED: "memcheck",
    INACTIVE_LANE: "synccheck", OTHER_BARRIER: "synccheck",
}  # fmt: skip

RECORD = "<qqqqqqqq"  # kind, site, other site, warp, lane, block, address, other (thread or block)
RECORD_BYTES = struct.calcsize(RECORD)
MOST_RECORDS = 4096
FINDINGS_BYTES = 8 + MOST_RECORDS * RECORD_BYTES

# Arrays of 32-bit words beside shared memory and buffers, one element a granule of them.
SHARED_SHADOW = ("write_clock", "writer", "write_site", "atomic", "read_clock", "reader", "read_site")
GLOBAL_SHADOW = ("writer", "write_site", "atomic", "reader", "read_site")
SEVERAL = -1  # in reader: lanes of several warps; -(warp + 2): several lanes of that warp


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


def records(log: bytes) -> list[Record]:
    count = min(int.from_bytes(log[:8], "little"), MOST_RECORDS)
    return [Record(*struct.unpack_from(RECORD, log, 8 + n * RECORD_BYTES)) for n in range(count)]


class _Function(Text):
    """A support function being written."""

    def field(self, name: str, ty: str = "i64") -> str:
        return self.at(name, WORKER, "%ctx", ty)

    def at(self, name: str, offsets: dict[str, int], base: str, ty: str = "i64") -> str:
        pointer = self.emit(f"getelementptr i8, ptr {base}, i64 {offsets[name]}")
        return self.emit(f"load {ty}, ptr {pointer}, align 8")

    def keep(self, name: str, value: str) -> None:
        pointer = self.emit(f"getelementptr i8, ptr %ctx, i64 {WORKER[name]}")
        self.line(f"store i64 {value}, ptr {pointer}, align 8")

    def splat(self, ty: str, value: str) -> str:
        first = self.emit(f"insertelement <32 x {ty}> poison, {ty} {value}, i32 0")
        return self.emit(f"shufflevector <32 x {ty}> {first}, <32 x {ty}> poison, <32 x i32> zeroinitializer")

    def gather(self, ty: str, base: str, index: str, mask: str) -> str:
        pointers = self.emit(f"getelementptr {ty}, ptr {base}, <32 x i64> {index}")
        vector = f"<32 x {ty}>"
        name = self.declare(f"llvm.masked.gather.v32{ty}.v32p0", vector, f"<32 x ptr>, i32, <32 x i1>, {vector}")
        return self.emit(
            f"call {vector} @{name}(<32 x ptr> {pointers}, i32 1, <32 x i1> {mask}, {vector} zeroinitializer)"
        )

    def scatter(self, ty: str, base: str, index: str, value: str, mask: str) -> None:
        pointers = self.emit(f"getelementptr {ty}, ptr {base}, <32 x i64> {index}")
        vector = f"<32 x {ty}>"
        name = self.declare(f"llvm.masked.scatter.v32{ty}.v32p0", "void", f"{vector}, <32 x ptr>, i32, <32 x i1>")
        self.line(f"call void @{name}({vector} {value}, <32 x ptr> {pointers}, i32 1, <32 x i1> {mask})")

    def array(self, base: str, number: int, words: str) -> str:
        """Array `number` of the shadow at `base`."""
        bytes_ = self.binary("mul", "i64", words, str(4 * number))
        return self.emit(f"getelementptr i8, ptr {base}, i64 {bytes_}")

    def where(self, test: str, yes: str, no: str, ty: str = "i32") -> str:
        return self.emit(f"select <32 x i1> {test}, <32 x {ty}> {yes}, <32 x {ty}> {no}")

    def bits(self, mask: str) -> str:
        return self.emit(f"bitcast <32 x i1> {mask} to i32")

    def text(self, head: str) -> str:
        body = "\n".join(self.lines)
        declarations = "\n".join(self.declarations.values())
        return f"{declarations}\n{head} {{\nentry:\n{body}\n}}\n"


def ir() -> str:
    return (
        _ticks()
        + _note()
        + _meet()
        + _notes()
        + _watch_shared()
        + _watch_global()
        + _aligned()
        + _inactive()
        + _watch()
    )


def _ticks() -> str:
    """tick(ctx): a barrier of the block. tick_warp(ctx): one of the warp."""
    f = _Function()
    shadow = f.field("shadow", "ptr")
    f.line(f"%off = icmp eq ptr {shadow}, null")
    f.line("br i1 %off, label %out, label %on")
    f.place("on")
    now = f.binary("add", "i64", f.field("clock"), "1")
    f.keep("clock", now)
    f.keep("block_clock", now)
    starts, warps = f.field("warp_clocks", "ptr"), f.at("warps", LAUNCH, f.field("launch", "ptr"))
    now32 = f.emit(f"trunc i64 {now} to i32")
    f.line("br label %next")
    f.place("next")
    f.line("%w = phi i64 [ 0, %on ], [ %w.next, %next ]")
    f.line(f"store i32 {now32}, ptr {f.emit(f'getelementptr i32, ptr {starts}, i64 %w')}, align 4")
    f.line("%w.next = add i64 %w, 1")
    f.line(f"%more = icmp ult i64 %w.next, {warps}")
    f.line("br i1 %more, label %next, label %out")
    f.place("out")
    f.line("ret void")
    block = f.text("define void @cudaops_tick(ptr %ctx) #0")
    f = _Function()
    now = f.binary("add", "i64", f.field("clock"), "1")
    f.keep("clock", now)
    place = f.emit(f"getelementptr i32, ptr {f.field('warp_clocks', 'ptr')}, i64 {f.field('warp')}")
    now32 = f.emit(f"trunc i64 {now} to i32")
    f.line(f"store i32 {now32}, ptr {place}, align 4")
    f.line("ret void")
    return block + f.text("define void @cudaops_tick_warp(ptr %ctx) #0")


def _meet() -> str:
    """meet(ctx, frame bytes, warps): a finding for each warp that waits for barrier 0 elsewhere than the first one."""
    f = _Function()
    f.line(f"%off = icmp eq ptr {f.field('shadow', 'ptr')}, null")
    frames = f.field("frames", "ptr")
    f.line("br i1 %off, label %out, label %next")
    f.place("next")
    f.line("%w = phi i64 [ 0, %entry ], [ %w.next, %more ]")
    f.line("%first = phi i64 [ -1, %entry ], [ %first.next, %more ]")
    f.line("%first.site = phi i64 [ -1, %entry ], [ %first.site.next, %more ]")
    frame = f.emit(f"getelementptr i8, ptr {frames}, i64 {f.binary('mul', 'i64', '%w', '%frame.bytes')}")
    count_at = f.emit(f"getelementptr i8, ptr {frame}, i64 {layout.FRAME['counts']}")
    waits = f.emit(f"icmp ne i16 {f.emit(f'load i16, ptr {count_at}, align 2')}, 0")
    site_at = f.emit(f"getelementptr i8, ptr {frame}, i64 {layout.FRAME['site']}")
    site = f.emit(f"sext i32 {f.emit(f'load i32, ptr {site_at}, align 4')} to i64")
    f.line(f"br i1 {waits}, label %look, label %more")
    f.place("look")
    f.line("%none = icmp eq i64 %first, -1")
    same = f.emit(f"icmp eq i64 {site}, %first.site")
    f.line("%now = select i1 %none, i64 %w, i64 %first")
    f.line(f"%now.site = select i1 %none, i64 {site}, i64 %first.site")
    f.line(f"br i1 {f.binary('or', 'i1', '%none', same)}, label %more, label %bad")
    f.place("bad")
    f.keep("warp", "%w")
    f.line(
        f"call void @cudaops_note(ptr %ctx, i64 {OTHER_BARRIER}, i64 {site}, i64 %first.site, i64 0, i64 0, i64 %first)"
    )
    f.line("br label %more")
    f.place("more")
    f.line("%first.next = phi i64 [ %first, %next ], [ %now, %look ], [ %first, %bad ]")
    f.line("%first.site.next = phi i64 [ %first.site, %next ], [ %now.site, %look ], [ %first.site, %bad ]")
    f.line("%w.next = add i64 %w, 1")
    f.line("%end = icmp eq i64 %w.next, %warps")
    f.line("br i1 %end, label %out, label %next")
    f.place("out")
    f.line("ret void")
    return f.text("define void @cudaops_meet(ptr %ctx, i64 %frame.bytes, i64 %warps) noinline #0")


def _note() -> str:
    """note(ctx, kind, site, other site, lane, address, other): one finding in the launch's log."""
    f = _Function()
    launch = f.field("launch", "ptr")
    log = f.at("findings", LAUNCH, launch, "ptr")
    none = f.emit(f"icmp eq ptr {log}, null")
    f.line(f"br i1 {none}, label %out, label %take")
    f.place("take")
    n = f.emit(f"atomicrmw add ptr {log}, i64 1 monotonic")
    fits = f.emit(f"icmp ult i64 {n}, {MOST_RECORDS}")
    f.line(f"br i1 {fits}, label %put, label %out")
    f.place("put")
    offset = f.binary("add", "i64", f.binary("mul", "i64", n, str(RECORD_BYTES)), "8")
    record = f.emit(f"getelementptr i8, ptr {log}, i64 {offset}")
    values = ["%kind", "%site", "%other.site", f.field("warp"), "%lane", f.field("block"), "%address", "%other"]
    for place, value in enumerate(values):
        f.line(f"store i64 {value}, ptr {f.emit(f'getelementptr i64, ptr {record}, i64 {place}')}, align 8")
    f.line("br label %out")
    f.place("out")
    f.line("ret void")
    return f.text(
        "define void @cudaops_note(ptr %ctx, i64 %kind, i64 %site, i64 %other.site, i64 %lane, i64 %address, "
        "i64 %other) noinline #0"
    )


def _notes() -> str:
    """notes(ctx, mask, kind, site, other sites, addresses, others): a finding for each lane of the mask."""
    f = _Function()
    for name, ty in (("sites", "i32"), ("others", "i32"), ("addresses", "i64")):
        f.line(f"%{name}.at = alloca <32 x {ty}>, align 64")
        f.line(f"store <32 x {ty}> %{name}, ptr %{name}.at, align 64")
    f.line("br label %next")
    f.place("next")
    f.line("%lane = phi i64 [ 0, %entry ], [ %lane.next, %more ]")
    lane32 = f.emit("trunc i64 %lane to i32")
    bit = f.binary("shl", "i32", "1", lane32)
    on = f.emit(f"icmp ne i32 {f.binary('and', 'i32', '%mask', bit)}, 0")
    f.line(f"br i1 {on}, label %do, label %more")
    f.place("do")
    picked = {}
    for name, ty in (("sites", "i32"), ("others", "i32"), ("addresses", "i64")):
        value = f.emit(f"load {ty}, ptr {f.emit(f'getelementptr {ty}, ptr %{name}.at, i64 %lane')}, align 4")
        picked[name] = f.emit(f"sext i32 {value} to i64") if ty == "i32" else value
    f.line(
        f"call void @cudaops_note(ptr %ctx, i64 %kind, i64 %site, i64 {picked['sites']}, i64 %lane, "
        f"i64 {picked['addresses']}, i64 {picked['others']})"
    )
    f.line("br label %more")
    f.place("more")
    f.line("%lane.next = add i64 %lane, 1")
    f.line("%end = icmp eq i64 %lane.next, 32")
    f.line("br i1 %end, label %out, label %next")
    f.place("out")
    f.line("ret void")
    return f.text(
        "define void @cudaops_notes(ptr %ctx, i32 %mask, i64 %kind, i64 %site, <32 x i32> %sites, "
        "<32 x i64> %addresses, <32 x i32> %others) noinline #0"
    )


def _watch_shared() -> str:
    """One granule of an access to shared memory, by all lanes of the mask.

    Two accesses race when one writes, they are of different threads, at the same granule, and no barrier of the block
    (for lanes of one warp: no __syncwarp either) lies between. The clock moves on at each of these.
    """
    f = _Function()
    i32 = "<32 x i32>"
    mask = f.emit("bitcast i32 %mask to <32 x i1>")
    base, words = f.field("shadow", "ptr"), f.field("shadow_words")
    arrays = {name: f.array(base, n, words) for n, name in enumerate(SHARED_SHADOW)}
    warp64 = f.field("warp")
    warp = f.emit(f"trunc i64 {warp64} to i32")
    starts = f.field("warp_clocks", "ptr")
    warp_start = f.emit(f"load i32, ptr {f.emit(f'getelementptr i32, ptr {starts}, i64 {warp64}')}, align 4")
    block_start = f.emit(f"trunc i64 {f.field('block_clock')} to i32")
    clock = f.splat("i32", f.emit(f"trunc i64 {f.field('clock')} to i32"))
    warps, mine, block = (f.splat("i32", v) for v in (warp, warp_start, block_start))
    lanes = "<" + ", ".join(f"i32 {n}" for n in range(32)) + ">"
    tid = f.binary("add", i32, f.splat("i32", f.binary("shl", "i32", warp, "5")), lanes)
    site = f.splat("i32", f.emit("trunc i64 %site to i32"))
    f.line("%stores = icmp ne i32 %kind, 1")
    f.line("%atomic = icmp eq i32 %kind, 3")

    # against the last write
    clock_w = f.gather("i32", arrays["write_clock"], "%index", mask)
    writer = f.gather("i32", arrays["writer"], "%index", mask)
    atomic_w = f.gather("i32", arrays["atomic"], "%index", mask)
    near = f.emit(f"icmp eq {i32} {f.binary('ashr', i32, writer, 'splat (i32 5)')}, {warps}")
    fresh = f.emit(f"icmp sge {i32} {clock_w}, {f.where(near, mine, block)}")
    other = f.emit(f"icmp ne {i32} {writer}, {tid}")
    both = f.emit(f"icmp ne {i32} {atomic_w}, zeroinitializer")
    atomics = f.binary("and", "<32 x i1>", both, f.splat("i1", "%atomic"))
    clash = f.binary("and", "<32 x i1>", fresh, other)
    clash = f.binary("and", "<32 x i1>", clash, f.emit(f"xor <32 x i1> {atomics}, splat (i1 true)"))
    clash = f.bits(f.binary("and", "<32 x i1>", clash, mask))
    f.line(f"%w.some = icmp ne i32 {clash}, 0")
    f.line("br i1 %w.some, label %w.note, label %w.done")
    f.place("w.note")
    sites = f.gather("i32", arrays["write_site"], "%index", mask)
    _call_notes(f, clash, RACE_SHARED, sites, writer)
    f.line("br label %w.done")
    f.place("w.done")

    # the last read
    clock_r = f.gather("i32", arrays["read_clock"], "%index", mask)
    reader = f.gather("i32", arrays["reader"], "%index", mask)
    single = f.emit(f"icmp sge {i32} {reader}, zeroinitializer")
    several = f.binary("sub", i32, "splat (i32 -2)", reader)
    warp_r = f.where(single, f.binary("ashr", i32, reader, "splat (i32 5)"), several)
    near_r = f.emit(f"icmp eq {i32} {warp_r}, {warps}")
    valid = f.emit(f"icmp sge {i32} {clock_r}, {f.where(near_r, mine, block)}")
    self_r = f.emit(f"icmp eq {i32} {reader}, {tid}")
    f.line("br i1 %stores, label %store, label %load")

    f.place("store")
    clash_r = f.binary("and", "<32 x i1>", valid, f.emit(f"xor <32 x i1> {self_r}, splat (i1 true)"))
    clash_r = f.bits(f.binary("and", "<32 x i1>", clash_r, mask))
    f.line(f"%r.some = icmp ne i32 {clash_r}, 0")
    f.line("br i1 %r.some, label %r.note, label %r.done")
    f.place("r.note")
    sites = f.gather("i32", arrays["read_site"], "%index", mask)
    _call_notes(f, clash_r, RACE_SHARED, sites, reader)
    f.line("br label %r.done")
    f.place("r.done")
    flag = f.splat("i32", f.emit("zext i1 %atomic to i32"))
    f.scatter("i32", arrays["write_clock"], "%index", clock, mask)
    f.scatter("i32", arrays["writer"], "%index", tid, mask)
    f.scatter("i32", arrays["atomic"], "%index", flag, mask)
    f.scatter("i32", arrays["write_site"], "%index", site, mask)
    # two lanes of this very instruction
    last = f.gather("i32", arrays["writer"], "%index", mask)
    twice = f.emit(f"icmp ne {i32} {last}, {tid}")
    twice = f.bits(f.binary("and", "<32 x i1>", twice, mask))
    twice = f.emit(f"select i1 %atomic, i32 0, i32 {twice}")
    f.line(f"%t.some = icmp ne i32 {twice}, 0")
    f.line("br i1 %t.some, label %t.note, label %out")
    f.place("t.note")
    _call_notes(f, twice, RACE_SHARED, site, last)
    f.line("br label %out")

    f.place("load")
    group = f.where(near_r, f.binary("sub", i32, "splat (i32 -2)", warps), f"splat (i32 {SEVERAL})")
    joined = f.where(self_r, tid, group)
    now = f.where(valid, joined, tid)
    f.scatter("i32", arrays["read_clock"], "%index", clock, mask)
    f.scatter("i32", arrays["reader"], "%index", now, mask)
    f.scatter("i32", arrays["read_site"], "%index", site, mask)
    again = f.gather("i32", arrays["reader"], "%index", mask)
    lost = f.binary("and", "<32 x i1>", f.emit(f"icmp ne {i32} {again}, {now}"), mask)
    lone = f.emit(f"icmp sge {i32} {again}, zeroinitializer")
    lost = f.binary("and", "<32 x i1>", lost, lone)
    f.scatter("i32", arrays["reader"], "%index", f.binary("sub", i32, "splat (i32 -2)", warps), lost)
    f.line("br label %out")
    f.place("out")
    f.line("ret void")
    return f.text(
        "define void @cudaops_watch_shared(ptr %ctx, <32 x i64> %addresses, <32 x i64> %index, i32 %mask, "
        "i32 %kind, i64 %site) noinline #0"
    )


def _call_notes(f: _Function, mask: str, kind: int, sites: str, others: str) -> None:
    f.line(
        f"call void @cudaops_notes(ptr %ctx, i32 {mask}, i64 {kind}, i64 %site, <32 x i32> {sites}, "
        f"<32 x i64> %addresses, <32 x i32> {others})"
    )


def _watch_global() -> str:
    """One lane's access to a buffer of the launch: blocks that touch the same granule, and bytes nothing wrote.

    What a block wrote before a fence and an atomic may be read by a block that has done an atomic since.
    """
    f = _Function()
    launch = f.field("launch", "ptr")
    count, table = f.at("buffer_count", LAUNCH, launch), f.at("buffers", LAUNCH, launch, "ptr")
    shadows = f.at("shadows", LAUNCH, launch, "ptr")
    released = f.at("released", LAUNCH, launch, "ptr")
    block64 = f.field("block")
    block = f.emit(f"trunc i64 {f.binary('add', 'i64', block64, '1')} to i32")
    acquired = f.emit(f"icmp ne i64 {f.field('acquired')}, 0")
    f.line("%stores = icmp ne i32 %kind, 1")
    f.line("%loads = icmp ne i32 %kind, 2")
    f.line("%atomic = icmp eq i32 %kind, 3")
    f.line("%end = add i64 %address, %bytes")
    f.line("br i1 %atomic, label %order, label %start")
    f.place("order")
    f.keep("acquired", "1")
    fenced = f.emit(f"icmp ne i64 {f.field('fenced')}, 0")
    mark = f.emit(f"getelementptr i8, ptr {released}, i64 {block64}")
    was = f.emit(f"load i8, ptr {mark}, align 1")
    f.line(f"store i8 {f.emit(f'select i1 {fenced}, i8 1, i8 {was}')}, ptr {mark}, align 1")
    f.line("br label %start")
    f.place("start")
    f.line("br label %search")
    f.place("search")
    f.line("%n = phi i64 [ 0, %start ], [ %n.next, %other ]")
    more = f.emit(f"icmp ult i64 %n, {count}")
    f.line(f"br i1 {more}, label %try, label %out")
    f.place("try")
    entry = f.emit(f"getelementptr [2 x i64], ptr {table}, i64 %n")
    low = f.emit(f"load i64, ptr {entry}, align 8")
    size = f.emit(f"load i64, ptr {f.emit(f'getelementptr i8, ptr {entry}, i64 8')}, align 8")
    above = f.emit(f"icmp uge i64 %address, {low}")
    below = f.emit(f"icmp ule i64 %end, {f.binary('add', 'i64', low, size)}")
    f.line(f"br i1 {f.binary('and', 'i1', above, below)}, label %found, label %other")
    f.place("other")
    f.line("%n.next = add i64 %n, 1")
    f.line("br label %search")
    f.place("found")
    pair = f.emit(f"getelementptr [2 x ptr], ptr {shadows}, i64 %n")
    race = f.emit(f"load ptr, ptr {pair}, align 8")
    init = f.emit(f"load ptr, ptr {f.emit(f'getelementptr i8, ptr {pair}, i64 8')}, align 8")
    into = f.binary("sub", "i64", "%address", low)
    has_init = f.emit(f"icmp ne ptr {init}, null")
    f.line(f"br i1 {has_init}, label %bytewise, label %words")
    f.place("bytewise")
    _initialisation(f, init, into, "words")
    f.place("words")
    shift = f.at("granule_shift", LAUNCH, launch)
    round_up = f.binary("sub", "i64", f.binary("shl", "i64", "1", shift), "1")
    words = f.binary("lshr", "i64", f.binary("add", "i64", size, round_up), shift)
    arrays = {name: f.array(race, n, words) for n, name in enumerate(GLOBAL_SHADOW)}
    has_race = f.emit(f"icmp ne ptr {race}, null")
    first = f.binary("lshr", "i64", into, shift)
    last = f.binary("lshr", "i64", f.binary("sub", "i64", f.binary("add", "i64", into, "%bytes"), "1"), shift)
    f.line(f"br i1 {has_race}, label %word, label %out")
    f.place("word")
    f.line(f"%w = phi i64 [ {first}, %words ], [ %w.next, %w.end ]")
    at = {name: f.emit(f"getelementptr i32, ptr {pointer}, i64 %w") for name, pointer in arrays.items()}
    value = {name: f.emit(f"load i32, ptr {pointer}, align 4") for name, pointer in at.items()}

    def clash(who: str) -> str:
        owner = value[who]
        someone = f.emit(f"icmp ne i32 {owner}, 0")
        foreign = f.emit(f"icmp ne i32 {owner}, {block}")
        positive = f.emit(f"icmp sgt i32 {owner}, 0")
        index = f.emit(f"select i1 {positive}, i32 {owner}, i32 1")
        place = f.binary("sub", "i64", f.emit(f"sext i32 {index} to i64"), "1")
        let = f.emit(f"load i8, ptr {f.emit(f'getelementptr i8, ptr {released}, i64 {place}')}, align 1")
        ordered = f.binary("and", "i1", f.emit(f"icmp ne i8 {let}, 0"), acquired)
        ordered = f.binary("and", "i1", ordered, positive)
        free = ordered
        if who == "writer":
            both = f.binary("and", "i1", f.emit(f"icmp ne i32 {value['atomic']}, 0"), "%atomic")
            free = f.binary("or", "i1", ordered, both)
        found = f.binary("and", "i1", someone, foreign)
        return f.binary("and", "i1", found, f.emit(f"xor i1 {free}, true"))

    bad_w = clash("writer")
    bad_r = f.binary("and", "i1", clash("reader"), "%stores")
    f.line(f"br i1 {bad_w}, label %note.w, label %test.r")
    f.place("note.w")
    _call_note(f, RACE_GLOBAL, value["write_site"], value["writer"])
    f.line("br label %update")
    f.place("test.r")
    f.line(f"br i1 {bad_r}, label %note.r, label %update")
    f.place("note.r")
    _call_note(f, RACE_GLOBAL, value["read_site"], value["reader"])
    f.line("br label %update")
    f.place("update")
    site = f.emit("trunc i64 %site to i32")
    f.line("br i1 %stores, label %put.w, label %put.r")
    f.place("put.w")
    f.line(f"store i32 {block}, ptr {at['writer']}, align 4")
    f.line(f"store i32 {f.emit('zext i1 %atomic to i32')}, ptr {at['atomic']}, align 4")
    f.line(f"store i32 {site}, ptr {at['write_site']}, align 4")
    f.line("br label %w.end")
    f.place("put.r")
    none = f.emit(f"icmp eq i32 {value['reader']}, 0")
    me = f.emit(f"icmp eq i32 {value['reader']}, {block}")
    new = f.emit(f"select i1 {f.binary('or', 'i1', none, me)}, i32 {block}, i32 {SEVERAL}")
    f.line(f"store i32 {new}, ptr {at['reader']}, align 4")
    f.line(f"store i32 {site}, ptr {at['read_site']}, align 4")
    f.line("br label %w.end")
    f.place("w.end")
    f.line("%w.next = add i64 %w, 1")
    f.line(f"%w.more = icmp ule i64 %w.next, {last}")
    f.line("br i1 %w.more, label %word, label %out")
    f.place("out")
    f.line("ret void")
    return f.text(
        "define void @cudaops_watch_global(ptr %ctx, i64 %address, i64 %bytes, i64 %lane, i32 %kind, i64 %site) "
        "noinline #0"
    )


def _call_note(f: _Function, kind: int, other_site: str, other: str) -> None:
    f.line(
        f"call void @cudaops_note(ptr %ctx, i64 {kind}, i64 %site, i64 {f.emit(f'sext i32 {other_site} to i64')}, "
        f"i64 %lane, i64 %address, i64 {f.emit(f'sext i32 {other} to i64')})"
    )


def _initialisation(f: _Function, init: str, into: str, done: str) -> None:
    """Reads must find every byte written; writes write them. %loads / %stores say which it is."""
    f.line("br label %byte")
    f.place("byte")
    f.line("%k = phi i64 [ 0, %bytewise ], [ %k.next, %byte.end ]")
    place = f.emit(f"getelementptr i8, ptr {init}, i64 {f.binary('add', 'i64', into, '%k')}")
    written = f.emit(f"load i8, ptr {place}, align 1")
    empty = f.binary("and", "i1", f.emit(f"icmp eq i8 {written}, 0"), "%loads")
    f.line(f"br i1 {empty}, label %unset, label %set")
    f.place("unset")
    f.line(f"call void @cudaops_note(ptr %ctx, i64 {UNINITIALISED}, i64 %site, i64 -1, i64 %lane, i64 %address, i64 0)")
    f.line(f"store i8 1, ptr {place}, align 1")  # one finding a byte is enough
    f.line("br label %byte.end")
    f.place("set")
    kept = f.emit(f"select i1 %stores, i8 1, i8 {written}")
    f.line(f"store i8 {kept}, ptr {place}, align 1")
    f.line("br label %byte.end")
    f.place("byte.end")
    f.line("%k.next = add i64 %k, 1")
    f.line("%k.more = icmp ult i64 %k.next, %bytes")
    f.line(f"br i1 %k.more, label %byte, label %{done}")


def _aligned() -> str:
    """aligned(ctx, addresses, mask, bytes, site): the lanes whose addresses are multiples of bytes, a power of two."""
    f = _Function()
    low = f.splat("i64", f.binary("sub", "i64", "%bytes", "1"))
    odd = f.emit(f"icmp ne <32 x i64> {f.binary('and', '<32 x i64>', '%addresses', low)}, zeroinitializer")
    bits = f.binary("and", "i32", f.bits(odd), "%mask")
    f.line(f"%some = icmp ne i32 {bits}, 0")
    f.line("br i1 %some, label %odd, label %out")
    f.place("odd")
    f.line(
        f"call void @cudaops_notes(ptr %ctx, i32 {bits}, i64 {MISALIGNED}, i64 %site, <32 x i32> splat (i32 -1), "
        "<32 x i64> %addresses, <32 x i32> zeroinitializer)"
    )
    f.line("br label %out")
    f.place("out")
    f.line(f"ret i32 {f.binary('and', 'i32', '%mask', f.binary('xor', 'i32', bits, '-1'))}")
    return f.text(
        "define i32 @cudaops_aligned(ptr %ctx, <32 x i64> %addresses, i32 %mask, i64 %bytes, i64 %site) noinline #0"
    )


def _inactive() -> str:
    """inactive(ctx, lanes, sources, active, site): a finding for each lane of `lanes` whose source is not active."""
    f = _Function()
    i32 = "<32 x i32>"
    bit = f.binary("lshr", i32, f.splat("i32", "%active"), "%sources")
    off = f.emit(f"icmp eq {i32} {f.binary('and', i32, bit, 'splat (i32 1)')}, zeroinitializer")
    bits = f.binary("and", "i32", f.bits(off), "%lanes")
    f.line(f"%some = icmp ne i32 {bits}, 0")
    f.line("br i1 %some, label %note, label %out")
    f.place("note")
    f.line(
        f"call void @cudaops_notes(ptr %ctx, i32 {bits}, i64 {INACTIVE_LANE}, i64 %site, {i32} splat (i32 -1), "
        f"<32 x i64> zeroinitializer, {i32} %sources)"
    )
    f.line("br label %out")
    f.place("out")
    f.line("ret void")
    return f.text(
        "define void @cudaops_inactive(ptr %ctx, i32 %lanes, <32 x i32> %sources, i32 %active, i64 %site) noinline #0"
    )


def _watch() -> str:
    """watch(ctx, addresses, mask, bytes, kind, site, slot, spaces): check an access; the lanes that may make it."""
    f = _Function()
    f.line("%places = alloca <32 x i64>, align 64")
    f.line("store <32 x i64> %addresses, ptr %places, align 64")
    f.line("%bytes64 = zext i32 %bytes to i64")
    f.line("%site64 = zext i32 %site to i64")
    error = f.emit(f"icmp eq i32 %kind, {READ}")
    fault = f.emit(f"select i1 {error}, i32 {layout.ERROR_ACCESS}, i32 {layout.ERROR_STORE}")
    good = f.emit(
        f"call i32 @cudaops_allowed(ptr %ctx, <32 x i64> %addresses, i32 %mask, i64 %bytes64, i32 %site, i32 %slot, "
        f"i32 %spaces, i32 {fault})"
    )
    left = f.emit(f"call i32 @cudaops_aligned(ptr %ctx, <32 x i64> %addresses, i32 {good}, i64 %bytes64, i64 %site64)")
    # shared memory, all lanes at once, granule by granule
    base, size = f.field("shared"), f.field("shared_bytes")
    into = f.binary("sub", "<32 x i64>", "%addresses", f.splat("i64", base))
    inside = f.emit(f"icmp ult <32 x i64> {into}, {f.splat('i64', size)}")
    inner = f.binary("and", "i32", f.bits(inside), left)
    f.line(f"%shared.some = icmp ne i32 {inner}, 0")
    f.line("br i1 %shared.some, label %shared, label %rest")
    f.place("shared")
    shift = f.field("shadow_shift")
    words = f.emit(f"trunc i64 {f.binary('lshr', 'i64', '%bytes64', shift)} to i32")
    first = f.binary("lshr", "<32 x i64>", into, f.splat("i64", shift))
    f.line("br label %word")
    f.place("word")
    f.line("%w = phi i32 [ 0, %shared ], [ %w.next, %word ]")
    step = f.splat("i64", f.emit("zext i32 %w to i64"))
    index = f.binary("add", "<32 x i64>", first, step)
    f.line(
        f"call void @cudaops_watch_shared(ptr %ctx, <32 x i64> %addresses, <32 x i64> {index}, i32 {inner}, "
        f"i32 %kind, i64 %site64)"
    )
    f.line("%w.next = add i32 %w, 1")
    f.line(f"%w.more = icmp ult i32 %w.next, {words}")
    f.line("br i1 %w.more, label %word, label %lanes")
    f.place("rest")
    f.line("br label %lanes")
    # per lane: bytes of shared memory that nothing wrote, and buffers
    f.place("lanes")
    f.line("%stores = icmp ne i32 %kind, 1")
    f.line("%loads = icmp ne i32 %kind, 2")
    f.line("br label %next")
    f.place("next")
    f.line("%lane = phi i64 [ 0, %lanes ], [ %lane.next, %more ]")
    bit = f.binary("shl", "i32", "1", f.emit("trunc i64 %lane to i32"))
    on = f.emit(f"icmp ne i32 {f.binary('and', 'i32', left, bit)}, 0")
    f.line(f"br i1 {on}, label %do, label %more")
    f.place("do")
    address = f.emit(f"load i64, ptr {f.emit('getelementptr i64, ptr %places, i64 %lane')}, align 8")
    f.line(f"%address = add i64 {address}, 0")
    low_ = f.field("shared")
    offset = f.binary("sub", "i64", "%address", low_)
    in_shared = f.emit(f"icmp ult i64 {offset}, {f.field('shared_bytes')}")
    f.line(f"br i1 {in_shared}, label %pre, label %buffer")
    f.place("pre")
    shared_init = f.field("shared_init", "ptr")
    f.line("br label %bytewise")
    f.place("bytewise")
    inner_text = _Function()
    inner_text.count = f.count + 1000
    _initialisation(inner_text, shared_init, offset, "more")
    replaced = [line.replace("i64 %site,", "i64 %site64,").replace("%k.next, %bytes", "%k.next, %bytes64")
                for line in inner_text.lines]  # fmt: skip
    f.lines += replaced
    f.place("buffer")
    f.line("call void @cudaops_watch_global(ptr %ctx, i64 %address, i64 %bytes64, i64 %lane, i32 %kind, i64 %site64)")
    f.line("br label %more")
    f.place("more")
    f.line("%lane.next = add i64 %lane, 1")
    f.line("%end = icmp eq i64 %lane.next, 32")
    f.line("br i1 %end, label %out, label %next")
    f.place("out")
    f.line(f"ret i32 {left}")
    return f.text(
        "define i32 @cudaops_watch(ptr %ctx, <32 x i64> %addresses, i32 %mask, i32 %bytes, i32 %kind, i32 %site, "
        "i32 %slot, i32 %spaces) #0"
    )


def granule(sites: Sequence[Site], space: str) -> int:
    """Bytes, a power of two: no access to `space` is smaller, nor lies across the granules of such a one."""
    return min(4, *(site.bytes for site in sites if site.bytes and site.space in (space, "generic")), 4)


def first_of_each(found: Sequence[Record]) -> list[Record]:
    """One record for each kind and pair of places: the first block's, its first warp's."""
    kept: dict[tuple[int, int, int], Record] = {}
    for record in sorted(found, key=lambda r: (r.block, r.warp, r.lane)):
        kept.setdefault((record.kind, record.site, record.other_site), record)
    return sorted(kept.values(), key=lambda r: (r.block, r.warp, r.site))
