"""What a value is across the lanes: never claimed wrongly, and claimed where it matters for speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudaops.emulator.control import Flow, results
from cudaops.emulator.lanes import LANE, ZERO, Geometry, LaneAnalysis, Lanes
from cudaops.emulator.ptx import parse
from tests.emulator import c_expressions, harness
from tests.emulator.integer_programs import Program, build
from tests.emulator.integer_steps import BLOCKS, CONSTANTS, STEPS, TABLE_WORDS, Step
from tests.emulator.reference import evaluate

HEADER = """
.reg .pred %p<9>; .reg .b16 %h<20>; .reg .b32 %r<40>; .reg .b64 %q<40>; .reg .f32 %f<9>;
mov.u32 %r0, %tid.x;      // affine: 0, 32, ... + lane
mov.u32 %r1, %ctaid.x;    // uniform, 0 ... 65 535
ld.param.u32 %r2, [n];    // uniform, anything
ld.param.u64 %q0, [out];
cvta.to.global.u64 %q1, %q0;
mul.wide.u32 %q2, %r0, 4; add.s64 %q3, %q1, %q2; ld.global.u32 %r3, [%q3];    // varying
ld.global.u8 %r4, [%q1];  // uniform, 0 ... 255
and.b32 %r5, %r3, 255;    // varying, 0 ... 255
and.b32 %r6, %r2, -64;    // uniform, a multiple of 64
"""


def lanes_of(code: str, block: tuple[int, int, int] = (128, 1, 1), register: str = "") -> Lanes:
    """Lanes of the last instruction's result, or of what `register` is given by the last one that writes it."""
    kernel = harness.ptx(HEADER + code + "\nret;", ".param .u64 out, .param .u32 n")
    function = parse(kernel.ptx).functions["k"]
    flow = Flow(function)
    analysis = LaneAnalysis(flow, Geometry(block, True), {}, 0, frozenset())
    last = [i for b in flow.blocks for i in b.instructions if any(r.name == (register or r.name) for r in results(i))][
        -1
    ]
    return analysis.transfers[id(last)]


def times(factor: int) -> tuple[int, ...]:
    return tuple(factor * lane for lane in LANE)


# code, L of the result (None: varying, which is what a sound analysis must say, or what it may)
CLAIMS = [
    ("mov.u32 %r9, %r0;", LANE),
    ("add.s32 %r9, %r0, %r2;", LANE),
    ("sub.s32 %r9, %r2, %r0;", times(-1)),
    ("add.s32 %r9, %r0, %r3;", None),
    ("sub.s32 %r9, %r0, %r0;", ZERO),
    ("mul.lo.s32 %r9, %r0, 12;", times(12)),
    ("mul.lo.s32 %r9, %r0, -3;", times(-3)),
    ("mul.lo.s32 %r9, %r0, %r2;", None),
    ("mul.lo.s32 %r9, %r1, %r2;", ZERO),
    ("mad.lo.s32 %r9, %r1, 128, %r0;", LANE),
    ("mad.lo.s32 %r9, %r0, 4, %r2;", times(4)),
    ("shl.b32 %r9, %r0, 2;", times(4)),
    ("shl.b32 %r9, %r0, 32;", ZERO),
    ("shl.b32 %r9, %r0, %r2;", None),
    # Widening: only where no lane wraps.
    ("mul.wide.u32 %q9, %r0, 4;", times(4)),
    ("mul.wide.s32 %q9, %r0, 4;", times(4)),
    ("cvt.u64.u32 %q9, %r0;", LANE),
    ("add.s32 %r9, %r0, %r2; cvt.u64.u32 %q9, %r9;", None),
    ("add.s32 %r9, %r0, %r2; mul.wide.s32 %q9, %r9, 4;", None),
    ("add.s32 %r9, %r0, 2147483520; cvt.s64.s32 %q9, %r9;", LANE),  # up to 2^31 - 1
    ("add.s32 %r9, %r0, 2147483521; cvt.s64.s32 %q9, %r9;", None),  # one lane more
    ("add.s32 %r9, %r0, 2147483521; cvt.u64.u32 %q9, %r9;", LANE),
    ("add.s32 %r9, %r0, -1; cvt.s64.s32 %q9, %r9;", LANE),
    ("add.s32 %r9, %r0, -1; cvt.u64.u32 %q9, %r9;", None),  # thread 0 has 2^32 - 1
    ("sub.s32 %r9, 127, %r0; cvt.u64.u32 %q9, %r9;", times(-1)),
    ("sub.s32 %r9, 126, %r0; cvt.u64.u32 %q9, %r9;", None),
    ("mul.lo.s32 %r9, %r0, 33554432; cvt.u64.u32 %q9, %r9;", times(33554432)),  # 127 * 2^25 < 2^32
    # S is a multiple of 2^30 (2^31), L is less: no lane carries into the sign bit.
    ("mul.lo.s32 %r9, %r0, 33554432; cvt.s64.s32 %q9, %r9;", times(33554432)),
    ("mul.lo.s32 %r9, %r0, 67108864; cvt.u64.u32 %q9, %r9;", times(67108864)),
    ("mul.lo.s32 %r9, %r0, 134217728; cvt.s64.s32 %q9, %r9;", None),
    ("mul.lo.s32 %r9, %r0, 134217728; cvt.u64.u32 %q9, %r9;", None),
    ("mul.lo.s32 %r9, %r0, 67108865; cvt.u64.u32 %q9, %r9;", None),
    ("cvt.u64.u32 %q8, %r0; shl.b64 %q7, %q8, 40; cvt.u32.u64 %r9, %q7;", times(1 << 40)),
    # Bits: where S and L share none.
    ("shr.u32 %r9, %r0, 2;", tuple(lane >> 2 for lane in LANE)),
    ("shr.u32 %r9, %r0, 5;", ZERO),
    ("shr.s32 %r9, %r0, 5;", ZERO),
    ("and.b32 %r9, %r0, 7;", tuple(lane & 7 for lane in LANE)),
    ("and.b32 %r9, %r0, 31;", LANE),
    ("and.b32 %r9, %r0, -32;", ZERO),
    ("add.s32 %r8, %r0, 1; shr.u32 %r9, %r8, 1;", None),
    ("add.s32 %r8, %r0, 1; and.b32 %r9, %r8, 3;", None),
    ("add.s32 %r8, %r0, %r2; and.b32 %r9, %r8, 31;", None),
    ("add.s32 %r8, %r0, %r6; and.b32 %r9, %r8, 31;", LANE),
    ("add.s32 %r8, %r0, %r6; shr.u32 %r9, %r8, 3;", tuple(lane >> 3 for lane in LANE)),
    ("or.b32 %r9, %r6, %r0;", LANE),  # below bit 5 there is the lane alone
    ("or.b32 %r9, %r2, %r0;", None),
    # Swizzles: bits of the lane on both sides.
    ("and.b32 %r7, %r0, 31; shr.u32 %r8, %r7, 3; xor.b32 %r9, %r7, %r8;", tuple(n ^ n >> 3 for n in LANE)),
    ("and.b32 %r7, %r0, 31; shr.u32 %r8, %r0, 3; xor.b32 %r9, %r7, %r8;", None),  # tid / 8 may be 4: a bit of the lane
    ("and.b32 %r7, %r0, 31; shr.u32 %r8, %r7, 3; add.s32 %r10, %r8, 6; xor.b32 %r9, %r7, %r10;", tuple((n ^ (n >> 3) + 6) - 6 for n in LANE)),
    ("and.b32 %r7, %r0, 7; or.b32 %r8, %r6, %r7; xor.b32 %r9, %r8, %r0;", tuple(n ^ n & 7 for n in LANE)),
    ("and.b32 %r7, %r0, 7; add.s32 %r8, %r7, 8; and.b32 %r9, %r8, %r0;", tuple((n & 7 | 8) & n for n in LANE)),
    ("and.b32 %r8, %r0, 31; or.b32 %r9, %r6, %r8;", LANE),
    # %r6 is a multiple of 64; twice the lane and 1 (2) more reaches 63 (64).
    ("mov.u32 %r7, %laneid; shl.b32 %r8, %r7, 1; and.b32 %r10, %r1, 1; add.s32 %r11, %r8, %r10; or.b32 %r9, %r6, %r11;", times(2)),
    ("mov.u32 %r7, %laneid; shl.b32 %r8, %r7, 1; and.b32 %r10, %r1, 2; add.s32 %r11, %r8, %r10; or.b32 %r9, %r6, %r11;", None),
    ("or.b32 %r9, %r0, 3;", tuple((lane | 3) - 3 for lane in LANE)),
    ("xor.b32 %r9, %r0, 31;", times(-1)),
    ("xor.b32 %r9, %r0, 1;", tuple((lane ^ 1) - 1 for lane in LANE)),
    ("bfe.u32 %r9, %r0, 1, 3;", tuple(lane >> 1 & 7 for lane in LANE)),
    ("bfi.b32 %r9, %r0, %r6, 0, 5;", LANE),
    ("bfi.b32 %r9, %r3, %r0, 7, 0;", None),  # nothing is put in, but it is read
    ("shl.b32 %r8, %r0, 30; shr.s32 %r9, %r8, 30;", None),
    ("shl.b32 %r8, %r0, 30; shr.u32 %r9, %r8, 30;", None),
    ("shl.b32 %r8, %r0, 26; shr.s32 %r9, %r8, 26;", LANE),
    ("shl.b32 %r8, %r0, 27; shr.s32 %r9, %r8, 27;", None),  # the sign bit
    ("shl.b32 %r8, %r0, 24; shr.u32 %r9, %r8, 24;", LANE),
    # Narrow registers.
    ("cvt.u16.u32 %h9, %r0;", LANE),
    ("cvt.s8.s32 %r9, %r0;", LANE),
    ("add.s32 %r8, %r0, 1; cvt.s8.s32 %r9, %r8;", None),  # 128 becomes -128
    ("cvt.u8.u32 %r9, %r0;", LANE),
    ("cvt.s32.s8 %r9, %r0;", LANE),
    ("add.s32 %r8, %r0, 250; cvt.u8.u32 %r9, %r8;", None),
    ("cvt.u16.u32 %h8, %r0; add.s16 %h9, %h8, 32760; cvt.s32.s16 %r9, %h9;", None),
    ("cvt.u16.u32 %h8, %r0; add.s16 %h9, %h8, 1000; cvt.s32.s16 %r9, %h9;", LANE),
    # Everything uniform stays so.
    ("div.u32 %r9, %r2, %r4;", ZERO),
    ("rem.s32 %r9, %r2, 7;", ZERO),
    ("setp.lt.s32 %p1, %r1, %r2;", ZERO),
    ("setp.lt.s32 %p1, %r0, %r2;", None),
    ("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, %r0, %r0, %p1;", LANE),
    ("setp.lt.s32 %p1, %r1, %r2; add.s32 %r8, %r0, 5; selp.b32 %r9, %r0, %r8, %p1;", LANE),
    ("setp.lt.s32 %p1, %r0, %r2; add.s32 %r8, %r0, 5; selp.b32 %r9, %r0, %r8, %p1;", None),
    ("min.u32 %r9, %r0, %r2;", None),
    ("cvt.rn.f32.s32 %f1, %r2;", ZERO),
    ("cvt.rn.f32.s32 %f1, %r0;", None),
    ("shfl.sync.idx.b32 %r9, %r2, 0, 31, -1;", None),
    ("mov.u32 %r9, %laneid;", LANE),
    ("mov.u32 %r9, %lanemask_lt;", None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "offsets"), CLAIMS, ids=[code for code, _ in CLAIMS])
def test_rule(code: str, offsets: tuple[int, ...] | None) -> None:
    assert lanes_of(code).offsets == offsets


# As CLAIMS, in a block of one warp, where the index of the thread is a constant of the lane: S is 0.
CLAIMS_OF_ONE_WARP = [
    ("shl.b32 %r8, %r0, 27; cvt.s64.s32 %q9, %r8;", None),
    ("shl.b32 %r8, %r0, 27; cvt.u64.u32 %q9, %r8;", times(1 << 27)),
    ("shl.b32 %r8, %r0, 26; cvt.s64.s32 %q9, %r8;", times(1 << 26)),
    ("shl.b32 %r8, %r0, 28; cvt.u64.u32 %q9, %r8;", None),
    ("shl.b32 %r8, %r0, 30; shr.s32 %r9, %r8, 30;", None),
    ("shl.b32 %r8, %r0, 30; shr.u32 %r9, %r8, 30;", None),
    ("shl.b32 %r8, %r0, 27; shr.u32 %r9, %r8, 27;", LANE),
    ("shl.b32 %r8, %r0, 30; and.b32 %r9, %r8, -1073741824;", tuple(lane << 30 & 0xC0000000 for lane in LANE)),
    ("sub.s32 %r8, 5, %r0; cvt.u64.u32 %q9, %r8;", None),
    ("sub.s32 %r8, 31, %r0; cvt.u64.u32 %q9, %r8;", times(-1)),
    ("cvt.u16.u32 %h8, %r0; mul.lo.s16 %h9, %h8, 2048; cvt.u32.u16 %r9, %h9;", times(2048)),
    ("cvt.u16.u32 %h8, %r0; mul.lo.s16 %h9, %h8, 2048; cvt.s32.s16 %r9, %h9;", None),
    ("mul.lo.s32 %r8, %r0, 8; cvt.s8.s32 %r9, %r8;", None),
    ("mul.lo.s32 %r8, %r0, 8; cvt.u8.u32 %r9, %r8;", times(8)),
]


@pytest.mark.parametrize(("code", "offsets"), CLAIMS_OF_ONE_WARP, ids=[code for code, _ in CLAIMS_OF_ONE_WARP])
def test_rule_in_a_block_of_one_warp(code: str, offsets: tuple[int, ...] | None) -> None:
    found = lanes_of(code, (32, 1, 1))
    assert found.offsets is None if offsets is None else values_of(found) == offsets


def values_of(lanes: Lanes) -> tuple[int, ...]:
    """S + L where S is known."""
    assert lanes.offsets is not None
    assert lanes.constant
    scalar = lanes.low or 0
    first = scalar + lanes.offsets[0]
    return tuple(scalar + offset - first for offset in lanes.offsets)


# %r0 is threadIdx.x, a multiple of 32 and the lane; %r6 a multiple of 64.
WARPS_AS_A_WHOLE = [
    ("setp.lt.s32 %p1, %r0, 64;", True), ("setp.lt.u32 %p1, %r0, 40;", False), ("setp.ge.u32 %p1, %r0, 32;", True),
    ("setp.gt.u32 %p1, %r0, 31;", True), ("setp.gt.u32 %p1, %r0, 32;", False), ("setp.le.s32 %p1, %r0, 63;", True),
    ("setp.le.s32 %p1, %r0, 64;", False), ("setp.lo.u32 %p1, %r0, %r6;", True), ("setp.lt.s32 %p1, %r0, %r1;", False),
    ("setp.gt.s32 %p1, 64, %r0;", True), ("setp.le.u32 %p1, 32, %r0;", True), ("setp.lt.u32 %p1, 63, %r0;", True),
    ("setp.lt.u32 %p1, 64, %r0;", False), ("setp.eq.s32 %p1, %r0, 32;", False), ("setp.ne.s32 %p1, %r0, 64;", False),
    ("setp.gt.s32 %p1, %r0, -1;", True), ("setp.lt.s32 %p1, %r0, 0;", True),
]  # fmt: skip


@pytest.mark.parametrize(("code", "uniform"), WARPS_AS_A_WHOLE, ids=[code for code, _ in WARPS_AS_A_WHOLE])
def test_a_limit_that_no_warp_lies_across(code: str, uniform: bool) -> None:
    assert lanes_of(code).uniform is uniform


INTERVALS = [
    ("mov.u32 %r9, %r5;", (0, 255)),
    ("mov.u32 %r9, %r1;", (0, 65535)),
    ("shr.u32 %r9, %r3, 24;", (0, 255)),
    ("shr.s32 %r9, %r3, 24;", (-128, 127)),
    ("rem.u32 %r9, %r3, 10;", (0, 9)),
    ("min.u32 %r9, %r3, 63;", (0, 63)),
    ("max.s32 %r9, %r3, 0;", (0, 2**31 - 1)),
    ("bfe.u32 %r9, %r3, 4, 6;", (0, 63)),
    ("mad.lo.s32 %r9, %r5, 4, %r4;", (0, 1275)),
    ("xor.b32 %r9, %r5, 256;", (0, 511)),
    ("min.u32 %r8, %r3, -16; div.s32 %r9, %r8, 16777216;", None),  # may be negative, read as signed
    ("mul.lo.s32 %r9, %r5, 33554432;", None),  # wraps
    ("add.s32 %r9, %r3, 1;", None),
]


@pytest.mark.parametrize(("code", "interval"), INTERVALS, ids=[code for code, _ in INTERVALS])
def test_interval(code: str, interval: tuple[int, int] | None) -> None:
    """Intervals decide which shared accesses go unchecked."""
    found = lanes_of(code)
    got = None if found.low is None or found.high is None else (found.low, found.high)
    assert got == interval


@dataclass(frozen=True)
class Counted:
    """A counter from start by step while `test` limit holds: the interval claimed in the body and behind the loop.

    Tested where the loop begins, or (`bottom`, as compilers write a loop that runs at least once) where it ends.
    """

    start: int
    test: str
    limit: str
    step: int
    body: tuple[int, int] | None = None
    behind: tuple[int, int] | None = None
    bottom: bool = False

    def __str__(self) -> str:
        return f"from {self.start} by {self.step} while {self.test} {self.limit}{', at the end' if self.bottom else ''}"

    @property
    def code(self) -> str:
        test = f"setp.{self.test} %p1, %r9, {self.limit};"
        body = f"add.s32 %r10, %r9, 0; add.s32 %r9, %r9, {self.step};"
        if self.bottom:
            loop = f"L: {body} {test} @%p1 bra L;"
        else:
            loop = f"L: {test} @!%p1 bra E; {body} bra L; E:"
        return f"{LIMITS} mov.u32 %r9, {self.start}; {loop} add.s32 %r11, %r9, 0;"

    def values(self) -> tuple[set[int], set[int]]:
        """What the counter can be in the body, and behind the loop."""
        few = {"%r5": range(0, 256, 15), "%r4": range(0, 256, 15), "%r7": range(2), "%r8": range(10, 14)}
        inside, behind = set(), set()
        for limit in few.get(self.limit) or [int(self.limit)]:
            i, turns = self.start & 0xFFFFFFFF, 0
            while (self.bottom and not turns) or evaluate(f"setp.{self.test}", i, limit & 0xFFFFFFFF):
                inside.add(i)
                i, turns = (i + self.step) & 0xFFFFFFFF, turns + 1
                if turns == 300:
                    break
            else:
                behind.add(i)
        return inside, behind


LIMITS = "and.b32 %r7, %r1, 1; and.b32 %r8, %r1, 3; add.s32 %r8, %r8, 10;"
COUNTED = [
    Counted(0, "lt.s32", "16", 1, (0, 15), (16, 16), bottom=True),
    Counted(0, "ne.s32", "16", 1, (0, 15), (16, 16), bottom=True),
    Counted(0, "ne.s32", "512", 16, (0, 496), (512, 512), bottom=True),
    Counted(0, "lt.u32", "16", 4, (0, 12), (16, 16), bottom=True),
    Counted(15, "gt.s32", "0", -1, (1, 15), (0, 0), bottom=True),
    Counted(16, "ne.s32", "0", -1, (1, 16), (0, 0), bottom=True),
    Counted(-8, "ne.s32", "0", 1, (-8, -1), (0, 0), bottom=True),
    Counted(0, "lt.s32", "%r8", 1, None, (10, 13), bottom=True),
    Counted(0, "le.s32", "16", 1, bottom=True),
    Counted(0, "ne.s32", "15", 4, bottom=True),  # never met: it goes round for ever
    Counted(0, "lt.s32", "16", 1),
    Counted(0, "le.s32", "16", 1),
    Counted(0, "lt.s32", "15", 4),
    Counted(0, "ne.s32", "16", 1),
    Counted(3, "lt.s32", "%r8", 1),
    Counted(0, "lt.s32", "%r7", 1, (0, 0), (0, 1)),
    Counted(0, "lt.s32", "%r4", 1),
    Counted(0, "lt.s32", "%r5", 32),
    Counted(15, "ge.s32", "0", -1),
    Counted(16, "gt.s32", "%r7", -1),
    Counted(20, "lt.s32", "16", 1),
    Counted(-8, "lt.s32", "8", 2),
    Counted(0, "lo.u32", "-1", 1 << 30),  # wraps, and goes on
    Counted(2147483600, "gt.s32", "0", 16),  # until it wraps
    Counted(2147483600, "gt.s32", "0", 16, bottom=True),
    Counted(5, "lt.s32", "-1", 1),
    Counted(5, "lo.u32", "-1", 1 << 29),
    Counted(5, "hi.u32", "3", -1),
    Counted(5, "ge.u32", "0", -1, bottom=True),  # always
    Counted(0, "gt.s32", "-5", -2, bottom=True),
]


@pytest.mark.parametrize("loop", COUNTED, ids=str)
def test_interval_of_a_loop_counter(loop: Counted) -> None:
    """What is claimed holds in every turn: it decides which accesses to shared memory go unchecked."""
    for register, values, wanted in zip(("%r10", "%r11"), loop.values(), (loop.body, loop.behind), strict=True):
        lanes = lanes_of(loop.code, register=register)
        if lanes.low is not None and lanes.high is not None:
            assert all((v - lanes.low) % (1 << 32) <= lanes.high - lanes.low for v in values)
        if wanted is not None:
            assert (lanes.low, lanes.high) == wanted


def test_a_value_that_lanes_leave_a_loop_with_varies() -> None:
    code = """
    mov.u32 %r9, 0;
    L: setp.ge.s32 %p1, %r9, %r3; @%p1 bra E; add.s32 %r9, %r9, 1; bra L;
    E: add.s32 %r10, %r9, 0;"""
    assert lanes_of(code).varying
    assert lanes_of(code.replace("%r3", "%r2")).uniform


def test_an_assignment_on_one_side_of_a_branch_varies() -> None:
    code = """
    mov.u32 %r9, 1; setp.lt.s32 %p1, %r3, 5; @%p1 bra E; mov.u32 %r9, 2;
    E: add.s32 %r10, %r9, 0;"""
    assert lanes_of(code).varying
    assert lanes_of(code.replace("%r3", "%r2")).uniform


GEOMETRIES = [*BLOCKS, (1, 1, 1), (31, 1, 1), (1024, 1, 1), (32, 32, 1), (16, 16, 4), (2, 16, 32), (33, 2, 1), (1, 3, 64), (8, 2, 3)]  # fmt: skip


@pytest.mark.parametrize("block", GEOMETRIES, ids=str)
def test_thread_indices_are_what_the_geometry_says(block: tuple[int, int, int]) -> None:
    x, y, z = block
    geometry = Geometry(block, True)
    for axis in range(3):
        lanes = geometry.tid(axis)
        for warp in range(geometry.warps):
            ids = [(t % x, t // x % y, t // (x * y))[axis] for t in range(32 * warp, min(32 * warp + 32, x * y * z))]
            if lanes.offsets is not None:
                scalars = {i - offset for i, offset in zip(ids, lanes.offsets, strict=False)}
                assert len(scalars) == 1
                assert next(iter(scalars)) % (1 << min(lanes.zeros, 32)) == 0
                ids = list(scalars)
            if lanes.low is not None and lanes.high is not None:
                assert all(lanes.low <= i <= lanes.high for i in ids)


# -- any program ----------------------------------------------------------------------------------------------------------
_choice = st.integers(0, 65535)
_step = st.one_of(
    st.sampled_from(STEPS).flatmap(lambda s: st.builds(Step, st.just(s[0]), st.just(s[1]), st.just(s[2]), st.tuples(*[_choice] * 6))),
    st.builds(Step, st.just("compound"), st.just("r"), st.just(()), st.tuples(*[_choice] * 16)),
    st.builds(Step, st.sampled_from(("look up", "loop", "end")), st.just("r"), st.just(()), st.tuples(*[_choice] * 6)),
)  # fmt: skip
_word = st.one_of(st.sampled_from(CONSTANTS), st.integers(0, 2**32 - 1))
PROGRAMS = given(
    program=st.builds(build, st.lists(_step, min_size=5, max_size=30), st.sampled_from(BLOCKS)),
    grid=st.sampled_from(((1, 1, 1), (2, 1, 1), (1, 2, 1))),
    words=st.lists(st.tuples(_word, _word, st.one_of(_word, st.integers(0, 2**64 - 1))), min_size=2, max_size=2),
    table=st.binary(min_size=4 * TABLE_WORDS, max_size=4 * TABLE_WORDS).map(lambda b: np.frombuffer(b, np.uint32).copy()),
)  # fmt: skip
PATIENT = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(PATIENT, max_examples=25)
@PROGRAMS
def test_any_integer_program_is_exact(program: Program, grid, words, table) -> None:  # type: ignore[no-untyped-def]
    for a, b, c in words:
        program.check(grid, a, b, c, table)


@settings(PATIENT, max_examples=25)
@PROGRAMS
def test_every_claim_of_the_analysis_holds(program: Program, grid, words, table) -> None:  # type: ignore[no-untyped-def]
    program.check_analysis((1, 1, 1), *words[0], table)


@pytest.mark.slow
@settings(PATIENT, max_examples=150)
@PROGRAMS
def test_many_integer_programs(program: Program, grid, words, table) -> None:  # type: ignore[no-untyped-def]
    program.check_analysis(grid, *words[0], table)
    for a, b, c in words:
        program.check(grid, a, b, c, table)


C_KERNELS = given(
    kernel=c_expressions.kernels(),
    block=st.sampled_from(((64, 1, 1), (40, 1, 1), (8, 8, 1), (16, 2, 2))),
    a=_word,
    b=_word,
    c=st.integers(0, 2**64 - 1),
    table=st.binary(min_size=4 * TABLE_WORDS, max_size=4 * TABLE_WORDS).map(
        lambda b: np.frombuffer(b, np.uint32).copy()
    ),
)


@settings(PATIENT, max_examples=12)
@C_KERNELS
def test_any_integer_expression_in_c_is_exact(kernel, block, a, b, c, table) -> None:  # type: ignore[no-untyped-def]
    kernel.check(block, a, b, c, table)


@pytest.mark.slow
@settings(PATIENT, max_examples=100)
@C_KERNELS
def test_many_integer_expressions_in_c(kernel, block, a, b, c, table) -> None:  # type: ignore[no-untyped-def]
    kernel.check(block, a, b, c, table)
