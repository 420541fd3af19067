"""cp.async: global to shared memory, made when it is waited for (see copies.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator import layout, sanitizer
from cudaops.emulator.isa.memory import Access
from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import VARYING
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Imm, Instruction, Mem

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

HINTS = "L2::64B L2::128B L2::256B L2::cache_hint"


@rule("cp", "", f"async ca cg shared shared::cta global {HINTS}")
def cp_async(g: Codegen, ins: Instruction) -> None:
    """cp-size bytes, those past src-size being zeros that are not read."""
    target, source, size = ins.operands[:3]
    assert isinstance(target, Mem)
    assert isinstance(source, Mem)
    assert isinstance(size, Imm)
    if size.value not in (4, 8, 16):
        g.unsupported(ins, f"a copy of {size.value} bytes")
    g.vector = True
    more = ins.operands[3 : -1 if "L2::cache_hint" in ins.parts else None]  # the cache policy says nothing here
    count = g.splat32(size.value)
    if more:
        name = g.declare("llvm.umin.v32i32", "<32 x i32>", "<32 x i32>, <32 x i32>")
        given = g.read(more[0], "b32", vector=True)
        count = g.emit(f"call <32 x i32> @{name}(<32 x i32> {given}, <32 x i32> {count})")
    to, origin = g.address_vector(target, "shared"), g.address_vector(source, "global")
    g.require_alignment(ins, "shared", to, size.value, 32)
    g.require_alignment(ins, "global", origin, size.value, 32)
    if g.checks is Checks.SANITIZER:
        _watch(g, ins, to, origin, count, size.value, bool(more))
    site, slot = g.site(Access(ins, "global", "b32", (source,), VARYING))
    function = g.field("copy", "ptr")
    g.line(
        f"call void {function}(ptr %ctx, <32 x i64> {to}, <32 x i64> {origin}, <32 x i32> {count}, "
        f"i32 {g.bits_of(g.mask_or_full())}, i32 {size.value}, i32 {site}, i32 {slot})"
    )


def _watch(g: Codegen, ins: Instruction, to: str, origin: str, count: str, size: int, short: bool) -> None:
    """What is read, and that the target is on its way: nobody may look at it until it is waited for."""
    mask = g.mask
    source, target = ins.operands[1], ins.operands[0]
    step = 4 if short else size
    for offset in range(0, size, step):
        if short:
            some = g.emit(f"icmp ugt <32 x i32> {count}, {g.splat32(offset)}")
            g.mask = some if mask is None else g.binary("and", "<32 x i1>", mask, some)
        read = Access(ins, "global", "b32", (source,) * (step // 4), VARYING)
        places = g.binary("add", "<32 x i64>", origin, g.vector_text("i64", [offset] * 32))
        g.watch(read, places, sanitizer.READ)
        g.mask = mask
    g.watch(Access(ins, "shared", "b32", (target,) * (size // 4), VARYING), to, sanitizer.COPY)
    g.mask = mask


@rule("cp", "", "async", needs="commit_group")
def commit(g: Codegen, ins: Instruction) -> None:
    g.line(f"call void {g.field('copy_commit', 'ptr')}(ptr %ctx, i32 {g.bits_of(g.mask_or_full())})")


@rule("cp", "", "async", needs="wait_group")
@rule("cp", "", "async", needs="wait_all")
def wait(g: Codegen, ins: Instruction) -> None:
    newest = g.read(ins.operands[0], "b32", vector=False) if ins.operands else str(layout.ALL_COPIES)
    make_copies(g, newest)


def make_copies(g: Codegen, newest: str) -> None:
    """All of the lanes that run this, but for those of their `newest` groups."""
    g.line(f"call void {g.field('copy_wait', 'ptr')}(ptr %ctx, i32 {g.bits_of(g.mask_or_full())}, i32 {newest})")
