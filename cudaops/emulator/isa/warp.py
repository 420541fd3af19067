"""Instructions in which the lanes of a warp, or the warps of a block, meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import LANE
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Imm, Instruction, Operand, Pair

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen


def check_members(g: Codegen, ins: Instruction, members: Operand) -> None:
    """Let the sanitizer see a collective's member mask. Lanes that never existed, or have ended, may be named in it."""
    if g.checks is not Checks.SANITIZER:
        return
    diverged = g.block in g.analysis.masked
    if not diverged and isinstance(members, Imm) and members.value & 0xFFFFFFFF == 0xFFFFFFFF:
        return
    active = g.bits_of(g.mask_or_full())
    live = g.live_bits() if diverged else active
    if g.block in g.meeting:  # all that it names have come, here or elsewhere, unless it was given up
        live = g.emit(f"select i1 {g.given_up}, i32 {live}, i32 {active}")
    masks = g.read(members, "b32", vector=True)
    function = g.field("members", "ptr")
    g.line(f"call void {function}(ptr %ctx, <32 x i32> {masks}, i32 {active}, i32 {live}, i64 {g.site_of(ins)})")


@rule("shfl", "b32", "sync up down bfly idx")
def shfl(g: Codegen, ins: Instruction) -> None:
    """c = clamp | segment mask << 8; a lane whose source is out of range copies its own value, with p = false."""
    mode = ins.parts[-2]
    target = ins.operands[0]
    data = target.first if isinstance(target, Pair) else target
    value = g.read(ins.operands[1], "b32", vector=True)
    lane_operand, c_operand = g.lanes_of(ins.operands[2]), g.lanes_of(ins.operands[3])
    v32, bools = "<32 x i32>", "<32 x i1>"
    if lane_operand.constant and lane_operand.uniform and c_operand.constant and c_operand.uniform:
        assert lane_operand.low is not None and c_operand.low is not None
        picks, inside = zip(*(shuffle_source(mode, i, lane_operand.low, c_operand.low) for i in LANE), strict=True)
        moved = g.emit(f"shufflevector {v32} {value}, {v32} poison, {g.constant_vector('i32', picks)}")
        valid = g.vector_text("i1", [int(p) for p in inside])
        j = g.vector_text("i32", picks)
    else:
        b = g.binary("and", v32, g.read(ins.operands[2], "b32", vector=True), g.splat32(31))
        c = g.read(ins.operands[3], "b32", vector=True)
        clamp = g.binary("and", v32, c, g.splat32(31))
        segment = g.binary("and", v32, g.binary("lshr", v32, c, g.splat32(8)), g.splat32(31))
        lanes = g.vector_text("i32", LANE)
        other = g.binary("xor", v32, segment, g.splat32(-1))
        low = g.binary("and", v32, lanes, segment)
        high = g.binary("or", v32, low, g.binary("and", v32, clamp, other))
        if mode == "idx":
            j = g.binary("or", v32, low, g.binary("and", v32, b, other))
        else:
            j = g.binary({"up": "sub", "down": "add", "bfly": "xor"}[mode], v32, lanes, b)
        valid = g.emit(f"icmp {'sge' if mode == 'up' else 'sle'} {v32} {j}, {high}")
        j = g.emit(f"select {bools} {valid}, {v32} {j}, {v32} {lanes}")
        moved = g.permute32(value, j)
    if g.checks is Checks.SANITIZER and g.mask is not None:
        active = g.bits_of(g.mask)
        asking = g.binary("and", "i32", active, g.bits_of(valid))
        function = g.field("inactive", "ptr")
        g.line(f"call void {function}(ptr %ctx, i32 {asking}, {v32} {j}, i32 {active}, i64 {g.site_of(ins)})")
    check_members(g, ins, ins.operands[4])
    g.write(data, moved, "b32", vector=True)
    if isinstance(target, Pair):
        g.write(target.second, valid, "pred", vector=True)


def shuffle_source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """(lane that is read, the predicate) of shfl for one lane, from the PTX ISA's pseudo-code."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    low = lane & segment
    high = low | (clamp & ~segment & 31)
    if mode == "up":
        j = lane - b
        valid = j >= high
    elif mode == "down":
        j = lane + b
        valid = j <= high
    elif mode == "bfly":
        j = lane ^ b
        valid = j <= high
    else:
        j = low | (b & ~segment & 31)
        valid = j <= high
    return (j if valid else lane), valid


@rule("vote", "pred b32", "sync all any uni ballot")
def vote(g: Codegen, ins: Instruction) -> None:
    """Scalars where all lanes name the same members, else a vector."""
    vector = len(ins.operands) > 2 and not g.lanes_of(ins.operands[2]).uniform
    ty = g.llvm("b32", vector)
    p = g.bits_of(g.read(ins.operands[1], "pred", vector=True))
    active = g.bits_of(g.mask_or_full())
    if vector:
        p, active = g.splat_value("i32", p), g.splat_value("i32", active)
    if len(ins.operands) > 2:
        check_members(g, ins, ins.operands[2])
        active = g.binary("and", ty, active, g.read(ins.operands[2], "b32", vector=vector))
    true = g.binary("and", ty, p, active)
    kind = ins.parts[-2]
    if kind == "ballot":
        g.write(ins.operands[0], true, "b32", vector=vector)
        return
    everyone = g.emit(f"icmp eq {ty} {true}, {active}")
    nobody = g.emit(f"icmp eq {ty} {true}, {'zeroinitializer' if vector else '0'}")
    bools = g.llvm("pred", vector)
    if kind == "uni":
        value = g.binary("or", bools, everyone, nobody)
    else:
        value = everyone if kind == "all" else g.binary("xor", bools, nobody, "splat (i1 true)" if vector else "true")
    g.write(ins.operands[0], value, "pred", vector=vector)


@rule("activemask", "b32")
def activemask(g: Codegen, ins: Instruction) -> None:
    g.write(ins.operands[0], g.bits_of(g.mask_or_full()), "b32", vector=False)


@rule("bar", "", "sync", needs="warp")
def bar_warp(g: Codegen, ins: Instruction) -> None:
    """The lanes of a warp run in step: bar.warp.sync has nothing to wait for."""
    check_members(g, ins, ins.operands[0])
    if g.checks is Checks.SANITIZER:
        g.line(f"call void {g.field('tick_warp', 'ptr')}(ptr %ctx)")


@rule("membar", "", "cta gl sys")
@rule("fence", "", "cta gpu sys cluster acq_rel sc acquire release")
def fence(g: Codegen, ins: Instruction) -> None:
    g.line("fence seq_cst")
    if g.checks is Checks.SANITIZER:
        g.note_fence(ins)


@rule("nanosleep", "u32")
def nanosleep(g: Codegen, ins: Instruction) -> None:
    """Sleeping changes no result."""


@rule("redux", "b32 u32 s32", "sync add min max and or xor")
def redux(g: Codegen, ins: Instruction) -> None:
    """One value from all lanes of the member mask that run this; groups of lanes may name masks of their own."""
    op = next(p for p in ins.parts if p in ("add", "min", "max", "and", "or", "xor"))
    check_members(g, ins, ins.operands[2])
    neutral = {"add": 0, "or": 0, "xor": 0, "and": -1}
    if op in ("min", "max"):
        kind = "s" if ins.type == "s32" else "u"
        bounds = {"smin": 0x7FFFFFFF, "smax": -0x80000000, "umin": -1, "umax": 0}
        op = kind + op
        neutral[op] = bounds[op]
    value = g.read(ins.operands[1], "b32", vector=True)
    active = g.bits_of(g.mask_or_full())
    if g.lanes_of(ins.operands[2]).uniform:
        active = g.binary("and", "i32", active, g.read(ins.operands[2], "b32", vector=False))
        mask = g.emit(f"bitcast i32 {active} to <32 x i1>")
        kept = g.emit(f"select <32 x i1> {mask}, <32 x i32> {value}, <32 x i32> {g.splat32(neutral[op])}")
        name = g.declare(f"llvm.vector.reduce.{op}.v32i32", "i32", "<32 x i32>")
        g.write(ins.operands[0], g.emit(f"call i32 @{name}(<32 x i32> {kept})"), "b32", vector=False)
        return
    members = g.binary("and", "<32 x i32>", g.splat_value("i32", active), g.read(ins.operands[2], "b32", vector=True))
    total = g.splat32(neutral[op])
    for lane in LANE:  # groups of lanes, each with a value of its own
        bit = g.binary("and", "<32 x i32>", members, g.splat32(1 << lane))
        member = g.emit(f"icmp ne <32 x i32> {bit}, zeroinitializer")
        one = g.splat_value("i32", g.emit(f"extractelement <32 x i32> {value}, i32 {lane}"))
        if op[1:] in ("min", "max"):
            name = g.declare(f"llvm.{op}.v32i32", "<32 x i32>", "<32 x i32>, <32 x i32>")
            more = g.emit(f"call <32 x i32> @{name}(<32 x i32> {total}, <32 x i32> {one})")
        else:
            more = g.binary(op, "<32 x i32>", total, one)
        total = g.emit(f"select <32 x i1> {member}, <32 x i32> {more}, <32 x i32> {total}")
    g.write(ins.operands[0], total, "b32", vector=True)


@rule("match", "b32 b64", "sync any all")
def match(g: Codegen, ins: Instruction) -> None:
    """any: the lanes with the same value; all: every lane if all have it, else 0, and p says which."""
    target = ins.operands[0]
    data = target.first if isinstance(target, Pair) else target
    ty = g.llvm(ins.type, True)
    check_members(g, ins, ins.operands[2])
    value = g.read(ins.operands[1], ins.type, vector=True)
    members = g.read(ins.operands[2], "b32", vector=True)
    active = g.splat_value("i32", g.bits_of(g.mask_or_full()))
    active = g.binary("and", "<32 x i32>", active, members)
    total = "zeroinitializer"
    for lane in LANE:
        one = g.emit(f"extractelement {ty} {value}, i32 {lane}")
        same = g.emit(f"icmp eq {ty} {value}, {g.splat_value(g.element(ins.type), one)}")
        bit = g.emit(f"select <32 x i1> {same}, <32 x i32> {g.splat32(1 << lane)}, <32 x i32> zeroinitializer")
        total = g.binary("or", "<32 x i32>", total, bit)
    total = g.binary("and", "<32 x i32>", total, active)
    if "all" not in ins.parts:
        g.write(data, total, "b32", vector=True)
        return
    full = g.emit(f"icmp eq <32 x i32> {total}, {active}")
    g.write(
        data, g.emit(f"select <32 x i1> {full}, <32 x i32> {active}, <32 x i32> zeroinitializer"), "b32", vector=True
    )
    if isinstance(target, Pair):
        g.write(target.second, full, "pred", vector=True)


@rule("elect", "", "sync")
def elect(g: Codegen, ins: Instruction) -> None:
    """The lowest member lane is elected."""
    target = ins.operands[0]
    assert isinstance(target, Pair)
    check_members(g, ins, ins.operands[1])
    members = g.read(ins.operands[1], "b32", vector=True)
    active = g.binary("and", "<32 x i32>", g.splat_value("i32", g.bits_of(g.mask_or_full())), members)
    minus = g.binary("sub", "<32 x i32>", "zeroinitializer", active)
    low = g.binary("and", "<32 x i32>", active, minus)
    leader = g.emit(f"icmp eq <32 x i32> {low}, {g.vector_text('i32', [1 << lane for lane in LANE])}")
    name = g.declare("llvm.cttz.v32i32", "<32 x i32>", "<32 x i32>, i1")
    g.write(target.first, g.emit(f"call <32 x i32> @{name}(<32 x i32> {active}, i1 false)"), "b32", vector=True)
    g.write(target.second, leader, "pred", vector=True)
