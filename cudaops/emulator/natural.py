"""Vector accesses must be naturally aligned: a misaligned one is a fault, as on a GPU, with every kind of check.

Where the lane analysis cannot say it, the address is tested. If all lanes are at multiples of the access's size from
each other, one scalar tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator.options import Checks
from cudaops.emulator.sanitizer import MISALIGNED

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen
    from cudaops.emulator.isa.memory import Access
    from cudaops.emulator.lanes import Lanes
    from cudaops.emulator.ptx import Mem


def check_alignment(g: Codegen, a: Access, memory: Mem) -> None:
    """End the warp where a lane's address is no multiple of what it accesses; the sanitizer sees to that itself."""
    if len(a.items) == 1 or g.checks is not Checks.BOUNDS or (a.space == "shared" and _proven(a.address, a.total)):
        return
    low_bits = a.total - 1
    offsets = a.address.offsets
    if offsets is not None and all((o - offsets[0]) % a.total == 0 for o in offsets):
        start = g.address_scalar(memory, a.space)
        first = g.binary("add", "i64", start, str(offsets[0])) if offsets[0] else start
        odd = g.emit(f"icmp ne i64 {g.binary('and', 'i64', first, str(low_bits))}, 0")
    else:
        places = g.address_vector(memory, a.space)
        off = g.binary("and", "<32 x i64>", places, f"splat (i64 {low_bits})")
        odd = g.emit(f"icmp ne i32 {g.bits_of(g.emit(f'icmp ne <32 x i64> {off}, zeroinitializer'))}, 0")
    look, fault, fine = g.label("look"), g.label("fault"), g.label("fine")
    g.line(f"br i1 {odd}, label %{look}, label %{fine}, !prof !1")
    g.place(look)
    kept = dict(g.splats), dict(g.vectors), dict(g.scalars)  # what is made here is not there later
    g.line(f"store <32 x i64> {g.address_vector(memory, a.space)}, ptr %cold.places, align 64")
    mask, (site, _) = g.bits_of(g.mask_or_full()), g.site(a)
    function = g.field("misaligned", "ptr")
    found = g.emit(
        f"call preserve_allcc i1 {function}(ptr %ctx, ptr %cold.places, i32 {mask}, i64 {a.total}, i32 {site})"
    )
    g.line(f"br i1 {found}, label %{fault}, label %{fine}")
    g.place(fault)
    g.line("ret i32 0")
    g.splats, g.vectors, g.scalars = kept
    g.place(fine)


def _proven(address: Lanes, size: int) -> bool:
    """Shared memory begins at a multiple of any size: are S and all of L multiples of this one?"""
    offsets = address.offsets
    return offsets is not None and (1 << address.zeros) % size == 0 and all(o % size == 0 for o in offsets)


def ir() -> str:
    """misaligned(ctx, addresses, mask, bytes, site): is a lane of the mask at no multiple of bytes? The worker's first
    fault is recorded."""
    return f"""
define preserve_allcc i1 @cudaops_misaligned(ptr %ctx, ptr %places, i32 %mask, i64 %bytes, i32 %site) #0 {{
entry:
  %low = sub i64 %bytes, 1
  br label %loop
loop:
  %lane = phi i64 [ 0, %entry ], [ %lane.next, %next ]
  %lane32 = trunc i64 %lane to i32
  %bit = shl i32 1, %lane32
  %on = and i32 %mask, %bit
  %active = icmp ne i32 %on, 0
  %at = getelementptr i64, ptr %places, i64 %lane
  %address = load i64, ptr %at, align 8
  %off = and i64 %address, %low
  %odd = icmp ne i64 %off, 0
  %wrong = and i1 %active, %odd
  br i1 %wrong, label %found, label %next
next:
  %lane.next = add i64 %lane, 1
  %end = icmp eq i64 %lane.next, 32
  br i1 %end, label %none, label %loop
none:
  ret i1 false
found:
  %site64 = zext i32 %site to i64
  call preserve_allcc void @cudaops_fault(ptr %ctx, i64 {MISALIGNED}, i64 %site64, i64 %lane, i64 %address)
  ret i1 true
}}
"""
