"""LLVM IR of the block scheduler: blocks from the launch's counter, the warps of a block in turns.

In a round every warp that has something to do gets a turn, which lasts until the warp ends, waits at a barrier, or has
looked often enough at what another warp is to write. After a round the barriers that all have come to are complete.
A block of which no warp can go on is a deadlock; where warps look at memory, only if no other worker can change it.

That is agreed on in epochs. A worker that has gone on since it last said it stood, or that ends, begins a new one: what
it has changed may be what others look at. Those who have looked in vain since an epoch began say so. When all have, but
for the workers that ended, none will ever go on.
"""

from __future__ import annotations

from cudaops.emulator import layout, native
from cudaops.emulator.layout import BARRIERS, FRAME, LAUNCH, WORKER
from cudaops.emulator.text import load_field


def ir() -> str:
    return _complete() + _new_epoch() + _run()


def _complete() -> str:
    """complete(ctx): release the warps that wait at barriers which all have come to. How many barriers those are."""
    v, b = "<16 x i16>", "<16 x i1>"
    barriers = "".join(
        f"""
  %{name}.at = getelementptr i8, ptr %barriers, i64 {offset}"""
        for name, offset in BARRIERS.items()
    )
    results = ""
    for now, last in (("true", "last_true"), ("lanes", "last_lanes")):
        results += f"""
  %{now} = load <16 x i32>, ptr %{now}.at, align 4
  %{last}.old = load <16 x i32>, ptr %{last}.at, align 4
  %{last} = select {b} %complete, <16 x i32> %{now}, <16 x i32> %{last}.old
  store <16 x i32> %{last}, ptr %{last}.at, align 4
  %{now}.left = select {b} %complete, <16 x i32> zeroinitializer, <16 x i32> %{now}
  store <16 x i32> %{now}.left, ptr %{now}.at, align 4"""

    def frame(loop: str) -> str:
        return f"""
  %{loop}.offset = mul i64 %{loop}, %frame.bytes
  %{loop}.frame = getelementptr i8, ptr %frames, i64 %{loop}.offset
  %{loop}.pc = load i32, ptr %{loop}.frame, align 4
  %{loop}.ended = icmp eq i32 %{loop}.pc, -1
  %{loop}.counts.at = getelementptr i8, ptr %{loop}.frame, i64 {FRAME["counts"]}
  %{loop}.raw = load {v}, ptr %{loop}.counts.at, align 2
  %{loop}.counts = select i1 %{loop}.ended, {v} zeroinitializer, {v} %{loop}.raw"""

    return f"""
define i32 @cudaops_complete(ptr %ctx, i64 %frame.bytes, i64 %warps) noinline #0 {{
entry:{load_field("frames", "%frames", "ptr")}{load_field("barriers", "%barriers", "ptr")}{barriers}
  br label %w.next
w.next:
  %w = phi i64 [ 0, %entry ], [ %w.more, %w.next ]
  %exact = phi {v} [ zeroinitializer, %entry ], [ %exact.next, %w.next ]
  %whole = phi {v} [ zeroinitializer, %entry ], [ %whole.next, %w.next ]
  %everyone = phi i16 [ 0, %entry ], [ %everyone.next, %w.next ]{frame("w")}
  %live.at = getelementptr i8, ptr %w.frame, i64 {FRAME["live"]}
  %live.raw = load i16, ptr %live.at, align 2
  %live = select i1 %w.ended, i16 0, i16 %live.raw
  %everyone.next = add i16 %everyone, %live
  %exact.next = add {v} %exact, %w.counts
  %live.1 = insertelement {v} poison, i16 %live, i32 0
  %live.16 = shufflevector {v} %live.1, {v} poison, <16 x i32> zeroinitializer
  %all.come = icmp eq {v} %w.counts, %live.16
  %some.come = icmp ne {v} %w.counts, zeroinitializer
  %warp.come = and {b} %all.come, %some.come
  %counted = select {b} %warp.come, {v} splat (i16 32), {v} %w.counts
  %whole.next = add {v} %whole, %counted
  %w.more = add i64 %w, 1
  %w.again = icmp ult i64 %w.more, %warps
  br i1 %w.again, label %w.next, label %judge
judge:
  %expected = load {v}, ptr %expected.at, align 2
  %arrived = load {v}, ptr %arrived.at, align 2
  %given = icmp ne {v} %expected, zeroinitializer
  %sum = add {v} %whole.next, %arrived
  %enough = icmp uge {v} %sum, %expected
  %everyone.1 = insertelement {v} poison, i16 %everyone.next, i32 0
  %everyone.16 = shufflevector {v} %everyone.1, {v} poison, <16 x i32> zeroinitializer
  %all = icmp eq {v} %exact.next, %everyone.16
  %met = select {b} %given, {b} %enough, {b} %all
  %used = icmp ne {v} %sum, zeroinitializer
  %complete = and {b} %met, %used
  %bits = bitcast {b} %complete to i16
  %count = call i16 @llvm.ctpop.i16(i16 %bits)
  %count32 = zext i16 %count to i32
  %none = icmp eq i16 %bits, 0
  br i1 %none, label %out, label %release
release:
  %expected.left = select {b} %complete, {v} zeroinitializer, {v} %expected
  store {v} %expected.left, ptr %expected.at, align 2
  %arrived.left = select {b} %complete, {v} zeroinitializer, {v} %arrived
  store {v} %arrived.left, ptr %arrived.at, align 2{results}
  br label %r.next
r.next:
  %r = phi i64 [ 0, %release ], [ %r.more, %r.next ]{frame("r")}
  %come = icmp ne {v} %r.counts, zeroinitializer
  %free = and {b} %come, %complete
  %free.bits = bitcast {b} %free to i16
  %free.32 = zext i16 %free.bits to i32
  %r.released.at = getelementptr i8, ptr %r.frame, i64 {FRAME["released"]}
  %r.released = load i32, ptr %r.released.at, align 4
  %r.released.new = or i32 %r.released, %free.32
  store i32 %r.released.new, ptr %r.released.at, align 4
  %r.left = select {b} %free, {v} zeroinitializer, {v} %r.counts
  store {v} %r.left, ptr %r.counts.at, align 2
  %r.waits.at = getelementptr i8, ptr %r.frame, i64 {FRAME["waits"]}
  %r.waits = load i32, ptr %r.waits.at, align 4
  %r.freed = icmp ne i32 %free.32, 0
  %r.waits.new = select i1 %r.freed, i32 0, i32 %r.waits
  store i32 %r.waits.new, ptr %r.waits.at, align 4
  %r.more = add i64 %r, 1
  %r.again = icmp ult i64 %r.more, %warps
  br i1 %r.again, label %r.next, label %out
out:
  ret i32 %count32
}}
declare i16 @llvm.ctpop.i16(i16)
"""


def _new_epoch() -> str:
    """new_epoch(standing): begin an epoch, in which nobody has looked yet; its number."""
    return """
define i64 @cudaops_new_epoch(ptr %standing) noinline #0 {
entry:
  %first = load atomic i64, ptr %standing seq_cst, align 8
  br label %try
try:
  %old = phi i64 [ %first, %entry ], [ %found, %try ]
  %full = or i64 %old, 65535
  %new = add i64 %full, 1
  %exchanged = cmpxchg ptr %standing, i64 %old, i64 %new seq_cst seq_cst
  %found = extractvalue { i64, i1 } %exchanged, 0
  %done = extractvalue { i64, i1 } %exchanged, 1
  br i1 %done, label %out, label %try
out:
  %epoch = lshr i64 %new, 16
  ret i64 %epoch
}
"""


def _run() -> str:
    """run(ctx): take chunks of blocks from the launch's counter until none is left; the warps of a block in turns."""
    fields = load_field("launch", "%launch", "ptr")
    for name, value, ty in (
        ("warp_function", "%function", "ptr"), ("blocks", "%blocks", "i64"), ("chunk", "%chunk", "i64"),
        ("grid_x", "%gx", "i64"), ("grid_y", "%gy", "i64"), ("warps", "%warps", "i64"),
        ("frame_bytes", "%frame.bytes", "i64"), ("workers", "%workers", "i64"), ("copies", "%copying", "i64"),
    ):  # fmt: skip
        fields += load_field(name, value, ty, LAUNCH, "%launch")
    fields += load_field("frames", "%frames", "ptr") + load_field("shared", "%shared", "ptr")
    fields += load_field("shared_bytes", "%shared.bytes") + load_field("barriers", "%barriers", "ptr")
    fields += load_field("copies", "%copies", "ptr")
    for name, at in (
        ("error_kind", "error"), ("warp", "warp"), ("block", "block"), ("done", "done"), ("fenced", "fenced"),
        ("fenced_block", "fenced_block"),
        ("acquired", "acquired"), ("steps", "steps"), ("budget", "budget"),
        ("budget_start", "budget_start"), ("steps_limit", "steps_limit"), ("progress", "progress"),
                    ):  # fmt: skip
        fields += f"\n  %{at}.at = getelementptr i8, ptr %ctx, i64 {WORKER[name]}"
    return f"""
define void @cudaops_run(ptr %ctx) #0 {{
entry:
  %old.csr = alloca i32, align 4
  %new.csr = alloca i32, align 4
  store i32 {0x1F80}, ptr %new.csr, align 4
  call void @llvm.x86.sse.stmxcsr(ptr %old.csr)
  call void @llvm.x86.sse.ldmxcsr(ptr %new.csr){fields}
  %counter = getelementptr i8, ptr %launch, i64 {LAUNCH["next_block"]}
  %abort = getelementptr i8, ptr %launch, i64 {LAUNCH["abort"]}
  %finished.at = getelementptr i8, ptr %launch, i64 {LAUNCH["finished"]}
  %standing.at = getelementptr i8, ptr %launch, i64 {LAUNCH["standing"]}
  %ctaid.x = getelementptr i8, ptr %ctx, i64 {WORKER["ctaid_xy"]}
  %ctaid.y = getelementptr i8, ptr %ctx, i64 {WORKER["ctaid_xy"] + 4}
  %ctaid.z = getelementptr i8, ptr %ctx, i64 {WORKER["ctaid_z"]}
  %has.shared = icmp ne i64 %shared.bytes, 0
  %no.copies = icmp eq i64 %copying, 0
  br label %take
take:
  %stop = load atomic i64, ptr %abort monotonic, align 8
  %stopped = icmp ne i64 %stop, 0
  br i1 %stopped, label %out, label %grab
grab:
  %from = atomicrmw add ptr %counter, i64 %chunk monotonic
  %left = icmp ult i64 %from, %blocks
  br i1 %left, label %some, label %out
some:
  %upto = add i64 %from, %chunk
  %fewer = icmp ult i64 %upto, %blocks
  %to = select i1 %fewer, i64 %upto, i64 %blocks
  br label %block
block:
  %b = phi i64 [ %from, %some ], [ %b.next, %go.on ]
  store i64 %b, ptr %block.at, align 8
  %x = urem i64 %b, %gx
  %rest = udiv i64 %b, %gx
  %y = urem i64 %rest, %gy
  %z = udiv i64 %rest, %gy
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  store i32 %x32, ptr %ctaid.x, align 4
  store i32 %y32, ptr %ctaid.y, align 4
  store i32 %z32, ptr %ctaid.z, align 4
  call void @cudaops_born(ptr %ctx)
  store i64 0, ptr %fenced.at, align 8
  store i64 0, ptr %fenced_block.at, align 8
  store i64 0, ptr %acquired.at, align 8
  call void @llvm.memset.p0.i64(ptr %barriers, i8 0, i64 {layout.BARRIERS_BYTES}, i1 false)
  br i1 %has.shared, label %poison.shared, label %reset
poison.shared:
  call void @llvm.memset.p0.i64(ptr %shared, i8 -1, i64 %shared.bytes, i1 false)
  br label %reset
reset:
  %r = phi i64 [ 0, %block ], [ 0, %poison.shared ], [ %r.next, %reset.next ]
  %r.offset = mul i64 %r, %frame.bytes
  %r.frame = getelementptr i8, ptr %frames, i64 %r.offset
  store <16 x i32> zeroinitializer, ptr %r.frame, align 4
  br i1 %no.copies, label %reset.next, label %reset.copies
reset.copies:
  %r.copies.offset = mul i64 %r, {layout.COPIES_BYTES}
  %r.copies = getelementptr i8, ptr %copies, i64 %r.copies.offset
  call void @llvm.memset.p0.i64(ptr %r.copies, i8 0, i64 {layout.COPIES["ring"]}, i1 false)
  br label %reset.next
reset.next:
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, %warps
  br i1 %r.more, label %reset, label %round
round:
  %stuck = phi i64 [ 0, %reset.next ], [ 0, %moving ], [ %stuck.next, %standing ], [ 0, %look.again ]
  ; the epoch since the start of which this worker looks in vain, -1: none yet; and whether it has said so
  %epoch = phi i64 [ -1, %reset.next ], [ -1, %moving ], [ %epoch, %standing ], [ %epoch.next, %look.again ]
  %said = phi i1 [ false, %reset.next ], [ false, %moving ], [ %said, %standing ], [ %said.next, %look.again ]
  br label %warp
warp:
  %w = phi i64 [ 0, %round ], [ %w.next, %warp.end ]
  %left.over = phi i32 [ 0, %round ], [ %left.over.next, %warp.end ]
  %moved = phi i1 [ false, %round ], [ %moved.next, %warp.end ]
  %ran = phi i1 [ false, %round ], [ %ran.next, %warp.end ]
  %w.offset = mul i64 %w, %frame.bytes
  %frame = getelementptr i8, ptr %frames, i64 %w.offset
  %pc = load i32, ptr %frame, align 4
  %ended = icmp eq i32 %pc, -1
  br i1 %ended, label %warp.end, label %alive
alive:
  %waits.at = getelementptr i8, ptr %frame, i64 {FRAME["waits"]}
  %waits = load i32, ptr %waits.at, align 4
  %idles = icmp ne i32 %waits, 0
  br i1 %idles, label %warp.end, label %turn
turn:
  store i64 %w, ptr %warp.at, align 8
  store i64 0, ptr %progress.at, align 8
  %w32 = trunc i64 %w to i32
  %state = call i32 %function(ptr %ctx, ptr %frame, i32 %w32)
  %released.at = getelementptr i8, ptr %frame, i64 {FRAME["released"]}
  store i32 0, ptr %released.at, align 4
  %is.waiting = icmp eq i32 %state, {layout.WAITS}
  %waiting = zext i1 %is.waiting to i32
  store i32 %waiting, ptr %waits.at, align 4
  %loops = icmp eq i32 %state, {layout.LOOPS}
  %progress = load i64, ptr %progress.at, align 8
  %changed = icmp ne i64 %progress, 0
  %step = select i1 %loops, i1 %changed, i1 true
  %over = icmp eq i32 %state, {layout.ENDED}
  br i1 %over, label %finish, label %warp.end
finish:
  store i32 -1, ptr %frame, align 4
  br label %warp.end
warp.end:
  %mine = phi i32 [ 0, %warp ], [ 0, %finish ], [ 1, %turn ], [ 1, %alive ]
  %moves = phi i1 [ false, %warp ], [ true, %finish ], [ %step, %turn ], [ false, %alive ]
  %runs = phi i1 [ false, %warp ], [ false, %finish ], [ %loops, %turn ], [ false, %alive ]
  %left.over.next = or i32 %left.over, %mine
  %moved.next = or i1 %moved, %moves
  %ran.next = or i1 %ran, %runs
  %w.next = add i64 %w, 1
  %w.more = icmp ult i64 %w.next, %warps
  br i1 %w.more, label %warp, label %round.end
round.end:
  %bad = load i64, ptr %error.at, align 8
  %stop.now = load atomic i64, ptr %abort monotonic, align 8
  %either = or i64 %bad, %stop.now
  %faulted = icmp ne i64 %either, 0
  br i1 %faulted, label %fail, label %no.fault
no.fault:
  %again = icmp ne i32 %left.over.next, 0
  br i1 %again, label %meet, label %block.end
meet:
  call void @cudaops_meet(ptr %ctx, i64 %frame.bytes, i64 %warps)
  %completed = call i32 @cudaops_complete(ptr %ctx, i64 %frame.bytes, i64 %warps)
  %some.complete = icmp ne i32 %completed, 0
  br i1 %some.complete, label %tick, label %incomplete
tick:
  call void @cudaops_tick(ptr %ctx)
  br label %moving
moving:
  br label %round
incomplete:
  br i1 %ran.next, label %looking, label %deadlock
looking:
  br i1 %moved.next, label %moving, label %standing
standing:
  %stuck.next = add i64 %stuck, 1
  %long = icmp ugt i64 %stuck.next, {layout.STUCK_ROUNDS}
  br i1 %long, label %stands.still, label %round
stands.still:
  %finished = load atomic i64, ptr %finished.at seq_cst, align 8
  %fresh = icmp eq i64 %epoch, -1
  br i1 %fresh, label %begin, label %say
begin:
  %begun = call i64 @cudaops_new_epoch(ptr %standing.at)
  br label %look.again
say:
  %now = load atomic i64, ptr %standing.at seq_cst, align 8
  %epoch.now = lshr i64 %now, 16
  %same = icmp eq i64 %epoch.now, %epoch
  br i1 %same, label %count, label %look.again
count:
  %one = zext i1 %said to i64
  %one.more = xor i64 %one, 1
  %now.more = add i64 %now, %one.more
  %exchanged = cmpxchg ptr %standing.at, i64 %now, i64 %now.more seq_cst seq_cst
  %counted.me = extractvalue {{ i64, i1 }} %exchanged, 1
  %said.now = or i1 %said, %counted.me
  %stand = and i64 %now.more, 65535
  %stand.or.ended = add i64 %stand, %finished
  %everyone = icmp uge i64 %stand.or.ended, %workers
  %agreed = and i1 %everyone, %counted.me
  br i1 %agreed, label %deadlock, label %look.again
look.again:
  %epoch.next = phi i64 [ %begun, %begin ], [ %epoch.now, %say ], [ %epoch, %count ]
  %said.next = phi i1 [ false, %begin ], [ false, %say ], [ %said.now, %count ]
  br label %round
deadlock:
  call preserve_allcc void @cudaops_fault(ptr %ctx, i64 {layout.ERROR_DEADLOCK}, i64 0, i64 0, i64 0)
  br label %fail
block.end:
  %done = load i64, ptr %done.at, align 8
  %done.next = add i64 %done, 1
  store i64 %done.next, ptr %done.at, align 8
  store i64 0, ptr %steps.at, align 8
  %budget = load i64, ptr %budget.at, align 8
  %budget.left = sub i64 %budget, {layout.BLOCK_STEPS}
  store i64 %budget.left, ptr %budget.at, align 8
  store i64 %budget.left, ptr %budget_start.at, align 8
  %used.up = icmp slt i64 %budget.left, 0
  %steps.limit = load i64, ptr %steps_limit.at, align 8
  %counted = icmp ne i64 %steps.limit, 0
  %look.now = or i1 %used.up, %counted
  br i1 %look.now, label %look, label %go.on
look:
  %quit = call preserve_allcc i1 @cudaops_poll(ptr %ctx, i32 0)
  store i64 0, ptr %steps.at, align 8
  br i1 %quit, label %fail, label %go.on
go.on:
  %b.next = add i64 %b, 1
  %b.more = icmp ult i64 %b.next, %to
  br i1 %b.more, label %block, label %take
fail:
  store atomic i64 1, ptr %abort monotonic, align 8
  br label %out
out:
  %ends = call i64 @cudaops_new_epoch(ptr %standing.at)
  %ended.before = atomicrmw add ptr %finished.at, i64 1 seq_cst
  call void @llvm.x86.sse.ldmxcsr(ptr %old.csr){_vzeroupper()}
  ret void
}}
"""


def _vzeroupper() -> str:
    """Code that follows may not know of wide registers, and would be slow while they are in use."""
    return "" if native.vector_extension() == "SSE" else "\n  call void @llvm.x86.avx.vzeroupper()"
