"""The sanitizer's look at an access whose lanes may be anywhere: their granules are gathered and scattered.

`watch` returns the lanes that may make the access; it is called before. hull.py is the shorter way for accesses whose
lanes are constants apart, and comes here when anything is odd: all findings about memory are noted in this file.
"""

from __future__ import annotations

from cudaops.emulator import layout, shadow
from cudaops.emulator.function import BOOLS, LANE_NUMBERS, V32, V64, Function
from cudaops.emulator.layout import LAUNCH, SPACES
from cudaops.emulator.sanitizer import (
    ATOMIC,
    COPY,
    IN_FLIGHT,
    RACE_GLOBAL,
    RACE_SHARED,
    READ,
    SEVERAL,
    STRONG_READ,
    UNINITIALISED,
    call_notes,
)

_ARGUMENTS = f"ptr %ctx, {V64} %addresses, i32 %mask, i64 %bytes, i32 %kind, i64 %site"


def functions() -> list[Function]:
    return [_shared(), _buffer(), _local(), _watch()]


def _watch() -> Function:
    """watch(ctx, addresses, mask, bytes, kind, site, slot, spaces): check an access; the lanes that may make it."""
    f = Function(
        f"i32 @cudaops_watch(ptr %ctx, {V64} %addresses, i32 %mask, i32 %bytes, i32 %kind, i32 %site, i32 %slot, "
        "i32 %spaces)"
    )
    f.line("%places = alloca <32 x i64>, align 64")
    f.line("%bytes64 = zext i32 %bytes to i64")
    f.line("%site64 = zext i32 %site to i64")
    reads = [f.test("eq", "i32", "%kind", str(kind)) for kind in (READ, STRONG_READ)]
    f.line(f"%loads.only = or i1 {reads[0]}, {reads[1]}")
    atomic = f.test("eq", "i32", "%kind", str(ATOMIC))
    f.line(f"%strong = or i1 {atomic}, {f.test('ugt', 'i32', '%kind', str(COPY))}")
    slots = f.field("slots", "ptr")
    mine = f.past(slots, f.binary("mul", "i64", f.extend("%slot"), str(layout.SLOT_BYTES)))

    def of_slot(offset: int, ty: str = "i64") -> str:
        return f.load(ty, f.past(mine, offset), 8)

    # inside the extents that it may touch
    room = f.splat("i64", f.binary("sub", "i64", of_slot(layout.SLOT_SIZE), "%bytes64"))
    into = f.binary("sub", V64, "%addresses", f.splat("i64", of_slot(0)))
    outside = f.binary("or", BOOLS, f.test("slt", V64, into, "zeroinitializer"), f.test("sgt", V64, into, room))
    odd = f.binary("and", "i32", f.bits(outside), "%mask")
    near = f.binary("and", "i32", "%mask", f.binary("xor", "i32", odd, "-1"))
    f.some(odd, "ask", "align")
    f.place("ask")
    fault = f.emit(f"select i1 %loads.only, i32 {layout.ERROR_ACCESS}, i32 {layout.ERROR_STORE}")
    asked = f.emit(
        f"call i32 @cudaops_allowed(ptr %ctx, {V64} %addresses, i32 {odd}, i64 %bytes64, i32 %site, i32 %slot, "
        f"i32 %spaces, i32 {fault})"
    )
    all_good = f.binary("or", "i32", near, asked)
    f.jump("align")
    f.place("align")
    f.line(f"%good = phi i32 [ {near}, %entry ], [ {all_good}, %ask ]")
    f.line(f"%left = call i32 @cudaops_aligned(ptr %ctx, {V64} %addresses, i32 %good, i64 %bytes64, i64 %site64)")

    def among(base: str, size: str) -> str:
        """The lanes left whose address is in [base, base + size)."""
        there = f.test("ult", V64, f.binary("sub", V64, "%addresses", f.splat("i64", base)), f.splat("i64", size))
        return f.binary("and", "i32", f.bits(there), "%left")

    # A strong write after a fence hands over what was written before it: as if the whole block met there.
    fenced = f.all_of("i1", "%strong", f.test("ne", "i64", f.field("fenced_block"), "0"), f.invert("i1", "%loads.only"))
    f.branch(fenced, "hand.over", "go.on")
    f.place("hand.over")
    f.line("call void @cudaops_tick(ptr %ctx)")
    f.jump("go.on")
    f.place("go.on")
    in_shared = among(f.field("shared"), f.field("shared_bytes"))
    in_locals = among(f.field("locals"), f.field("locals_bytes"))
    for name, lanes, following in (("shared", in_shared, "not.shared"), ("local", in_locals, "not.local")):
        f.branch(f.test("ne", "i32", lanes, "0"), f"in.{name}", following)
        f.place(f"in.{name}")
        f.line(
            f"call void @cudaops_watch_{name}(ptr %ctx, {V64} %addresses, i32 {lanes}, i64 %bytes64, i32 %kind, "
            "i64 %site64)"
        )
        f.jump(following)
        f.place(following)

    # what is left lies in buffers: one after the other, with all of its lanes
    known = f.binary("or", "i32", in_shared, in_locals)
    f.line(f"%rest = and i32 %left, {f.binary('xor', 'i32', known, '-1')}")
    f.branch(f.test("ne", "i32", "%rest", "0"), "buffers", "out")
    f.place("buffers")
    f.line(f"store {V64} %addresses, ptr %places, align 64")
    f.branch("%strong", "order", "start")
    f.place("order")
    _acquire_and_release(f)
    f.jump("start")
    f.place("start")
    f.jump("next")
    f.place("next")
    f.line("%some = phi i32 [ %rest, %start ], [ %others, %done ]")
    name = f.declare("llvm.cttz.i32", "i32", "i32, i1")
    lane = f.emit(f"call i32 @{name}(i32 %some, i1 true)")
    address = f.load("i64", f.element("i64", "%places", f.extend(lane)), 8)
    offset = f.binary("sub", "i64", address, of_slot(0))
    space = f.binary("sub", "i64", of_slot(layout.SLOT_SIZE), "%bytes64")
    above, below = f.test("sge", "i64", offset, "0"), f.test("sle", "i64", offset, space)
    f.branch(f.all_of("i1", above, below), "found", "find")
    f.place("find")
    there = f.emit(
        f"call preserve_allcc i1 @cudaops_hull(ptr %ctx, i64 {address}, i64 %bytes64, i32 %slot, "
        f"i32 {SPACES['global']})"
    )
    f.branch(there, "found", "out")
    f.place("found")
    room = f.splat("i64", f.binary("sub", "i64", of_slot(layout.SLOT_SIZE), "%bytes64"))
    into = f.binary("sub", V64, "%addresses", f.splat("i64", of_slot(0)))
    here = f.binary("and", "i32", f.bits(f.test("ule", V64, into, room)), "%some")
    f.line(
        f"call void @cudaops_watch_buffer(ptr %ctx, {V64} %addresses, i32 {here}, i64 %bytes64, i32 %kind, "
        f"i64 %site64, ptr {of_slot(layout.SLOT_SHADOW, 'ptr')}, i64 {of_slot(layout.SLOT_DISTANCE)})"
    )
    f.jump("done")
    f.place("done")
    f.line(f"%others = and i32 %some, {f.binary('xor', 'i32', here, '-1')}")
    f.branch(f.test("ne", "i32", "%others", "0"), "next", "out")
    f.place("out")
    f.line("ret i32 %left")
    return f


def _acquire_and_release(f: Function) -> None:
    """A strong access to a buffer: what blocks released before is seen from now on, and a fence before it releases."""
    f.keep("acquired", "1")
    released = f.at("released", LAUNCH, f.field("launch", "ptr"), "ptr")
    mark = f.past(released, f.field("block"))
    writes = f.invert("i1", "%loads.only")
    fenced = f.all_of("i1", f.test("ne", "i64", f.field("fenced"), "0"), writes)
    was = f.load("i8", mark, 1)
    f.line(f"store i8 {f.emit(f'select i1 {fenced}, i8 1, i8 {was}')}, ptr {mark}, align 1")


def _steps(f: Function, base: str, shift: str) -> str:
    """Begin a loop over the granules of each lane's access, from the entry block; the indices of the current ones.

    It goes on from %step.end, which `_step_end` places.
    """
    granules = f.trunc(f.binary("lshr", "i64", "%bytes", shift))
    f.line(f"%granules = call i32 @llvm.umax.i32(i32 {granules}, i32 1)")  # fewer bytes than one lie in one
    f.declare("llvm.umax.i32", "i32", "i32, i32")
    first = f.binary("lshr", V64, base, f.splat("i64", shift))
    f.jump("step")
    f.place("step")
    f.line("%w = phi i32 [ 0, %entry ], [ %w.next, %step.end ]")
    return f.binary("add", V64, first, f.splat("i64", f.extend("%w")))


def _step_end(f: Function) -> None:
    f.place("step.end")
    f.line("%w.next = add i32 %w, 1")
    f.branch(f.test("ult", "i32", "%w.next", "%granules"), "step", "out")
    f.place("out")
    f.line("ret void")


def _noted(f: Function, name: str, bits: str, kind: int, **what: str) -> None:
    """A finding for each lane of `bits`, if there are any."""
    f.some(bits, f"{name}.note", f"{name}.done")
    f.place(f"{name}.note")
    call_notes(f, bits, kind, **what)
    f.jump(f"{name}.done")
    f.place(f"{name}.done")


def _kinds(f: Function) -> None:
    reads = [f.test("eq", "i32", "%kind", str(kind)) for kind in (READ, STRONG_READ)]
    f.line(f"%stores = xor i1 {f.binary('or', 'i1', *reads)}, true")
    f.line("%loads = trunc i32 %kind to i1")
    strong = f.test("ugt", "i32", "%kind", str(COPY))
    f.line(f"%atomic = or i1 {f.test('eq', 'i32', '%kind', str(ATOMIC))}, {strong}")
    f.line(f"%lanes = bitcast i32 %mask to {BOOLS}")


def _shared() -> Function:
    """Shared memory. Two accesses race when one writes, they are of different threads, at the same granule, not both
    atomic, and no barrier of the block (for lanes of one warp: no __syncwarp either) lies between."""
    f = Function(f"void @cudaops_watch_shared({_ARGUMENTS}) noinline")
    _kinds(f)
    base, distance = f.field("shadow", "ptr"), f.field("shadow_distance")
    arrays = [base]
    for _ in range(1, shadow.ARRAYS):
        arrays.append(f.past(arrays[-1], distance))
    warp64 = f.field("warp")
    warp = f.trunc(warp64)
    own = f.load("i32", f.element("i32", f.field("warp_clocks", "ptr"), warp64), 4)
    own, block, born, clock, warps = (
        f.splat("i32", v) for v in (own, *(f.trunc(f.field(n)) for n in ("block_clock", "born", "clock")), warp)
    )
    tid = f.binary("add", V32, f.splat("i32", f.binary("shl", "i32", warp, "5")), LANE_NUMBERS)
    site = f.splat("i32", f.trunc("%site"))
    flag = f.splat("i32", f.emit("zext i1 %atomic to i32"))
    mine = f.binary("or", V32, f.binary("or", V32, f.binary("shl", V32, tid, "splat (i32 1)"), flag), clock)
    copies = f.splat("i1", f.test("eq", "i32", "%kind", str(COPY)))
    mine = f.where(copies, f"splat (i32 {shadow.IN_FLIGHT})", mine)
    index = _steps(f, "%addresses", f.field("shadow_shift"))

    # against the last write
    written = f.gather("i32", arrays[shadow.WRITES], index, "%lanes")
    fresh, writer = last_write(f, written, warps, own, block, V32)
    both = f.test("ne", V32, f.all_of(V32, written, flag), "zeroinitializer")
    other = f.test("ne", V32, writer, tid)
    clash = f.bits(f.all_of(BOOLS, fresh, other, f.invert(BOOLS, both), "%lanes"))
    f.some(clash, "w.look", "w.done")
    f.place("w.look")
    call_notes(f, clash, RACE_SHARED, f.gather("i32", arrays[shadow.WRITE_SITES], index, "%lanes"), others=writer)
    f.jump("w.done")
    f.place("w.done")
    unset = f.all_of(BOOLS, f.test("ult", V32, written, born), f.splat("i1", "%loads"), "%lanes")
    f.some(f.bits(unset), "unset", "set")
    f.place("unset")
    asked = f.all_of(BOOLS, f.test("eq", V32, written, f"splat (i32 {shadow.IN_FLIGHT})"), unset)
    call_notes(f, f.bits(f.all_of(BOOLS, unset, f.invert(BOOLS, asked))), UNINITIALISED)
    by = f.gather("i32", arrays[shadow.WRITE_SITES], index, asked)
    call_notes(f, f.bits(asked), IN_FLIGHT, sites=by)
    f.scatter("i32", arrays[shadow.WRITES], index, born, unset)  # one finding for a granule is enough
    f.jump("set")
    f.place("set")

    # against the last read
    read = f.gather("i32", arrays[shadow.READS], index, "%lanes")
    near, valid, who = last_read(f, read, warps, own, block, V32)
    same = f.test("eq", V32, who, tid)
    f.branch("%stores", "store", "load")

    f.place("store")
    clash = f.bits(f.all_of(BOOLS, valid, f.invert(BOOLS, same), "%lanes"))
    f.some(clash, "r.look", "r.done")
    f.place("r.look")
    call_notes(
        f, clash, RACE_SHARED, f.gather("i32", arrays[shadow.READ_SITES], index, "%lanes"), others=_in_words(f, who)
    )
    f.jump("r.done")
    f.place("r.done")
    f.scatter("i32", arrays[shadow.WRITES], index, mine, "%lanes")
    f.scatter("i32", arrays[shadow.WRITE_SITES], index, site, "%lanes")
    # two lanes of this very instruction
    kept = f.gather("i32", arrays[shadow.WRITES], index, "%lanes")
    twice = f.all_of(BOOLS, f.test("ne", V32, kept, mine), "%lanes", f.splat("i1", f.invert("i1", "%atomic")))
    last = f.binary("and", V32, f.binary("lshr", V32, kept, "splat (i32 1)"), "splat (i32 1023)")
    _noted(f, "twice", f.bits(twice), RACE_SHARED, sites=site, others=last)
    f.jump("step.end")

    f.place("load")
    f.branch("%atomic", "step.end", "plain.load")
    f.place("plain.load")
    now = f.binary("or", V32, next_reader(f, near, valid, same, tid, warps, V32), clock)
    f.scatter("i32", arrays[shadow.READS], index, now, "%lanes")
    f.scatter("i32", arrays[shadow.READ_SITES], index, site, "%lanes")
    kept = f.gather("i32", arrays[shadow.READS], index, "%lanes")
    group = shadow.SEVERAL | shadow.SEVERAL_OF_WARP
    lone = f.test("eq", V32, f.binary("and", V32, kept, f"splat (i32 {group})"), "zeroinitializer")
    lost = f.all_of(BOOLS, f.test("ne", V32, kept, now), lone, "%lanes")
    f.some(f.bits(lost), "shared.by.lanes", "step.end")
    f.place("shared.by.lanes")
    f.scatter("i32", arrays[shadow.READS], index, f.binary("or", V32, several_of_warp(f, warps, V32), clock), lost)
    f.jump("step.end")
    _step_end(f)
    return f


def last_write(f: Function, written: str, warps: str, own: str, block: str, ty: str) -> tuple[str, str]:
    """(no barrier since, by whom) of words of WRITES. `own` and `block`: the clocks of the warp's last barrier, and of
    the block's."""
    near = f.test(
        "eq", ty, f.binary("and", ty, f.binary("lshr", ty, written, "splat (i32 6)"), "splat (i32 31)"), warps
    )
    fresh = f.test("uge", ty, written, f.where(near, own, block, ty))
    return fresh, f.binary("and", ty, f.binary("lshr", ty, written, "splat (i32 1)"), "splat (i32 1023)")


def last_read(f: Function, read: str, warps: str, own: str, block: str, ty: str) -> tuple[str, str, str]:
    """(all readers are of this warp, no barrier since, by whom) of words of READS."""
    # SEVERAL lies above the number of the warp, SEVERAL_OF_WARP is left out of it
    place = f"splat (i32 {31 | shadow.SEVERAL >> 5})"
    near = f.test("eq", ty, f.binary("and", ty, f.binary("lshr", ty, read, "splat (i32 5)"), place), warps)
    valid = f.test("uge", ty, read, f.where(near, own, block, ty))
    return near, valid, f.binary("and", ty, read, f"splat (i32 {shadow.TICK - 1})")


def several_of_warp(f: Function, warps: str, ty: str) -> str:
    up = f.binary("shl", ty, warps, "splat (i32 5)")
    return f.binary("or", ty, up, f"splat (i32 {shadow.SEVERAL_OF_WARP})")


def next_reader(f: Function, near: str, valid: str, same: str, who: str, warps: str, ty: str) -> str:
    """Who has read since the last barrier, now that `who` does."""
    group = f.where(near, several_of_warp(f, warps, ty), f"splat (i32 {shadow.SEVERAL})", ty)
    bools = ty.replace("i32", "i1")
    return f.where(f.all_of(bools, valid, f.invert(bools, same)), group, who, ty)


def _in_words(f: Function, who: str) -> str:
    """A reader as a record has it."""
    warp = f.binary("and", V32, f.binary("lshr", V32, who, "splat (i32 5)"), "splat (i32 31)")
    group = f.binary("sub", V32, "splat (i32 -2)", warp)
    some = f.test("ne", V32, f.binary("and", V32, who, f"splat (i32 {shadow.SEVERAL_OF_WARP})"), "zeroinitializer")
    many = f.test("ne", V32, f.binary("and", V32, who, f"splat (i32 {shadow.SEVERAL})"), "zeroinitializer")
    return f.where(many, f"splat (i32 {SEVERAL})", f.where(some, group, who))


def _buffer() -> Function:
    """Lanes in one buffer: blocks that touch the same granule, and granules that nothing wrote.

    What a block wrote before a fence and an atomic may be read by a block that has done an atomic since.
    """
    f = Function(f"void @cudaops_watch_buffer({_ARGUMENTS}, ptr %writes, i64 %distance) noinline")
    _kinds(f)
    arrays = ["%writes"]
    for _ in range(1, shadow.ARRAYS):
        arrays.append(f.past(arrays[-1], "%distance"))
    launch = f.field("launch", "ptr")
    released = f.at("released", LAUNCH, launch, "ptr")
    me = f.splat("i32", f.trunc(f.binary("add", "i64", f.field("block"), "1")))
    acquired = f.splat("i1", f.test("ne", "i64", f.field("acquired"), "0"))
    site = f.splat("i32", f.trunc("%site"))
    flag = f.splat("i32", f.emit("zext i1 %atomic to i32"))
    mine = f.binary("or", V32, f.binary("shl", V32, me, "splat (i32 1)"), flag)
    index = _steps(f, "%addresses", f.at("granule_shift", LAUNCH, launch))

    written = f.gather("i32", arrays[shadow.WRITES], index, "%lanes")
    read = f.gather("i32", arrays[shadow.READS], index, "%lanes")
    blank = f.test("eq", V32, written, f"splat (i32 {shadow.UNWRITTEN})")
    unset = f.all_of(BOOLS, blank, f.splat("i1", "%loads"), "%lanes")
    f.some(f.bits(unset), "unset", "set")
    f.place("unset")
    call_notes(f, f.bits(unset), UNINITIALISED)
    f.scatter("i32", arrays[shadow.WRITES], index, "zeroinitializer", unset)  # one finding for a granule is enough
    f.jump("set")
    f.place("set")

    writer = f.binary("lshr", V32, written, "splat (i32 1)")
    both = f.test("ne", V32, f.all_of(V32, written, flag), "zeroinitializer")

    def foreign(who: str) -> str:
        return f.all_of(BOOLS, f.test("ne", V32, who, "zeroinitializer"), f.test("ne", V32, who, me), "%lanes")

    clash_w = f.all_of(BOOLS, foreign(writer), f.invert(BOOLS, both))
    clash_r = f.all_of(BOOLS, foreign(read), f.splat("i1", "%stores"))
    f.some(f.bits(f.binary("or", BOOLS, clash_w, clash_r)), "look", "update")
    f.place("look")

    def ordered(who: str) -> str:
        known = f.all_of(BOOLS, f.test("sgt", V32, who, "zeroinitializer"), acquired, "%lanes")
        block = f.emit(f"sext {V32} {f.binary('sub', V32, who, 'splat (i32 1)')} to {V64}")
        return f.test("ne", "<32 x i8>", f.gather("i8", released, block, known), "zeroinitializer")

    bad_w = f.all_of(BOOLS, clash_w, f.invert(BOOLS, ordered(writer)))
    bad_r = f.all_of(BOOLS, clash_r, f.invert(BOOLS, ordered(read)), f.invert(BOOLS, bad_w))
    write_sites = f.gather("i32", arrays[shadow.WRITE_SITES], index, "%lanes")
    _noted(f, "w", f.bits(bad_w), RACE_GLOBAL, sites=write_sites, others=writer)
    read_sites = f.gather("i32", arrays[shadow.READ_SITES], index, "%lanes")
    _noted(f, "r", f.bits(bad_r), RACE_GLOBAL, sites=read_sites, others=read)
    f.jump("update")

    f.place("update")
    f.branch("%stores", "store", "load")
    f.place("store")
    f.scatter("i32", arrays[shadow.WRITES], index, mine, "%lanes")
    f.scatter("i32", arrays[shadow.WRITE_SITES], index, site, "%lanes")
    f.jump("step.end")
    f.place("load")
    f.branch("%atomic", "step.end", "plain.load")
    f.place("plain.load")
    f.scatter("i32", arrays[shadow.READS], index, next_block(f, read, me, V32), "%lanes")
    f.scatter("i32", arrays[shadow.READ_SITES], index, site, "%lanes")
    f.jump("step.end")
    _step_end(f)
    return f


def next_block(f: Function, read: str, me: str, ty: str) -> str:
    """What READS becomes when the block `me` reads."""
    none, again = f.test("eq", ty, read, "zeroinitializer"), f.test("eq", ty, read, me)
    either = f.binary("or", ty.replace("i32", "i1"), none, again)
    return f.where(either, me, f"splat (i32 {shadow.SEVERAL_BLOCKS})", ty)


def _local() -> Function:
    """Local memory, each lane in its own: a read of which no byte was written is a finding.

    Bytes that were not may be among them: a struct's padding, copied along.
    """
    f = Function(f"void @cudaops_watch_local({_ARGUMENTS}) noinline")
    f.line(f"%places = alloca {V64}, align 64")
    f.line("%missing.at = alloca i32, align 4")
    f.line("store i32 %mask, ptr %missing.at, align 4")
    f.line(f"%stores = icmp ne i32 %kind, {READ}")
    size, shift = f.at("local_bytes", LAUNCH, f.field("launch", "ptr")), f.field("local_shift")
    warp = f.field("warp")
    words = f.binary("mul", "i64", warp, f.field("local_words"))
    bits = f.element("i32", f.field("local_shadow", "ptr"), words)
    of_warp = f.binary("mul", "i64", f.binary("shl", "i64", warp, "5"), size)
    start = f.splat("i64", f.binary("add", "i64", f.field("locals"), of_warp))
    wide = f.emit(f"zext {V32} {LANE_NUMBERS} to {V64}")
    start = f.binary("add", V64, start, f.binary("mul", V64, wide, f.splat("i64", size)))
    into = f.binary("sub", V64, "%addresses", start)
    room = f.splat("i64", f.binary("sub", "i64", size, "%bytes"))
    inside = f.test("ule", V64, into, room)
    own = f.all_of(BOOLS, inside, f.lanes("%mask"))
    index = _steps(f, into, shift)
    found = f.gather("i32", bits, index, own)
    bit = f.emit(f"shl {V32} splat (i32 1), {LANE_NUMBERS}")
    set_ = f.bits(f.test("ne", V32, f.binary("and", V32, found, bit), "zeroinitializer"))
    unset = f.binary("and", "i32", f.bits(own), f.binary("xor", "i32", set_, "-1"))
    missing = f.binary("and", "i32", f.load("i32", "%missing.at", 4), unset)
    f.line(f"store i32 {missing}, ptr %missing.at, align 4")
    f.branch("%stores", "mark", "load")
    f.place("load")
    last = f.test("eq", "i32", f.binary("add", "i32", "%w", "1"), "%granules")
    f.branch(f.all_of("i1", last, f.test("ne", "i32", missing, "0")), "note", "step.end")
    f.place("note")
    call_notes(f, missing, UNINITIALISED)
    f.jump("mark")  # one finding is enough
    # Lanes may share a word, so that the first write of a granule goes lane by lane.
    f.place("mark")
    f.line(f"%marked = phi i32 [ {unset}, %step ], [ {missing}, %note ]")
    f.line(f"store {V64} {index}, ptr %places, align 64")
    f.jump("ask")
    f.place("ask")
    f.line("%left = phi i32 [ %marked, %mark ], [ %left.next, %put ]")
    f.branch(f.test("ne", "i32", "%left", "0"), "put", "step.end")
    f.place("put")
    name = f.declare("llvm.cttz.i32", "i32", "i32, i1")
    lane = f.emit(f"call i32 @{name}(i32 %left, i1 true)")
    word = f.element("i32", bits, f.load("i64", f.element("i64", "%places", f.extend(lane)), 8))
    one = f.binary("shl", "i32", "1", lane)
    f.line(f"store i32 {f.binary('or', 'i32', f.load('i32', word, 4), one)}, ptr {word}, align 4")
    f.line(f"%left.next = xor i32 %left, {one}")
    f.jump("ask")
    _step_end(f)
    return f
