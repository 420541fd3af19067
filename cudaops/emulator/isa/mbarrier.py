"""mbarrier: barriers in shared memory that count arrivals and bytes (see mbarriers.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator import layout, sanitizer
from cudaops.emulator.isa.async_copy import make_copies
from cudaops.emulator.isa.memory import Access
from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import VARYING
from cudaops.emulator.layout import MBARRIER
from cudaops.emulator.mbarriers import OPERATIONS
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Instruction, Mem, Operand

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

WHERE = "shared shared::cta"
ORDER = f"{WHERE} release acquire relaxed cta cluster"


def _call(g: Codegen, ins: Instruction, operation: str, address: Operand, value: str = "zeroinitializer") -> str:
    """The 64 bits that `operation` gives each lane; lanes take part one after the other."""
    assert isinstance(address, Mem)
    space = "shared" if {"shared", "shared::cta"} & set(ins.parts) else "generic"
    places = g.address_vector(address, space)
    g.require_alignment(ins, "shared", places, 8, 32)
    access, mask = Access(ins, "shared", "b64", (address,), VARYING), g.mask
    if g.checks is Checks.SANITIZER:  # to set it up is a write like any other
        sets_up = operation in ("init", "inval")
        g.watch(access, places, sanitizer.WRITE if sets_up else sanitizer.ATOMIC)
    site, _ = g.site(access)
    found = g.emit(
        f"call <32 x i64> {g.field('mbarrier', 'ptr')}(ptr %ctx, i32 {OPERATIONS.index(operation)}, "
        f"<32 x i64> {places}, <32 x i64> {value}, i32 {g.bits_of(g.mask_or_full())}, i32 {site})"
    )
    g.mask = mask
    return found


def _counts(g: Codegen, operand: Operand) -> str:
    value = g.read(operand, "b32", vector=True)
    return g.emit(f"zext <32 x i32> {value} to <32 x i64>")


@rule("mbarrier", "b64", WHERE, needs="init")
@rule("mbarrier", "b64", WHERE, needs="inval")
def set_up(g: Codegen, ins: Instruction) -> None:
    count = _counts(g, ins.operands[1]) if "init" in ins.parts else "zeroinitializer"
    _call(g, ins, "init" if "init" in ins.parts else "inval", ins.operands[0], count)


@rule("mbarrier", "b64", ORDER, needs="expect_tx")
@rule("mbarrier", "b64", ORDER, needs="complete_tx")
def bytes_of_phase(g: Codegen, ins: Instruction) -> None:
    operation = "expect_tx" if "expect_tx" in ins.parts else "complete_tx"
    _call(g, ins, operation, ins.operands[0], _counts(g, ins.operands[1]))


@rule("mbarrier", "b64", f"{ORDER} noComplete expect_tx", needs="arrive")
@rule("mbarrier", "b64", f"{ORDER} noComplete expect_tx", needs="arrive_drop")
def arrive(g: Codegen, ins: Instruction) -> None:
    """The state is the barrier's before the lane arrived."""
    state, address = ins.operands[:2]
    count = _counts(g, ins.operands[2]) if len(ins.operands) > 2 else "splat (i64 1)"
    if "expect_tx" in ins.parts:
        _call(g, ins, "expect_tx", address, count)
        count = "splat (i64 1)"
    operation = "arrive_drop" if "arrive_drop" in ins.parts else "arrive"
    g.vector = True
    g.write(state, _call(g, ins, operation, address, count), "b64", vector=True)


@rule("mbarrier", "b64", f"{ORDER} parity", needs="test_wait")
@rule("mbarrier", "b64", f"{ORDER} parity", needs="try_wait")
def wait(g: Codegen, ins: Instruction) -> None:
    """Whether a phase is complete. try_wait gives up at once: the loop round it gives way to other warps."""
    complete, address, phase = ins.operands[:3]
    if "parity" in ins.parts:
        done = _call(g, ins, "test_parity", address, _counts(g, phase))
    else:
        done = _call(g, ins, "test_state", address, g.read(phase, "b64", vector=True))
    p = g.emit(f"trunc <32 x i64> {done} to <32 x i1>")
    if not g.vector:
        p = g.emit(f"extractelement <32 x i1> {p}, i32 {g.last_active_lane()}")
    g.write(complete, p, "pred")


@rule("mbarrier", "b64", "", needs="pending_count")
def pending_count(g: Codegen, ins: Instruction) -> None:
    state = g.read(ins.operands[1], "b64", vector=g.vector)
    start, width = MBARRIER["pending"]
    ty = g.ty("b64")
    value = g.binary("lshr", ty, state, g.splat("i64", start))
    value = g.binary("and", ty, value, g.splat("i64", (1 << width) - 1))
    g.write(ins.operands[0], g.emit(f"trunc {ty} {value} to {g.ty('b32')}"), "b32")


@rule("cp", "b64", f"async noinc {WHERE}", needs="mbarrier arrive")
def arrive_when_copied(g: Codegen, ins: Instruction) -> None:
    """Arrive when the lane's copies so far are made: they are made now. Without .noinc the arrival is one more that the
    phase then expects, so that nothing is left to count."""
    make_copies(g, str(layout.ALL_COPIES))
    g.vector = True
    _call(g, ins, "arrive" if "noinc" in ins.parts else "arrive_more", ins.operands[0], "splat (i64 1)")
