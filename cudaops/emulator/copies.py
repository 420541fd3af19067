"""LLVM IR of cp.async: a warp's copies wait in a ring and are made when they are waited for, not when asked for.

So a kernel that does not wait long enough reads what was there before, as it may on a GPU.
"""

from __future__ import annotations

from cudaops.emulator import layout, sanitizer
from cudaops.emulator.layout import COPIES, COPY, SPACES
from cudaops.emulator.text import each_lane, load_field


def ir() -> str:
    return _ask() + _commit() + _wait() + _make()


def _mine(field: str = "copies") -> str:
    """%mine: the ring of the warp that runs."""
    return f"""{load_field(field, "%all", "ptr")}{load_field("warp", "%warp")}
  %mine.offset = mul i64 %warp, {layout.COPIES_BYTES}
  %mine = getelementptr i8, ptr %all, i64 %mine.offset"""


def _at(name: str, base: str, offset: int) -> str:
    return f"\n  {name} = getelementptr i8, ptr {base}, i64 {offset}"


def _splat(name: str, ty: str, value: str) -> str:
    return f"""
  {name}.1 = insertelement <32 x {ty}> poison, {ty} {value}, i32 0
  {name} = shufflevector <32 x {ty}> {name}.1, <32 x {ty}> poison, <32 x i32> zeroinitializer"""


def _ask() -> str:
    """copy(ctx, to, from, bytes, mask, size, site, slot): `size` bytes a lane; those past `bytes` are zeros and are not
    read. Lanes that may not copy are reported and left out."""
    return f"""
define void @cudaops_copy(ptr %ctx, <32 x i64> %to, <32 x i64> %from, <32 x i32> %bytes, i32 %mask, i32 %size,
    i32 %site, i32 %slot) #0 {{
entry:
  %froms = alloca <32 x i64>, align 64
  %reads = alloca <32 x i32>, align 64{load_field("slots", "%slots", "ptr")}
  %slot64 = zext i32 %slot to i64
  %slot.bytes = mul i64 %slot64, {layout.SLOT_BYTES}
  %extent = getelementptr i8, ptr %slots, i64 %slot.bytes
  %low = load i64, ptr %extent, align 8{_at("%length.at", "%extent", 8)}
  %length = load i64, ptr %length.at, align 8{_splat("%lows", "i64", "%low")}{_splat("%lengths", "i64", "%length")}
  %bytes64 = zext <32 x i32> %bytes to <32 x i64>
  %into = sub <32 x i64> %from, %lows
  %room = sub <32 x i64> %lengths, %bytes64
  %under = icmp slt <32 x i64> %into, zeroinitializer
  %over = icmp sgt <32 x i64> %into, %room
  %outside = or <32 x i1> %under, %over
  %reading = icmp ne <32 x i32> %bytes, zeroinitializer
  %odd = and <32 x i1> %outside, %reading
  %odd.bits = bitcast <32 x i1> %odd to i32
  %look = and i32 %odd.bits, %mask
  %clean = icmp eq i32 %look, 0
  br i1 %clean, label %target, label %ask
ask:
  store <32 x i64> %from, ptr %froms, align 64
  store <32 x i32> %bytes, ptr %reads, align 64
  %rest = xor i32 %look, -1
  %fine = and i32 %mask, %rest
  br label %lane.next
lane.next:
  %lane = phi i32 [ 0, %ask ], [ %lane.more, %lane.end ]
  %good = phi i32 [ %fine, %ask ], [ %good.next, %lane.end ]
  %bit = shl i32 1, %lane
  %on = and i32 %look, %bit
  %active = icmp ne i32 %on, 0
  br i1 %active, label %lane.test, label %lane.end
lane.test:
  %read.at = getelementptr i32, ptr %reads, i32 %lane
  %read = load i32, ptr %read.at, align 4
  %read64 = zext i32 %read to i64
  %may = call i32 @cudaops_allowed(ptr %ctx, <32 x i64> %from, i32 %bit, i64 %read64, i32 %site, i32 %slot,
    i32 {SPACES["global"]}, i32 {layout.ERROR_ACCESS})
  %good.may = or i32 %good, %may
  br label %lane.end
lane.end:
  %good.next = phi i32 [ %good, %lane.next ], [ %good.may, %lane.test ]
  %lane.more = add i32 %lane, 1
  %lanes.done = icmp eq i32 %lane.more, 32
  br i1 %lanes.done, label %target, label %lane.next
target:
  %readable = phi i32 [ %mask, %entry ], [ %good.next, %lane.end ]{load_field("shared", "%shared")}
  {load_field("shared_bytes", "%shared.bytes")}
  %size64 = zext i32 %size to i64
  %last = sub i64 %shared.bytes, %size64{_splat("%shareds", "i64", "%shared")}{_splat("%lasts", "i64", "%last")}
  %place = sub <32 x i64> %to, %shareds
  %before = icmp slt <32 x i64> %place, zeroinitializer
  %behind = icmp sgt <32 x i64> %place, %lasts
  %beside = or <32 x i1> %before, %behind
  %beside.bits = bitcast <32 x i1> %beside to i32
  %wrong = and i32 %beside.bits, %readable
  %right = icmp eq i32 %wrong, 0
  br i1 %right, label %put, label %refuse
refuse:
  %writable = call i32 @cudaops_allowed(ptr %ctx, <32 x i64> %to, i32 %readable, i64 %size64, i32 %site,
    i32 {layout.SHARED_SLOT}, i32 {SPACES["shared"]}, i32 {layout.ERROR_STORE})
  br label %put
put:
  %copied = phi i32 [ %readable, %target ], [ %writable, %refuse ]{_mine()}{_at("%count.at", "%mine", COPIES["count"])}
  %count = load i32, ptr %count.at, align 4
  %full = icmp eq i32 %count, {layout.MOST_COPIES}
  br i1 %full, label %make.room, label %append
make.room:
  call void @cudaops_copy_make(ptr %ctx, ptr %mine, i32 0, i32 -1)
  %first.old = load i32, ptr %mine, align 4
  %first.add = add i32 %first.old, 1
  %first.new = and i32 %first.add, {layout.MOST_COPIES - 1}
  store i32 %first.new, ptr %mine, align 4
  br label %append
append:
  %n = phi i32 [ %count, %put ], [ {layout.MOST_COPIES - 1}, %make.room ]
  %first = load i32, ptr %mine, align 4
  %index.all = add i32 %first, %n
  %index = and i32 %index.all, {layout.MOST_COPIES - 1}
  %index64 = zext i32 %index to i64
  %entry.offset = mul i64 %index64, {layout.COPY_BYTES}{_at("%ring", "%mine", COPIES["ring"])}
  %copy = getelementptr i8, ptr %ring, i64 %entry.offset
  store <32 x i64> %to, ptr %copy, align 64{_at("%c.from", "%copy", COPY["from"])}
  store <32 x i64> %from, ptr %c.from, align 64{_at("%c.bytes", "%copy", COPY["bytes"])}
  store <32 x i32> %bytes, ptr %c.bytes, align 64{_at("%g.at", "%mine", COPIES["group"])}
  %group = load <32 x i32>, ptr %g.at, align 64{_at("%c.group", "%copy", COPY["group"])}
  store <32 x i32> %group, ptr %c.group, align 64{_at("%c.mask", "%copy", COPY["mask"])}
  store i32 %copied, ptr %c.mask, align 4{_at("%c.size", "%copy", COPY["size"])}
  store i32 %size, ptr %c.size, align 4{_at("%c.site", "%copy", COPY["site"])}
  store i32 %site, ptr %c.site, align 4
  %n.next = add i32 %n, 1
  store i32 %n.next, ptr %count.at, align 4
  ret void
}}
"""


def _commit() -> str:
    """copy_commit(ctx, mask): what its lanes ask for from now on is another group."""
    return f"""
define void @cudaops_copy_commit(ptr %ctx, i32 %mask) #0 {{
entry:{_mine()}{_at("%g.at", "%mine", COPIES["group"])}
  %lanes = bitcast i32 %mask to <32 x i1>
  %one = zext <32 x i1> %lanes to <32 x i32>
  %old = load <32 x i32>, ptr %g.at, align 64
  %new = add <32 x i32> %old, %one
  store <32 x i32> %new, ptr %g.at, align 64
  ret void
}}
"""


def _wait() -> str:
    """copy_wait(ctx, mask, n): make all copies of its lanes but for those of their n newest groups."""
    return f"""
define void @cudaops_copy_wait(ptr %ctx, i32 %mask, i32 %n) #0 {{
entry:{_mine()}{_at("%g.at", "%mine", COPIES["group"])}{_at("%count.at", "%mine", COPIES["count"])}
  {_at("%ring", "%mine", COPIES["ring"])}
  %open = load <32 x i32>, ptr %g.at, align 64{_splat("%n.32", "i32", "%n")}
  %limit = sub <32 x i32> %open, %n.32
  %count = load i32, ptr %count.at, align 4
  %some = icmp ne i32 %count, 0
  br i1 %some, label %next, label %out
next:
  %i = phi i32 [ 0, %entry ], [ %i.next, %more ]
  %first = load i32, ptr %mine, align 4
  %index.all = add i32 %first, %i
  %index = and i32 %index.all, {layout.MOST_COPIES - 1}
  %index64 = zext i32 %index to i64
  %offset = mul i64 %index64, {layout.COPY_BYTES}
  %copy = getelementptr i8, ptr %ring, i64 %offset{_at("%c.group", "%copy", COPY["group"])}
  %group = load <32 x i32>, ptr %c.group, align 64
  %due = icmp slt <32 x i32> %group, %limit
  %due.bits = bitcast <32 x i1> %due to i32
  %ready = and i32 %due.bits, %mask
  %none = icmp eq i32 %ready, 0
  br i1 %none, label %more, label %make
make:
  call void @cudaops_copy_make(ptr %ctx, ptr %mine, i32 %i, i32 %ready)
  br label %more
more:
  %i.next = add i32 %i, 1
  %again = icmp ult i32 %i.next, %count
  br i1 %again, label %next, label %shrink
shrink:  ; forget those at the front of which nothing is left
  %left = load i32, ptr %count.at, align 4
  %any = icmp ne i32 %left, 0
  br i1 %any, label %look, label %out
look:
  %at = load i32, ptr %mine, align 4
  %at64 = zext i32 %at to i64
  %at.offset = mul i64 %at64, {layout.COPY_BYTES}
  %front = getelementptr i8, ptr %ring, i64 %at.offset{_at("%f.mask", "%front", COPY["mask"])}
  %lanes.left = load i32, ptr %f.mask, align 4
  %done = icmp eq i32 %lanes.left, 0
  br i1 %done, label %forget, label %out
forget:
  %at.add = add i32 %at, 1
  %at.next = and i32 %at.add, {layout.MOST_COPIES - 1}
  store i32 %at.next, ptr %mine, align 4
  %left.next = sub i32 %left, 1
  store i32 %left.next, ptr %count.at, align 4
  br label %shrink
out:
  ret void
}}
"""


def _make() -> str:
    """copy_make(ctx, ring, number, lanes): make a copy for some of its lanes, which then no longer ask for it."""
    cases = "".join(f"i32 {size}, label %all{size}.test " for size in (4, 8, 16))
    whole = ""
    for size in (4, 8, 16):
        ty = f"<{size // 4} x i32>"
        moves = "".join(
            f"""
  %t{size}.{lane}.at = getelementptr i64, ptr %copy, i64 {lane}
  %t{size}.{lane} = load ptr, ptr %t{size}.{lane}.at, align 8
  %f{size}.{lane}.at = getelementptr i64, ptr %c.from, i64 {lane}
  %f{size}.{lane} = load ptr, ptr %f{size}.{lane}.at, align 8
  %v{size}.{lane} = load {ty}, ptr %f{size}.{lane}, align 1
  store {ty} %v{size}.{lane}, ptr %t{size}.{lane}, align 1"""
            for lane in range(32)
        )
        whole += f"""
all{size}.test:
  br i1 %whole, label %all{size}, label %some
all{size}:{moves}
  br label %out"""
    body = """
  %t.at = getelementptr i64, ptr %copy, i32 %lane
  %t = load ptr, ptr %t.at, align 8
  %f.at = getelementptr i64, ptr %c.from, i32 %lane
  %f = load ptr, ptr %f.at, align 8
  %b.at = getelementptr i32, ptr %c.bytes, i32 %lane
  %b = load i32, ptr %b.at, align 4
  %b64 = zext i32 %b to i64
  call void @llvm.memset.p0.i64(ptr %t, i8 0, i64 %size64, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr %t, ptr %f, i64 %b64, i1 false)
  br label %more"""
    return f"""
define void @cudaops_copy_make(ptr %ctx, ptr %mine, i32 %number, i32 %lanes) noinline #0 {{
entry:
  %first = load i32, ptr %mine, align 4
  %index.all = add i32 %first, %number
  %index = and i32 %index.all, {layout.MOST_COPIES - 1}
  %index64 = zext i32 %index to i64
  %offset = mul i64 %index64, {layout.COPY_BYTES}{_at("%ring", "%mine", COPIES["ring"])}
  %copy = getelementptr i8, ptr %ring, i64 %offset{_at("%c.from", "%copy", COPY["from"])}
  {_at("%c.bytes", "%copy", COPY["bytes"])}{_at("%c.mask", "%copy", COPY["mask"])}
  {_at("%c.size", "%copy", COPY["size"])}{_at("%c.site", "%copy", COPY["site"])}
  %asked = load i32, ptr %c.mask, align 4
  %ready = and i32 %asked, %lanes
  %rest.not = xor i32 %lanes, -1
  %rest = and i32 %asked, %rest.not
  store i32 %rest, ptr %c.mask, align 4
  %size = load i32, ptr %c.size, align 4
  %bytes = load <32 x i32>, ptr %c.bytes, align 64{_splat("%sizes", "i32", "%size")}
  %short = icmp ne <32 x i32> %bytes, %sizes
  %short.bits = bitcast <32 x i1> %short to i32
  %no.short = icmp eq i32 %short.bits, 0{load_field("shadow", "%shadow", "ptr")}
  %unwatched = icmp eq ptr %shadow, null
  br i1 %unwatched, label %go, label %watch
watch:
  %w.to = load <32 x i64>, ptr %copy, align 64
  %w.size = zext i32 %size to i64
  %w.site = load i32, ptr %c.site, align 4
  %w.site64 = zext i32 %w.site to i64
  call void @cudaops_watch_shared(ptr %ctx, <32 x i64> %w.to, i32 %ready, i64 %w.size, i32 {sanitizer.WRITE},
    i64 %w.site64)
  br label %go
go:
  %everyone = icmp eq i32 %ready, -1
  %whole = and i1 %no.short, %everyone
  switch i32 %size, label %some [ {cases}]{whole}
some:
  %size64 = zext i32 %size to i64
  br label %next{each_lane("%ready", "some", body)}
  ret void
}}
"""
