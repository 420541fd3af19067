"""LLVM IR of what every kernel shares: checked loads and stores out of line, extent look-up, the block scheduler's.

Compiled once for a machine and reached through function pointers in the worker structure (layout.WORKER).
"""

from __future__ import annotations

from cudaops.emulator import copies, hull, layout, mbarriers, natural, sanitizer, shadow, turns, watch
from cudaops.emulator.function import assembled
from cudaops.emulator.layout import LAUNCH, SPACES, WORKER
from cudaops.emulator.text import each_lane
from cudaops.emulator.text import load_field as _field

ATTRIBUTES = (
    'attributes #0 = { nounwind alignstack=64 "frame-pointer"="none" "prefer-vector-width"="512" '
    '"min-legal-vector-width"="512" }\n'
    '!0 = !{!"branch_weights", i32 2000, i32 1}\n'
    '!1 = !{!"branch_weights", i32 1, i32 2000}\n'
)


def ir() -> str:
    parts = [_DECLARATIONS, _fault(), _hull(), _allowed()]
    for bits in (8, 16, 32, 64):
        parts.append(_load(bits))
        parts.append(_store(bits))
        parts.append(_cold(bits))
    parts += [_wide(size, store=store) for size in (8, 16) for store in (False, True)]
    parts.append(_cold_wide())
    parts.append(_printf())
    parts.append(_poll())
    parts.append(natural.ir())
    parts.append(assembled([*sanitizer.functions(), *shadow.functions(), *watch.functions(), *hull.functions()]))
    parts.append(copies.ir())
    parts.append(mbarriers.ir())
    parts.append(turns.ir())
    parts.append(ATTRIBUTES)
    return "\n".join(parts)


_WHERE = "i32 %site, i32 %slot, i32 %spaces"

_DECLARATIONS = """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.avx.vzeroupper()
"""


def _fault() -> str:
    """fault(ctx, kind, site, lane, address): note what the warp that runs does wrong, if it is the worker's first."""
    notes = "".join(
        f"""
  %note.{field} = getelementptr i8, ptr %ctx, i64 {WORKER[f"error_{field}"]}
  store i64 %{field}, ptr %note.{field}, align 8"""
        for field in ("kind", "address", "site", "lane", "warp", "block")
    )
    return f"""
define preserve_allcc void @cudaops_fault(ptr %ctx, i64 %kind, i64 %site, i64 %lane, i64 %address) noinline #0 {{
entry:{_field("error_kind", "%old")}
  %first = icmp eq i64 %old, 0
  br i1 %first, label %note, label %out
note:{_field("warp", "%warp")}{_field("block", "%block")}{notes}
  br label %out
out:
  ret void
}}
"""


def _hull() -> str:
    """hull(ctx, start, bytes, slot, spaces): is [start, start + bytes) in one extent? Then the slot remembers it."""
    return f"""
define preserve_allcc i1 @cudaops_hull(ptr %ctx, i64 %start, i64 %bytes, i32 %slot, i32 %spaces) #0 {{
entry:{_field("slots", "%slots", "ptr")}{_field("launch", "%launch", "ptr")}
  %slot64 = zext i32 %slot to i64
  %slot.bytes = mul i64 %slot64, {layout.SLOT_BYTES}
  %mine = getelementptr i8, ptr %slots, i64 %slot.bytes
  %end = add i64 %start, %bytes
  %wraps = icmp ult i64 %end, %start
  br i1 %wraps, label %no, label %begin
begin:
  %want.shared = and i32 %spaces, {SPACES["shared"]}
  %try.shared = icmp ne i32 %want.shared, 0
  br i1 %try.shared, label %shared, label %not.shared
shared:{_field("shared", "%s.low")}{_field("shared_bytes", "%s.size")}
  %s.end = add i64 %s.low, %s.size
  %s.a = icmp uge i64 %start, %s.low
  %s.b = icmp ule i64 %end, %s.end
  %s.in = and i1 %s.a, %s.b
  br i1 %s.in, label %yes, label %not.shared
not.shared:
  %want.local = and i32 %spaces, {SPACES["local"]}
  %try.local = icmp ne i32 %want.local, 0
  br i1 %try.local, label %local, label %not.local
local:{_field("locals", "%l.low")}{_field("locals_bytes", "%l.size")}
  %l.end = add i64 %l.low, %l.size
  %l.a = icmp uge i64 %start, %l.low
  %l.b = icmp ule i64 %end, %l.end
  %l.in = and i1 %l.a, %l.b
  br i1 %l.in, label %yes, label %not.local
not.local:
  %want.global = and i32 %spaces, {SPACES["global"]}
  %try.global = icmp ne i32 %want.global, 0
  br i1 %try.global, label %global, label %no
global:{_field("buffer_count", "%count", "i64", LAUNCH, "%launch")}
  {_field("buffers", "%buffers", "ptr", LAUNCH, "%launch")}
  br label %loop
loop:
  %n = phi i64 [ 0, %global ], [ %n.next, %next ]
  %more = icmp ult i64 %n, %count
  br i1 %more, label %try, label %no
try:
  %at = getelementptr [2 x i64], ptr %buffers, i64 %n
  %g.low = load i64, ptr %at, align 8
  %size.at = getelementptr i8, ptr %at, i64 8
  %g.size = load i64, ptr %size.at, align 8
  %g.end = add i64 %g.low, %g.size
  %g.a = icmp uge i64 %start, %g.low
  %g.b = icmp ule i64 %end, %g.end
  %g.c = icmp uge i64 %end, %start
  %g.ab = and i1 %g.a, %g.b
  %g.in = and i1 %g.ab, %g.c
  br i1 %g.in, label %found, label %next
next:
  %n.next = add i64 %n, 1
  br label %loop
found:{_field("shadows", "%shadows", "ptr", LAUNCH, "%launch")}
  %watched = icmp ne ptr %shadows, null
  br i1 %watched, label %remember, label %yes
remember:
  %shadow = getelementptr [2 x i64], ptr %shadows, i64 %n
  %place = load [2 x i64], ptr %shadow, align 8
  %mine.shadow = getelementptr i8, ptr %mine, i64 {layout.SLOT_SHADOW}
  store [2 x i64] %place, ptr %mine.shadow, align 8
  br label %yes
yes:
  %low = phi i64 [ %s.low, %shared ], [ %l.low, %local ], [ %g.low, %found ], [ %g.low, %remember ]
  %size = phi i64 [ %s.size, %shared ], [ %l.size, %local ], [ %g.size, %found ], [ %g.size, %remember ]
  store i64 %low, ptr %mine, align 8
  %mine.size = getelementptr i8, ptr %mine, i64 {layout.SLOT_SIZE}
  store i64 %size, ptr %mine.size, align 8
  ret i1 true
no:
  ret i1 false
}}
"""


def _allowed() -> str:
    """allowed(ctx, addresses, mask, bytes, site, slot, spaces, kind): the mask without lanes that would fault.

    The first fault of the worker is recorded.
    """
    return f"""
define i32 @cudaops_allowed(ptr %ctx, <32 x i64> %addresses, i32 %mask, i64 %bytes, {_WHERE}, i32 %kind) #0 {{
entry:
  %places = alloca <32 x i64>, align 64
  store <32 x i64> %addresses, ptr %places, align 64
  br label %loop
loop:
  %lane = phi i32 [ 0, %entry ], [ %lane.next, %next ]
  %good = phi i32 [ %mask, %entry ], [ %good.next, %next ]
  %bit = shl i32 1, %lane
  %on = and i32 %mask, %bit
  %active = icmp ne i32 %on, 0
  br i1 %active, label %test, label %next
test:
  %lane64 = zext i32 %lane to i64
  %at = getelementptr i64, ptr %places, i64 %lane64
  %address = load i64, ptr %at, align 8
  %fine = call preserve_allcc i1 @cudaops_hull(ptr %ctx, i64 %address, i64 %bytes, i32 %slot, i32 %spaces)
  br i1 %fine, label %next, label %fault
fault:
  %off = xor i32 %bit, -1
  %less = and i32 %good, %off{_field("launch", "%launch", "ptr")}
  {_field("findings", "%findings", "ptr", LAUNCH, "%launch")}
  %watched = icmp ne ptr %findings, null
  br i1 %watched, label %finding, label %plain
finding:
  %f.kind = zext i32 %kind to i64
  %f.site = zext i32 %site to i64
  call void @cudaops_note(ptr %ctx, i64 %f.kind, i64 %f.site, i64 -1, i64 %lane64, i64 %address, i64 0)
  br label %next
plain:
  %kind64 = zext i32 %kind to i64
  %site64 = zext i32 %site to i64
  call preserve_allcc void @cudaops_fault(ptr %ctx, i64 %kind64, i64 %site64, i64 %lane64, i64 %address)
  br label %next
next:
  %good.next = phi i32 [ %good, %loop ], [ %good, %test ], [ %less, %finding ], [ %less, %plain ]
  %lane.next = add i32 %lane, 1
  %end = icmp eq i32 %lane.next, 32
  br i1 %end, label %out, label %loop
out:
  ret i32 %good.next
}}
"""


def _check(bits: int, kind: int) -> str:
    """Lanes outside the slot's extent go through `allowed`; %good is what may be touched."""
    size = bits // 8
    return f"""
entry:{_field("slots", "%slots", "ptr")}
  %slot64 = zext i32 %slot to i64
  %slot.bytes = mul i64 %slot64, {layout.SLOT_BYTES}
  %mine = getelementptr i8, ptr %slots, i64 %slot.bytes
  %low = load i64, ptr %mine, align 8
  %size.at = getelementptr i8, ptr %mine, i64 8
  %size = load i64, ptr %size.at, align 8
  %room = sub i64 %size, {size}
  %low.1 = insertelement <32 x i64> poison, i64 %low, i32 0
  %low.32 = shufflevector <32 x i64> %low.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %room.1 = insertelement <32 x i64> poison, i64 %room, i32 0
  %room.32 = shufflevector <32 x i64> %room.1, <32 x i64> poison, <32 x i32> zeroinitializer
  %into = sub <32 x i64> %addresses, %low.32
  %under = icmp sgt <32 x i64> zeroinitializer, %into
  %over = icmp sgt <32 x i64> %into, %room.32
  %out = or <32 x i1> %under, %over
  %out.bits = bitcast <32 x i1> %out to i32
  %odd = and i32 %out.bits, %mask
  %clean = icmp eq i32 %odd, 0
  br i1 %clean, label %go, label %ask, !prof !0
ask:
  %asked = call i32 @cudaops_allowed(ptr %ctx, <32 x i64> %addresses, i32 %mask, i64 {size}, {_WHERE}, i32 {kind})
  br label %go
go:
  %good = phi i32 [ %mask, %entry ], [ %asked, %ask ]
  %lanes = bitcast i32 %good to <32 x i1>"""


def _group(g: int, bits: int) -> str:
    """Eight lanes of the addresses and mask, and whether they lie one behind the other."""
    picks = ", ".join(f"i32 {8 * g + n}" for n in range(8))
    steps = ", ".join(f"i64 {n * bits // 8}" for n in range(8))
    return f"""
g{g}:
  %a{g} = shufflevector <32 x i64> %addresses, <32 x i64> poison, <8 x i32> <{picks}>
  %m{g} = shufflevector <32 x i1> %lanes, <32 x i1> poison, <8 x i32> <{picks}>
  %first{g} = extractelement <8 x i64> %a{g}, i32 0
  %f{g} = insertelement <8 x i64> poison, i64 %first{g}, i32 0
  %s{g} = shufflevector <8 x i64> %f{g}, <8 x i64> poison, <8 x i32> zeroinitializer
  %w{g} = add <8 x i64> %s{g}, <{steps}>
  %same{g} = icmp eq <8 x i64> %a{g}, %w{g}
  %idle{g} = xor <8 x i1> %m{g}, splat (i1 true)
  %ok{g} = or <8 x i1> %same{g}, %idle{g}
  %bits{g} = bitcast <8 x i1> %ok{g} to i8
  %run{g} = icmp eq i8 %bits{g}, -1"""


def _load(bits: int) -> str:
    v8, v32 = f"<8 x i{bits}>", f"<32 x i{bits}>"
    text = f"""
declare {v8} @llvm.masked.load.v8i{bits}.p0(ptr, i32, <8 x i1>, {v8})
declare {v8} @llvm.masked.gather.v8i{bits}.v8p0(<8 x ptr>, i32, <8 x i1>, {v8})
define {v32} @cudaops_load{bits}(ptr %ctx, <32 x i64> %addresses, i32 %mask, {_WHERE}) #0 {{
{_check(bits, layout.ERROR_ACCESS)}
  br label %g0"""
    for g in range(4):
        text += (
            _group(g, bits)
            + f"""
  br i1 %run{g}, label %line{g}, label %spread{g}
line{g}:
  %p{g} = inttoptr i64 %first{g} to ptr
  %l{g} = call {v8} @llvm.masked.load.v8i{bits}.p0(ptr %p{g}, i32 1, <8 x i1> %m{g}, {v8} zeroinitializer)
  br label %have{g}
spread{g}:
  %q{g} = inttoptr <8 x i64> %a{g} to <8 x ptr>
  %t{g} = call {v8} @llvm.masked.gather.v8i{bits}.v8p0(<8 x ptr> %q{g}, i32 1, <8 x i1> %m{g}, {v8} zeroinitializer)
  br label %have{g}
have{g}:
  %r{g} = phi {v8} [ %l{g}, %line{g} ], [ %t{g}, %spread{g} ]
  br label %g{g + 1}"""
        )
    order16 = ", ".join(f"i32 {n}" for n in range(16))
    order32 = ", ".join(f"i32 {n}" for n in range(32))
    return (
        text
        + f"""
g4:
  %x = shufflevector {v8} %r0, {v8} %r1, <16 x i32> <{order16}>
  %y = shufflevector {v8} %r2, {v8} %r3, <16 x i32> <{order16}>
  %z = shufflevector <16 x i{bits}> %x, <16 x i{bits}> %y, <32 x i32> <{order32}>
  ret {v32} %z
}}
"""
    )


def _store(bits: int) -> str:
    v8, v32 = f"<8 x i{bits}>", f"<32 x i{bits}>"
    text = f"""
declare void @llvm.masked.store.v8i{bits}.p0({v8}, ptr, i32, <8 x i1>)
declare void @llvm.masked.scatter.v8i{bits}.v8p0({v8}, <8 x ptr>, i32, <8 x i1>)
define void @cudaops_store{bits}(ptr %ctx, <32 x i64> %addresses, {v32} %value, i32 %mask, {_WHERE}) #0 {{
{_check(bits, layout.ERROR_STORE)}
  br label %g0"""
    for g in range(4):
        picks = ", ".join(f"i32 {8 * g + n}" for n in range(8))
        text += (
            _group(g, bits)
            + f"""
  %v{g} = shufflevector {v32} %value, {v32} poison, <8 x i32> <{picks}>
  br i1 %run{g}, label %line{g}, label %spread{g}
line{g}:
  %p{g} = inttoptr i64 %first{g} to ptr
  call void @llvm.masked.store.v8i{bits}.p0({v8} %v{g}, ptr %p{g}, i32 1, <8 x i1> %m{g})
  br label %g{g + 1}
spread{g}:
  %q{g} = inttoptr <8 x i64> %a{g} to <8 x ptr>
  call void @llvm.masked.scatter.v8i{bits}.v8p0({v8} %v{g}, <8 x ptr> %q{g}, i32 1, <8 x i1> %m{g})
  br label %g{g + 1}"""
        )
    return text + "\ng4:\n  ret void\n}\n"


def _wide(size: int, *, store: bool) -> str:
    """wide(ctx, addresses, mask, site, slot, spaces, wide): `size` bytes of every lane, side by side at `wide`.

    Lanes that may not read give zeros. wide_store is the way back.
    """
    v = f"<{size // 4} x i32>"

    def move(lane: str, address: str, place: str) -> str:
        to, source = (address, place) if store else (place, address)
        return f"""
  %x{lane} = load {v}, ptr {source}, align 1
  store {v} %x{lane}, ptr {to}, align 1"""

    moves = "".join(
        f"""
  %p{lane}.at = getelementptr i64, ptr %places, i64 {lane}
  %p{lane} = load ptr, ptr %p{lane}.at, align 8
  %o{lane} = getelementptr i8, ptr %wide, i64 {lane * size}{move(str(lane), f"%p{lane}", f"%o{lane}")}"""
        for lane in range(32)
    )
    zeros = f"call void @llvm.memset.p0.i64(ptr %wide, i8 0, i64 {32 * size}, i1 false)"
    name, kind = ("wide_store", layout.ERROR_STORE) if store else ("wide", layout.ERROR_ACCESS)
    return f"""
define void @cudaops_{name}{size}(ptr %ctx, <32 x i64> %addresses, i32 %mask, {_WHERE}, ptr %wide) #0 {{
{_check(8 * size, kind)}
  %places = alloca <32 x i64>, align 64
  store <32 x i64> %addresses, ptr %places, align 64
  %all = icmp eq i32 %good, -1
  br i1 %all, label %every, label %some
every:{moves}
  ret void
some:
  {"" if store else zeros}
  br label %next
next:
  %lane = phi i64 [ 0, %some ], [ %lane.next, %more ]
  %lane32 = trunc i64 %lane to i32
  %bit = shl i32 1, %lane32
  %on = and i32 %good, %bit
  %active = icmp ne i32 %on, 0
  br i1 %active, label %move, label %more
move:
  %q.at = getelementptr i64, ptr %places, i64 %lane
  %q = load ptr, ptr %q.at, align 8
  %to = mul i64 %lane, {size}
  %r = getelementptr i8, ptr %wide, i64 %to{move(".one", "%q", "%r")}
  br label %more
more:
  %lane.next = add i64 %lane, 1
  %end = icmp eq i64 %lane.next, 32
  br i1 %end, label %done, label %next
done:
  ret void
}}
"""


def _cold_wide() -> str:
    return f"""
define preserve_allcc void @cudaops_cold_wide16(ptr %ctx, ptr %places, i32 %mask, {_WHERE}, ptr %wide) #0 {{
  %addresses = load <32 x i64>, ptr %places, align 64
  call void @cudaops_wide16(ptr %ctx, <32 x i64> %addresses, i32 %mask, {_WHERE}, ptr %wide)
  ret void
}}
"""


def _cold(bits: int) -> str:
    """The same for paths hardly ever taken: vectors pass through memory, and the caller keeps all its registers."""
    v32 = f"<32 x i{bits}>"
    where = f"i32 %mask, {_WHERE}"
    return f"""
define preserve_allcc void @cudaops_cold_load{bits}(ptr %ctx, ptr %places, ptr %value, {where}) #0 {{
  %addresses = load <32 x i64>, ptr %places, align 64
  %found = call {v32} @cudaops_load{bits}(ptr %ctx, <32 x i64> %addresses, {where})
  store {v32} %found, ptr %value, align 64
  ret void
}}
define preserve_allcc void @cudaops_cold_store{bits}(ptr %ctx, ptr %places, ptr %value, {where}) #0 {{
  %addresses = load <32 x i64>, ptr %places, align 64
  %given = load {v32}, ptr %value, align 64
  call void @cudaops_store{bits}(ptr %ctx, <32 x i64> %addresses, {v32} %given, {where})
  ret void
}}
"""


def _printf() -> str:
    """printf(ctx, formats, arguments, mask): a record in the launch's log for every lane; a full log drops them.

    The arguments lie in the lane's local memory; as much of it is copied as a record holds, and no more than there is.
    """
    record = layout.RECORD
    body = f"""
  %offset = atomicrmw add ptr %log, i64 {layout.RECORD_BYTES} monotonic
  %fits = icmp ule i64 %offset, {layout.LOG_BYTES - layout.RECORD_BYTES}
  br i1 %fits, label %write, label %more
write:
  %lane64 = zext i32 %lane to i64
  %from = add i64 %offset, 8
  %record = getelementptr i8, ptr %log, i64 %from
  %line = load i64, ptr %line.at, align 8
  %line.next = add i64 %line, 1
  store i64 %line.next, ptr %line.at, align 8
  %r.block = getelementptr i8, ptr %record, i64 {record["block"]}
  store i64 %block, ptr %r.block, align 8
  %r.line = getelementptr i8, ptr %record, i64 {record["worker_line"]}
  store i64 %line, ptr %r.line, align 8
  %f.at = getelementptr i64, ptr %all.formats, i64 %lane64
  %format = load i64, ptr %f.at, align 8
  %r.format = getelementptr i8, ptr %record, i64 {record["format"]}
  store i64 %format, ptr %r.format, align 8
  %a.at = getelementptr i64, ptr %all.arguments, i64 %lane64
  %argument = load i64, ptr %a.at, align 8
  %low = icmp uge i64 %argument, %locals
  %high = icmp ult i64 %argument, %locals.end
  %inside = and i1 %low, %high
  %rest = sub i64 %locals.end, %argument
  %short = icmp ult i64 %rest, {layout.RECORD_ARGUMENTS}
  %most = select i1 %short, i64 %rest, i64 {layout.RECORD_ARGUMENTS}
  %bytes = select i1 %inside, i64 %most, i64 0
  %r.arguments = getelementptr i8, ptr %record, i64 {record["arguments"]}
  %p = inttoptr i64 %argument to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %r.arguments, ptr %p, i64 %bytes, i1 false)
  br label %more"""
    return f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define void @cudaops_printf(ptr %ctx, <32 x i64> %formats, <32 x i64> %arguments, i32 %mask) #0 {{
entry:
  %all.formats = alloca <32 x i64>, align 64
  %all.arguments = alloca <32 x i64>, align 64
  store <32 x i64> %formats, ptr %all.formats, align 64
  store <32 x i64> %arguments, ptr %all.arguments, align 64{_field("launch", "%launch", "ptr")}
  {_field("block", "%block")}
  {_field("log", "%log", "ptr", LAUNCH, "%launch")}{_field("locals", "%locals")}{_field("locals_bytes", "%locals.size")}
  %line.at = getelementptr i8, ptr %ctx, i64 {WORKER["line"]}
  %locals.end = add i64 %locals, %locals.size
  br label %next{each_lane("%mask", "entry", body)}
  ret void
}}
"""


def _poll() -> str:
    """poll(ctx, site): should this warp end at once? Called when the worker's budget of loop iterations is used up."""
    return f"""
define preserve_allcc i1 @cudaops_poll(ptr %ctx, i32 %site) #0 {{
entry:{_field("launch", "%launch", "ptr")}
  %abort = getelementptr i8, ptr %launch, i64 {LAUNCH["abort"]}
  %budget = getelementptr i8, ptr %ctx, i64 {WORKER["budget"]}
  %left = load i64, ptr %budget, align 8
  store i64 {layout.POLL_EVERY}, ptr %budget, align 8
  %stop = load atomic i64, ptr %abort monotonic, align 8
  %stopped = icmp ne i64 %stop, 0
  br i1 %stopped, label %yes, label %count
count:{_field("steps", "%steps")}{_field("steps_limit", "%limit")}{_field("budget_start", "%start")}
  %used = sub i64 %start, %left
  %total = add i64 %steps, %used
  store i64 %total, ptr %steps.at, align 8
  %limited = icmp ne i64 %limit, 0
  %many = icmp ugt i64 %total, %limit
  %room = sub i64 %limit, %total
  %short = icmp ult i64 %room, {layout.POLL_EVERY}
  %cut = and i1 %limited, %short
  %next = select i1 %cut, i64 %room, i64 {layout.POLL_EVERY}
  store i64 %next, ptr %budget, align 8
  store i64 %next, ptr %start.at, align 8
  %over = and i1 %limited, %many
  br i1 %over, label %note, label %ask
note:
  %site64 = zext i32 %site to i64
  call preserve_allcc void @cudaops_fault(ptr %ctx, i64 {layout.ERROR_STEPS}, i64 %site64, i64 0, i64 %total)
  br label %yes
ask:{_field("python", "%python", "ptr")}
  %none = icmp eq ptr %python, null
  br i1 %none, label %no, label %call
call:
  %ensure = load ptr, ptr %python, align 8
  %check.at = getelementptr ptr, ptr %python, i64 1
  %check = load ptr, ptr %check.at, align 8
  %fetch.at = getelementptr ptr, ptr %python, i64 2
  %fetch = load ptr, ptr %fetch.at, align 8
  %normalize.at = getelementptr ptr, ptr %python, i64 3
  %normalize = load ptr, ptr %normalize.at, align 8
  %release.at = getelementptr ptr, ptr %python, i64 4
  %release = load ptr, ptr %release.at, align 8
  %gil = call i32 %ensure()
  %raised = call i32 %check()
  %quiet = icmp eq i32 %raised, 0
  br i1 %quiet, label %let.go, label %keep
keep:
  %type = getelementptr i8, ptr %ctx, i64 {WORKER["raised_type"]}
  %value = getelementptr i8, ptr %ctx, i64 {WORKER["raised_value"]}
  %trace = getelementptr i8, ptr %ctx, i64 {WORKER["raised_trace"]}
  call void %fetch(ptr %type, ptr %value, ptr %trace)
  call void %normalize(ptr %type, ptr %value, ptr %trace)
  br label %let.go
let.go:
  call void %release(i32 %gil)
  br i1 %quiet, label %no, label %set
set:
  store atomic i64 1, ptr %abort monotonic, align 8
  br label %yes
yes:
  ret i1 true
no:
  ret i1 false
}}
"""
