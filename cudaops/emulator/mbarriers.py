"""LLVM IR of mbarrier objects: 64 bits in shared memory, laid out by us (layout.MBARRIER), as PTX leaves open.

A phase is complete when no arrival is pending and as many bytes have come as were announced, in whatever order.
"""

from __future__ import annotations

from cudaops.emulator import layout
from cudaops.emulator.layout import MBARRIER, SPACES, WORKER
from cudaops.emulator.text import each_lane

OPERATIONS = (
    "init", "inval", "expect_tx", "complete_tx", "arrive", "arrive_drop", "arrive_more", "test_state", "test_parity",
)  # fmt: skip


def ir() -> str:
    """mbarrier(ctx, operation, addresses, values, mask, site): what it gives each lane."""
    cases = " ".join(f"i32 {n}, label %{name}" for n, name in enumerate(OPERATIONS))
    parts = ""
    for name, (start, width) in MBARRIER.items():
        parts += f"""
  %{name}.up = shl i64 %old, {64 - start - width}
  %{name} = {"ashr" if name == "bytes" else "lshr"} i64 %{name}.up, {64 - width}"""
    joined, total = "", "0"
    for name, (start, width) in MBARRIER.items():
        joined += f"""
  %{name}.cut = and i64 %{name}.new, {(1 << width) - 1}
  %{name}.in = shl i64 %{name}.cut, {start}
  %{name}.sum = or i64 {total}, %{name}.in"""
        total = f"%{name}.sum"
    body = f"""
  %lane64 = zext i32 %lane to i64
  %place = getelementptr i64, ptr %places, i64 %lane64
  %address = load i64, ptr %place, align 8
  %p = inttoptr i64 %address to ptr
  %value.at = getelementptr i64, ptr %given, i64 %lane64
  %value = load i64, ptr %value.at, align 8
  %result.at = getelementptr i64, ptr %results, i64 %lane64
  %old = load i64, ptr %p, align 1{parts}
  %tx.more = add i64 %bytes, %value
  %tx.less = sub i64 %bytes, %value
  %pending.less = sub i64 %pending, %value
  %expected.less = sub i64 %expected, %value
  switch i32 %operation, label %more [ {cases} ]
init:
  br label %store
inval:
  store i64 -1, ptr %p, align 1
  br label %more
expect_tx:
  br label %store
complete_tx:
  br label %settle
arrive:
  br label %settle
arrive_drop:
  br label %settle
arrive_more:
  br label %settle
test_state:
  %then.up = shl i64 %value, {64 - sum(MBARRIER["phase"])}
  %then = lshr i64 %then.up, {64 - MBARRIER["phase"][1]}
  %other = xor i64 %then, %phase
  store i64 %other, ptr %result.at, align 8
  br label %more
test_parity:
  %asked = and i64 %value, 1
  %differs = xor i64 %asked, %phase
  store i64 %differs, ptr %result.at, align 8
  br label %more
settle:
  %pending.now = phi i64 [ %pending, %complete_tx ], [ %pending.less, %arrive ], [ %pending.less, %arrive_drop ],
    [ %pending, %arrive_more ]
  %expected.now = phi i64 [ %expected, %complete_tx ], [ %expected, %arrive ], [ %expected.less, %arrive_drop ],
    [ %expected, %arrive_more ]
  %bytes.now = phi i64 [ %tx.less, %complete_tx ], [ %bytes, %arrive ], [ %bytes, %arrive_drop ],
    [ %bytes, %arrive_more ]
  store i64 %old, ptr %result.at, align 8
  %too.many = icmp slt i64 %pending.now, 0
  br i1 %too.many, label %note, label %count
note:
  call preserve_allcc void @cudaops_fault(ptr %ctx, i64 {layout.ERROR_ARRIVALS}, i64 %site64, i64 %lane64,
    i64 %address)
  br label %more
count:
  %none.pending = icmp eq i64 %pending.now, 0
  %none.open = icmp eq i64 %bytes.now, 0
  %complete = and i1 %none.pending, %none.open
  %phase.other = xor i64 %phase, 1
  br i1 %complete, label %turn, label %store
turn:
  call void @cudaops_tick(ptr %ctx)
  br label %store
store:
  %expected.new = phi i64 [ %value, %init ], [ %expected, %expect_tx ], [ %expected.now, %count ],
    [ %expected.now, %turn ]
  %pending.new = phi i64 [ %value, %init ], [ %pending, %expect_tx ], [ %pending.now, %count ],
    [ %expected.now, %turn ]
  %bytes.new = phi i64 [ 0, %init ], [ %tx.more, %expect_tx ], [ %bytes.now, %count ], [ 0, %turn ]
  %phase.new = phi i64 [ 0, %init ], [ %phase, %expect_tx ], [ %phase, %count ], [ %phase.other, %turn ]{joined}
  store i64 {total}, ptr %p, align 1
  %progress.at = getelementptr i8, ptr %ctx, i64 {WORKER["progress"]}
  store i64 1, ptr %progress.at, align 8
  br label %more"""
    return f"""
define <32 x i64> @cudaops_mbarrier(ptr %ctx, i32 %operation, <32 x i64> %addresses, <32 x i64> %values, i32 %mask,
    i32 %site) #0 {{
entry:
  %places = alloca <32 x i64>, align 64
  %given = alloca <32 x i64>, align 64
  %results = alloca <32 x i64>, align 64
  store <32 x i64> %addresses, ptr %places, align 64
  store <32 x i64> %values, ptr %given, align 64
  store <32 x i64> zeroinitializer, ptr %results, align 64
  %site64 = zext i32 %site to i64
  %good = call i32 @cudaops_allowed(ptr %ctx, <32 x i64> %addresses, i32 %mask, i64 8, i32 %site,
    i32 {layout.SHARED_SLOT}, i32 {SPACES["shared"]}, i32 {layout.ERROR_STORE})
  br label %next{each_lane("%good", "entry", body)}
  %result = load <32 x i64>, ptr %results, align 64
  ret <32 x i64> %result
}}
"""
