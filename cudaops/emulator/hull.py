"""The sanitizer's quick look at an access whose lanes are constants apart.

Which granules it touches, counted from the lowest one, is known to the code generator: a table has for each of them
the mask of its lanes (0: a hole). So shadow memory is walked through 16 granules at a time with plain loads and stores.
Whatever may be a finding is left to watch.py, as is an access that is not inside one extent or not aligned: what has
been updated until then says the same when it is done again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cudaops.emulator import layout, shadow
from cudaops.emulator.function import V64, Function
from cudaops.emulator.layout import LAUNCH, SPACES
from cudaops.emulator.sanitizer import READ, WRITE
from cudaops.emulator.watch import last_read, last_write, next_block, next_reader, several_of_warp

# An access, as the code generator describes it: these words, the lanes' offsets from the start, the table of masks.
FIELDS = {name: 8 * n for n, name in enumerate(["hull_bytes", "bytes", "granules", "site", "slot", "spaces"])}
OFFSETS = 64
TABLE = OFFSETS + 32 * 8
WIDEST = 1024  # bytes: what 32 lanes of 16 span twice over; a wider hull is mostly holes

WHOLE = -1  # what the functions return if the whole hull may be touched; else the lanes that may
ALONG = shadow.ALONG
V, B = f"<{ALONG} x i32>", f"<{ALONG} x i1>"


@dataclass(frozen=True)
class Hull:
    """A site's access, its lanes at `offsets` from the start of what all of them span."""

    offsets: tuple[int, ...]
    nbytes: int  # of each lane, a power of two; offsets are multiples of it
    site: int
    slot: int
    spaces: int

    def text(self, name: str, granule: int) -> str:
        """The constant that describes it."""
        size = max(self.offsets) + self.nbytes
        masks = [0] * (0 if self.spaces == SPACES["local"] else -(-size // granule))  # _local needs none
        for lane, offset in enumerate(self.offsets if masks else ()):
            for n in range(offset // granule, -(-(offset + self.nbytes) // granule)):
                masks[n] |= 1 << lane
        masks += [0] * (-len(masks) % ALONG)
        words = [size, self.nbytes, len(masks), self.site, self.slot, self.spaces]
        words += [0] * (OFFSETS // 8 - len(words)) + list(self.offsets)
        bits = ", ".join(f"i32 {m - (1 << 32) if m >> 31 else m}" for m in masks)
        return (
            f"@{name} = private constant {{ [{len(words)} x i64], [{len(masks)} x i32] }} "
            f"{{ [{len(words)} x i64] [{', '.join(f'i64 {w}' for w in words)}], [{len(masks)} x i32] [{bits}] }}, "
            "align 64"
        )


def functions() -> list[Function]:
    return [
        _watch("shared_load", READ, _shared_load), _watch("shared_store", WRITE, _shared_store),
        _watch("global_load", READ, _global_load), _watch("global_store", WRITE, _global_store),
        _watch("local_load", READ, _local), _watch("local_store", WRITE, _local),
    ]  # fmt: skip


def _watch(name: str, kind: int, body: Callable[[Function, int], None]) -> Function:
    """watch_*(ctx, start, mask, access): check an access of the hull at `start` before it is made."""
    f = Function(f"i64 @cudaops_watch_{name}(ptr %ctx, i64 %start, i32 %mask, ptr %access)")
    size, nbytes, slot = (f.at(field, FIELDS, "%access") for field in ("hull_bytes", "bytes", "slot"))
    spaces = f.trunc(f.at("spaces", FIELDS, "%access"))
    slots, mine = f.field("slots", "ptr"), f.binary("mul", "i64", slot, str(layout.SLOT_BYTES))
    f.line(f"%mine = getelementptr i8, ptr {slots}, i64 {mine}")
    into = f.binary("sub", "i64", "%start", f.load("i64", "%mine", 8))
    room = f.binary("sub", "i64", f.load("i64", f.past("%mine", layout.SLOT_SIZE), 8), size)
    odd = f.binary("and", "i64", "%start", f.binary("sub", "i64", nbytes, "1"))
    straight = f.test("eq", "i64", odd, "0")
    inside = f.all_of("i1", f.test("sge", "i64", into, "0"), f.test("sle", "i64", into, room), straight)
    f.line(f"br i1 {inside}, label %go, label %ask, !prof !0")

    f.place("ask")
    found = f.emit(
        f"call preserve_allcc i1 @cudaops_hull(ptr %ctx, i64 %start, i64 {size}, i32 {f.trunc(slot)}, i32 {spaces})"
    )
    f.branch(f.all_of("i1", found, straight), "go", "odd")
    f.place("odd")
    offsets = f.load(V64, f.past("%access", OFFSETS), 64)
    addresses = f.binary("add", V64, offsets, f.splat("i64", "%start"))
    site = f.trunc(f.at("site", FIELDS, "%access"))
    lanes = f.emit(
        f"call i32 @cudaops_watch(ptr %ctx, {V64} {addresses}, i32 %mask, i32 {f.trunc(nbytes)}, i32 {kind}, "
        f"i32 {site}, i32 {f.trunc(slot)}, i32 {spaces})"
    )
    f.line(f"ret i64 {f.extend(lanes)}")

    f.place("go")
    body(f, kind)
    f.place("done")
    f.line(f"ret i64 {WHOLE}")
    return f


# -- the walk ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Walk:
    """16 granules on the way: who touches them, and what their shadow says."""

    lanes: str
    touched: str
    written: str
    read: str


def _walk(f: Function, base: str, distance: str, shift: str, kind: int, step: Callable[[_Walk], str]) -> None:
    """Go through the granules. `step` says what becomes of WRITES (of READS, if `kind` is READ) once it is sure that
    nothing is odd; else it goes to %odd, or to %next where they stay as they are."""
    first = f.binary("lshr", "i64", "%start", shift)
    writes = f.element("i32", base, first)
    reads = f.past(writes, distance)
    double = f.binary("shl", "i64", distance, "1")
    changed, sites = (reads, f.past(reads, double)) if kind == READ else (writes, f.past(writes, double))
    table = f.past("%access", TABLE)
    mask = f.splat("i32", "%mask", ALONG)
    site = f.splat("i32", f.trunc(f.at("site", FIELDS, "%access")), ALONG)
    end = f.at("granules", FIELDS, "%access")
    begin = f.label("walk")
    f.jump(begin)
    f.place(begin)
    f.jump("step")
    f.place("step")
    f.line(f"%n = phi i64 [ 0, %{begin} ], [ %n.next, %next ]")
    lanes = f.binary("and", V, f.load(V, f.element("i32", table, "%n"), 64), mask)
    touched = f.test("ne", V, lanes, "zeroinitializer")
    written = f.load(V, f.element("i32", writes, "%n"), 4)
    read = f.load(V, f.element("i32", reads, "%n"), 4)
    value = step(_Walk(lanes, touched, written, read))
    name = f.declare(f"llvm.masked.store.v{ALONG}i32.p0", "void", f"{V}, ptr, i32, {B}")
    for array, what in ((changed, value), (sites, site)):
        f.line(f"call void @{name}({V} {what}, ptr {f.element('i32', array, '%n')}, i32 4, {B} {touched})")
    f.jump("next")
    f.place("next")
    f.line(f"%n.next = add i64 %n, {ALONG}")
    f.branch(f.test("ult", "i64", "%n.next", end), "step", "done")


def _any(f: Function, mask: str) -> str:
    return f.test("ne", f"i{ALONG}", f.emit(f"bitcast {B} {mask} to i{ALONG}"), "0")


def _leave_if(f: Function, odd: str) -> None:
    go_on = f.label("on")
    f.line(f"br i1 {_any(f, odd)}, label %odd, label %{go_on}, !prof !1")
    f.place(go_on)


@dataclass(frozen=True)
class _Now:
    """The clocks and the warp, each 16 times."""

    clock: str
    block: str
    own: str
    born: str
    warp: str


def _now(f: Function) -> _Now:
    warp = f.field("warp")
    own = f.load("i32", f.element("i32", f.field("warp_clocks", "ptr"), warp), 4)
    clock, block, born = (f.trunc(f.field(name)) for name in ("clock", "block_clock", "born"))
    return _Now(*(f.splat("i32", v, ALONG) for v in (clock, block, own, born, f.trunc(warp))))


def _who(f: Function, walk: _Walk, warp: str) -> tuple[str, str]:
    """(the granule's highest thread, whether there are several of them)"""
    name = f.declare(f"llvm.ctlz.v{ALONG}i32", V, f"{V}, i1")
    zeros = f.emit(f"call {V} @{name}({V} {walk.lanes}, i1 false)")
    lane = f.binary("sub", V, "splat (i32 31)", zeros)
    thread = f.binary("or", V, f.binary("shl", V, warp, "splat (i32 5)"), lane)
    less = f.binary("and", V, walk.lanes, f.binary("add", V, walk.lanes, "splat (i32 -1)"))
    return thread, f.test("ne", V, less, "zeroinitializer")


def _shared(f: Function, kind: int, step: Callable[[_Now, _Walk], str]) -> None:
    now = _now(f)
    base, distance, shift = f.field("shadow", "ptr"), f.field("shadow_distance"), f.field("shadow_shift")
    _walk(f, base, distance, shift, kind, lambda walk: step(now, walk))


def _shared_load(f: Function, kind: int) -> None:
    def step(now: _Now, walk: _Walk) -> str:
        # Mostly everything was written before the last barrier, and after the block began; often several warps have
        # read it since.
        age, known = f.binary("sub", V, walk.written, now.born), f.binary("sub", V, now.block, now.born)
        recent = f.test("uge", V, age, known)
        all_read = f.binary("or", V, now.clock, f"splat (i32 {shadow.SEVERAL})")
        news = f.binary("or", B, recent, f.test("ne", V, walk.read, all_read))
        go_on = f.label("on")
        f.branch(_any(f, f.all_of(B, news, walk.touched)), go_on, "next")
        f.place(go_on)
        thread, several = _who(f, walk, now.warp)
        _look_closer(f, f.all_of(B, recent, walk.touched), lambda: _bad_read(f, now, walk, thread, several))
        who = f.where(several, several_of_warp(f, now.warp, V), thread, V)
        near, valid, before = last_read(f, walk.read, now.warp, now.own, now.block, V)
        same = f.test("eq", V, before, who)
        return f.binary("or", V, next_reader(f, near, valid, same, who, now.warp, V), now.clock)

    _shared(f, kind, step)


def _bad_read(f: Function, now: _Now, walk: _Walk, thread: str, several: str) -> str:
    fresh, writer = last_write(f, walk.written, now.warp, now.own, now.block, V)
    other = f.binary("or", B, several, f.test("ne", V, writer, thread))
    unset = f.test("ult", V, walk.written, now.born)
    return f.all_of(B, f.binary("or", B, f.all_of(B, fresh, other), unset), walk.touched)


def _shared_store(f: Function, kind: int) -> None:
    def step(now: _Now, walk: _Walk) -> str:
        thread, several = _who(f, walk, now.warp)
        _leave_if(f, f.all_of(B, several, walk.touched))
        written, read = (f.test("uge", V, word, now.block) for word in (walk.written, walk.read))
        recent = f.binary("or", B, written, read)
        _look_closer(f, f.all_of(B, recent, walk.touched), lambda: _bad_write(f, now, walk, thread))
        return f.binary("or", V, f.binary("shl", V, thread, "splat (i32 1)"), now.clock)

    _shared(f, kind, step)


def _bad_write(f: Function, now: _Now, walk: _Walk, thread: str) -> str:
    fresh, writer = last_write(f, walk.written, now.warp, now.own, now.block, V)
    _, valid, reader = last_read(f, walk.read, now.warp, now.own, now.block, V)
    by_write = f.all_of(B, fresh, f.test("ne", V, writer, thread))
    by_read = f.all_of(B, valid, f.test("ne", V, reader, thread))
    return f.all_of(B, f.binary("or", B, by_write, by_read), walk.touched)


def _look_closer(f: Function, if_any: str, bad: Callable[[], str]) -> None:
    """To %odd if `bad`, which takes longer to find out, has a granule; it has none where `if_any` has none."""
    closer, go_on = f.label("closer"), f.label("on")
    f.branch(_any(f, if_any), closer, go_on)
    f.place(closer)
    f.line(f"br i1 {_any(f, bad())}, label %odd, label %{go_on}, !prof !1")
    f.place(go_on)


def _buffer(f: Function, kind: int, step: Callable[[str, _Walk], str]) -> None:
    me = f.splat("i32", f.trunc(f.binary("add", "i64", f.field("block"), "1")), ALONG)
    base = f.load("ptr", f.past("%mine", layout.SLOT_SHADOW), 8)
    distance = f.load("i64", f.past("%mine", layout.SLOT_DISTANCE), 8)
    shift = f.at("granule_shift", LAUNCH, f.field("launch", "ptr"))
    _walk(f, base, distance, shift, kind, lambda walk: step(me, walk))


def _global_load(f: Function, kind: int) -> None:
    def step(me: str, walk: _Walk) -> str:
        nobody = f.test("eq", V, walk.written, "zeroinitializer")
        fine = f.binary("or", B, nobody, _mine(f, walk.written, me))
        _leave_if(f, f.all_of(B, f.invert(B, fine), walk.touched))
        return next_block(f, walk.read, me, V)

    _buffer(f, kind, step)


def _global_store(f: Function, kind: int) -> None:
    def step(me: str, walk: _Walk) -> str:
        nobody = f.test("ule", V, walk.written, f"splat (i32 {shadow.UNWRITTEN})")
        unread = f.test("eq", V, walk.read, "zeroinitializer")
        by_me = f.test("eq", V, walk.read, me)
        fine = f.all_of(
            B, f.binary("or", B, nobody, _mine(f, walk.written, me)), f.binary("or", B, unread, by_me)
        )  # fmt: skip
        _leave_if(f, f.all_of(B, f.invert(B, fine), walk.touched))
        return f.binary("shl", V, me, "splat (i32 1)")

    _buffer(f, kind, step)


def _mine(f: Function, written: str, me: str) -> str:
    return f.test("eq", V, f.binary("lshr", V, written, "splat (i32 1)"), me)


# -- local memory -----------------------------------------------------------------------------------------------------
def _local(f: Function, kind: int) -> None:
    """Each lane at the same place of its own memory: one word a granule, a bit a lane."""
    warp, size = f.field("warp"), f.at("local_bytes", LAUNCH, f.field("launch", "ptr"))
    of_warp = f.binary("mul", "i64", f.binary("shl", "i64", warp, "5"), size)
    into = f.binary("sub", "i64", f.binary("sub", "i64", "%start", f.field("locals")), of_warp)
    nbytes = f.at("bytes", FIELDS, "%access")
    own = f.test("ule", "i64", into, f.binary("sub", "i64", size, nbytes))
    f.line(f"br i1 {own}, label %own, label %odd, !prof !0")
    f.place("own")
    shift = f.field("local_shift")
    first = f.binary(
        "add", "i64", f.binary("mul", "i64", warp, f.field("local_words")), f.binary("lshr", "i64", into, shift)
    )
    words = f.element("i32", f.field("local_shadow", "ptr"), first)
    count = f.binary("lshr", "i64", nbytes, shift)
    f.jump("step")
    f.place("step")
    f.line("%n = phi i64 [ 0, %own ], [ %n.next, %step ]")
    f.line("%some = phi i32 [ 0, %own ], [ %some.next, %step ]")
    at = f.element("i32", words, "%n")
    word = f.load("i32", at, 4)
    f.line(f"%some.next = or i32 %some, {word}")
    if kind == WRITE:
        f.line(f"store i32 {f.binary('or', 'i32', word, '%mask')}, ptr {at}, align 4")
    f.line("%n.next = add i64 %n, 1")
    f.branch(f.test("ult", "i64", "%n.next", count), "step", "end")
    f.place("end")
    if kind == WRITE:
        f.jump("done")
        return
    missing = f.binary("and", "i32", "%mask", f.binary("xor", "i32", "%some.next", "-1"))
    f.some(missing, "odd", "done")
