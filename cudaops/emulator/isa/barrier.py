"""Barriers of the block: what is left of them for a rule. Waiting ends a block of the code, see stops.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator.isa.table import rule
from cudaops.emulator.layout import BARRIERS
from cudaops.emulator.ptx import Instruction

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen


@rule("bar", "u32 pred", "cta sync red arrive popc and or")
@rule("barrier", "u32 pred", "cta sync red arrive popc and or aligned")
def barrier(g: Codegen, ins: Instruction) -> None:
    """arrive; those that wait are codegen's own."""
    g.arrive_only(ins)


@rule("barrier_result", "u32 pred", "popc and or")
def barrier_result(g: Codegen, ins: Instruction) -> None:
    """What bar.red gives, read when the barrier is complete (made from it in control.py)."""
    number = g.barrier_number(ins, ins.operands[1])
    barriers = g.field("barriers", "ptr")
    found = {}
    for name in ("last_true", "last_lanes"):
        array = g.emit(f"getelementptr i8, ptr {barriers}, i64 {BARRIERS[name]}")
        found[name] = g.emit(f"load i32, ptr {g.emit(f'getelementptr i32, ptr {array}, i32 {number}')}, align 4")
    value = found["last_true"]
    if "and" in ins.parts:
        value = g.emit(f"icmp eq i32 {value}, {found['last_lanes']}")
    elif "or" in ins.parts:
        value = g.emit(f"icmp ne i32 {value}, 0")
    g.write(ins.operands[0], value, ins.type, vector=False)
