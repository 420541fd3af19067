"""Random integer programs in PTX, with what each thread must compute.

A program is a list of steps over three pools of registers (32, 64 and 16 bits) and one of predicates; some registers
are the same in all lanes, some differ by a constant of the lane, some have no pattern. It ends by storing every
register. All arithmetic is exact in `reference.evaluate`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cudaops.emulator.control import Flow, results
from cudaops.emulator.lanes import Geometry, LaneAnalysis, Lanes
from cudaops.emulator.ptx import parse
from tests.emulator import harness
from tests.emulator.reference import BITS, evaluate

TABLE_WORDS = 64
CONSTANTS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 24, 28, 31, 32, 33, 60, 63, 64, 100, 127, 128, 255, 256, 1000, 4095, 65535,
             65536, 0x7FFFFF, 0x1FFFFFFF, 0x3FFFFFFF, 0x40000000, 0x7FFFFFF0, 0x7FFFFFFF, 0x80000000, 0x80000001,
             0xFFFF0000, 0xFFFFFF00, 0xFFFFFF80, 0xFFFFFFE0, 0xFFFFFFF0, 0xFFFFFFF8, 0xFFFFFFFC, 0xFFFFFFFE, 0xFFFFFFFF)  # fmt: skip
SHIFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 24, 27, 28, 29, 30, 31, 32, 33, 63, 64, 70)
BLOCKS = (
    (32, 1, 1),
    (64, 1, 1),
    (128, 1, 1),
    (40, 1, 1),
    (8, 8, 1),
    (16, 4, 2),
    (4, 2, 8),
    (5, 7, 1),
    (64, 2, 1),
    (2, 3, 7),
    (1, 1, 40),
)

# Steps that keep what a value is across the lanes come up more often.
_PATTERNED = """
    add.s32 r r c; add.s32 r r r; sub.s32 r r r; mul.lo.s32 r r c; mad.lo.s32 r r c r; shl.b32 r r s; shr.u32 r r s
    shr.s32 r r s; and.b32 r r c; or.b32 r r c; or.b32 r r r; xor.b32 r r c; bfi.b32 r r r s s; bfe.u32 r r s s
    mul.wide.s32 q r c; mul.wide.u32 q r c; mad.wide.s32 q r c q; cvt.s64.s32 q r; cvt.u64.u32 q r; cvt.u32.u64 r q
    cvt.u16.u32 h r; cvt.s8.s32 r r; cvt.s32.s8 r r; cvt.u32.u16 r h; add.s64 q q q; shl.b64 q q s; shr.s64 q q s;
"""
# opcode, class of the result, classes of the operands: r 32 bits, q 64, h 16, p predicate, c constant, s shift count
STEPS = tuple(
    (text.split()[0], text.split()[1], tuple(text.split()[2:]))
    for text in (
        4 * _PATTERNED
        + """
    add.s32 r r r; add.s32 r r c; sub.s32 r r r; sub.s32 r c r; sub.s32 r r c; mul.lo.s32 r r c; mul.lo.s32 r r r
    mad.lo.s32 r r c r; mad.lo.s32 r r r r; mad.lo.s32 r c r c; neg.s32 r r; abs.s32 r r; not.b32 r r; mul.hi.u32 r r c
    mul.hi.s32 r r r; shl.b32 r r s; shl.b32 r r s; shl.b32 r r r; shr.u32 r r s; shr.s32 r r s; shr.u32 r r r
    shr.s32 r r r; and.b32 r r c; and.b32 r c r; and.b32 r r r; or.b32 r r c; or.b32 r r r; xor.b32 r r c; xor.b32 r r r
    bfe.u32 r r s s; bfe.s32 r r s s; bfe.u32 r r r s; bfi.b32 r r r s s; bfi.b32 r r c s s; bfi.b32 r r r r s
    min.s32 r r c; min.u32 r r c; max.s32 r r c; max.u32 r r c; min.s32 r r r; max.u32 r r r; min.u32 r r r
    div.u32 r r c; div.s32 r r c; div.u32 r r r; div.s32 r r r; rem.u32 r r c; rem.s32 r r c; rem.u32 r r r; rem.s32 r r r
    selp.b32 r r r p; selp.b32 r r c p; sad.u32 r r c r; prmt.b32 r r r c; shf.l.wrap.b32 r r r s; shf.r.clamp.b32 r r r s
    clz.b32 r r; popc.b32 r r; bfind.u32 r r; brev.b32 r r; mul24.lo.u32 r r c; cvt.u32.u64 r q; cvt.s32.s64 r q
    cvt.s32.s8 r r; cvt.u32.u8 r r; cvt.s32.s16 r h; cvt.u32.u16 r h; cvt.s8.s32 r r; cvt.u8.u32 r r; cvt.s8.s8 r r
    cvt.sat.u8.s32 r r; cvt.sat.s16.s32 r r; cvt.sat.u32.s32 r r; cvt.sat.s32.u32 r r; mul.wide.u16 r h c; mul.wide.s16 r h h
    mul.wide.s32 q r c; mul.wide.u32 q r c; mul.wide.s32 q r r; mul.wide.u32 q r r; mad.wide.s32 q r c q
    mad.wide.u32 q r c q; cvt.u64.u32 q r; cvt.s64.s32 q r; cvt.s64.s8 q r; cvt.u64.u16 q h; cvt.s64.s16 q h
    add.s64 q q q; add.s64 q q c; sub.s64 q q q; mul.lo.s64 q q c; mad.lo.s64 q q c q; shl.b64 q q s; shr.u64 q q s
    shr.s64 q q s; and.b64 q q c; or.b64 q q q; or.b64 q q c; xor.b64 q q c; bfi.b64 q q q s s; bfe.u64 q q s s
    bfe.s64 q q s s; min.s64 q q c; max.u64 q q q; neg.s64 q q; div.u64 q q c; div.s64 q q c; rem.s64 q q q
    selp.b64 q q q p; cvt.u16.u32 h r; cvt.u16.u64 h q; cvt.s16.s8 h r; cvt.u16.u8 h h; add.s16 h h c; sub.s16 h h h
    mul.lo.s16 h h c; mad.lo.u16 h h c h; shl.b16 h h s; shr.u16 h h s; shr.s16 h h s; and.b16 h h c; or.b16 h h h
    min.s16 h h h; max.u16 h h c; div.s16 h h c; rem.u16 h h h; neg.s16 h h; selp.b16 h h h p
    setp.lt.s32 p r c; setp.ge.s32 p r r; setp.lo.u32 p r c; setp.eq.s32 p r r; setp.ne.s32 p r c; setp.gt.u32 p r r
    setp.lt.s64 p q c; setp.hi.u64 p q q; setp.le.s16 p h c; and.pred p p p; xor.pred p p p; not.pred p p
    """
    )
    .replace("\n", ";")
    .split(";")
    if text.strip()
)
# Several steps as one; '.' is the result of the step before.
COMPOUNDS = tuple(
    tuple((part.split()[0], part.split()[1], tuple(part.split()[2:])) for part in text.split("+"))
    for text in """
    shl.b32 r r s + shr.s32 r . s; shl.b32 r r s + shr.u32 r . s; shl.b32 r r s + or.b32 r . r; neg.s32 r r + mul.wide.s32 q . c
    mul.lo.s32 r r c + shr.s32 r . s + and.b32 r . c; cvt.s64.s32 q r + shl.b64 q . s + shr.s64 q . s; add.s32 r r c + mul.wide.s32 q . c
    and.b32 r r c + shl.b32 r . s + or.b32 r . r; shl.b32 r r s + bfe.s32 r . s s; bfi.b32 r r r s s + bfe.u32 r . s s
    sub.s32 r c r + mul.wide.u32 q . c; mul.lo.s32 r r c + xor.b32 r . c + cvt.s64.s32 q .; cvt.u64.u32 q r + sub.s64 q . q
    add.s32 r r c + cvt.s8.s32 r .; mul.lo.s32 r r c + cvt.u16.u32 h . + cvt.u32.u16 r .; shr.u32 r r s + bfi.b32 r r . s s
    """.replace("\n", ";").split(";")
    if text.strip()
)
REGISTER = {"r": "b32", "q": "b64", "h": "b16", "p": "pred"}
# How a look-up in the table gets its index from a 32-bit register.
INDEX = (
    "and.b32 {t}, {r}, 63",
    "shr.u32 {t}, {r}, 26",
    "bfe.u32 {t}, {r}, 5, 6",
    "rem.u32 {t}, {r}, 64",
    "min.u32 {t}, {r}, 63",
)


Log = dict[int, dict[tuple[int, ...], int]]  # action -> the values it gave, by the turns of the loops it is in


@dataclass(frozen=True)
class Step:
    """opcode of STEPS or 'look up' or 'loop' / 'end'; numbers that choose operands, whatever is in the pools."""

    opcode: str
    result: str
    operands: tuple[str, ...]
    choices: tuple[int, ...]


@dataclass(frozen=True)
class _Loop:
    """An open loop: counted up or down, tested where it begins or ends, its limit a number or a register."""

    label: str
    own: tuple[str, ...]  # registers that its body must not change
    step: int
    test: str
    bottom: bool

    @classmethod
    def open(cls, n: int, form: int, begin: int, turns: int, source: int, pools: dict[str, list[str]], fresh: Any, assign: Any, mark: Any) -> _Loop:  # fmt: skip
        step = (1, 1, 2, 4, 32, -1, -3)[form % 7]
        test = (
            "setp.ne.s32",
            "setp.lt.s32" if step > 0 else "setp.gt.s32",
            "setp.lo.u32" if step > 0 else "setp.hi.u32",
        )[form // 7 % 3]
        start = (0, 0, 1, 5, 64, 0x7FFFFFF8, 0xFFFFFFF8, 0x80000000)[begin % 8]
        counter, limit, predicate = fresh("r"), fresh("r"), fresh("p")
        assign("r", "mov.u32", start, into=counter)
        bottom = form // 21 % 2 == 1
        if begin // 8 % 2:  # a limit that depends on a register
            assign("r", "and.b32", pools["r"][source % len(pools["r"])], turns % 4, into=limit)
            assign("r", "mad.lo.s32", limit, step & 0xFFFFFFFF, (start + bottom * step) & 0xFFFFFFFF, into=limit)
        else:
            assign("r", "mov.u32", (start + step * (turns % 5 + bottom)) & 0xFFFFFFFF, into=limit)
        mark("label", f"L{n:04d}")
        if not bottom:
            assign("p", test, counter, limit, into=predicate)
            mark("branch", f"E{n:04d}", predicate, True)
        pools["r"] += [counter, counter]
        return cls(f"{n:04d}", (counter, limit, predicate), step, test, bottom)

    def close(self, assign: Any, mark: Any) -> None:
        counter, limit, predicate = self.own
        assign("r", "add.s32", counter, self.step & 0xFFFFFFFF, into=counter)
        if self.bottom:
            assign("p", self.test, counter, limit, into=predicate)
            mark("branch", f"L{self.label}", predicate, False)
        else:
            mark("branch", f"L{self.label}", "", False)
        mark("label", f"E{self.label}")


@dataclass
class Program:
    text: str
    actions: list[tuple[object, ...]]
    registers: list[tuple[str, str]]  # (name, class) in the order they are stored
    block: tuple[int, int, int]
    kernel: harness.Kernel = field(init=False)

    def __post_init__(self) -> None:
        self.kernel = harness.ptx(
            self.text, ".param .u64 out, .param .u64 table, .param .u32 a, .param .u32 b, .param .u64 c", module=""
        )

    def check(self, grid: tuple[int, int, int], a: int, b: int, c: int, table: np.ndarray) -> None:
        x, y, z = self.block
        threads = x * y * z * grid[0] * grid[1] * grid[2]
        out = np.zeros((len(self.registers), threads), dtype=np.uint64)
        harness.run(self.kernel, grid, self.block, out, table, a, b, c)
        words = [int(w) for w in table]
        for thread in range(threads):
            ids = _ids(thread, self.block, grid)
            values = _interpret(self.actions, ids, a, b, c, words)
            for n, (name, _) in enumerate(self.registers):
                got, expected = int(out[n, thread]), values[name]
                assert got == expected, (
                    f"%{name} of thread {ids} is {got:#x}, not {expected:#x}; grid {grid}, block {self.block}, "
                    f"a {a:#x} b {b:#x} c {c:#x}\n{self.text}"
                )

    def check_analysis(self, grid: tuple[int, int, int], a: int, b: int, c: int, table: np.ndarray) -> None:
        """Every value is what the lane analysis says of its instruction: S + L, S in its interval, its low bits zero."""
        function = parse(self.kernel.ptx).functions["k"]
        flow = Flow(function)
        shared = {v.name: 0 for v in function.variables}
        analysis = LaneAnalysis(flow, Geometry(self.block, True), shared, 0, frozenset())
        claims: dict[int, Lanes] = {}
        for block in flow.reachable:
            for ins in flow.blocks[block].instructions:
                action = self.actions[ins.line - 1] if 0 < ins.line <= len(self.actions) else ()
                name = action[1] if action[:1] == ("set",) else "w2" if action[:1] == ("final",) else ""
                if any(r.name == f"%{name}" for r in results(ins)):
                    claims[ins.line - 1] = analysis.transfers[id(ins)]
        x, y, z = self.block
        threads = x * y * z
        words = [int(w) for w in table]
        for outside in range(grid[0] * grid[1] * grid[2]):
            for first in range(0, threads, 32):
                logs: list[Log] = []
                for inside in range(first, min(first + 32, threads)):
                    logs.append({})
                    _interpret(
                        self.actions, _ids(outside * threads + inside, self.block, grid), a, b, c, words, logs[-1]
                    )
                for n, lanes in claims.items():
                    self._check_claim(n, lanes, [log.get(n, {}) for log in logs])

    def _check_claim(self, n: int, lanes: Lanes, values: list[dict[tuple[int, ...], int]]) -> None:
        """`values`: of each lane, one for each turn in which it ran the action."""
        bits = BITS[REGISTER[str(self.actions[n][2])]]
        for turn in set().union(*values):
            now = {lane: v[turn] for lane, v in enumerate(values) if turn in v}
            scalars = {(v - (lanes.offsets[lane] if lanes.offsets else 0)) % (1 << bits) for lane, v in now.items()}
            say = f"action {n} {self.actions[n]}, turn {turn}: {now} is not {lanes}\n{self.text}"
            assert lanes.varying or len(scalars) == 1, say
            if bits > 1 and lanes.low is not None and lanes.high is not None:
                assert all((s - lanes.low) % (1 << bits) <= lanes.high - lanes.low for s in scalars), say
            if bits > 1 and not lanes.varying:
                assert all(s % (1 << min(lanes.zeros, bits)) == 0 for s in scalars), say


def _ids(thread: int, block: tuple[int, int, int], grid: tuple[int, int, int]) -> dict[str, int]:
    x, y, z = block
    inside, outside = thread % (x * y * z), thread // (x * y * z)
    return {
        "%tid.x": inside % x, "%tid.y": inside // x % y, "%tid.z": inside // (x * y), "%laneid": inside % 32,
        "%ctaid.x": outside % grid[0], "%ctaid.y": outside // grid[0] % grid[1], "%ctaid.z": outside // (grid[0] * grid[1]),
        "%ntid.x": x, "%nctaid.x": grid[0], "%ntid.y": y,
    }  # fmt: skip


def build(steps: Sequence[Step], block: tuple[int, int, int]) -> Program:
    """PTX text and the same thing as actions to interpret."""
    lines: list[str] = []
    actions: list[tuple[object, ...]] = []
    pools: dict[str, list[str]] = {"r": [], "q": [], "h": [], "p": []}
    count = {"r": 0, "q": 0, "h": 0, "p": 0}
    depth: list[_Loop] = []

    def fresh(kind: str) -> str:
        count[kind] += 1
        return f"{kind}{count[kind]}"

    def mark(kind: str, *what: object) -> None:
        """A label, or a branch (label, predicate, negated) to one."""
        if kind == "label":
            lines.append(f"{what[0]}:")
        else:
            label, predicate, negated = what
            lines.append(f"@{'!' if negated else ''}%{predicate} bra {label};" if predicate else f"bra {label};")
        actions.append((kind, *what))

    def assign(kind: str, opcode: str, *operands: object, into: str | None = None) -> str:
        name = into or fresh(kind)
        lines.append(f".loc 1 {len(actions) + 1} 0")
        lines.append(f"{opcode} %{name}, {', '.join(_shown(o) for o in operands)};")
        actions.append(("set", name, kind, opcode, operands))
        if into is None and not depth:  # what a loop defines is not defined if it runs zero times
            pools[kind].append(name)
        return name

    def close() -> None:
        loop = depth.pop()
        loop.close(assign, mark)
        if depth:  # the loop around it may run zero times
            pools["r"] = [name for name in pools["r"] if name not in loop.own]

    def target(kind: str, choices: Iterator[int]) -> str | None:
        """Inside a loop, a register that is there already."""
        if not depth:
            return None
        options = [n for n in pools[kind] if n not in {name for loop in depth for name in loop.own}]
        return options[next(choices) % len(options)]

    def operand(kind: str, opcode: str, choice: int) -> str | int:
        if kind == "c":
            return _constant(CONSTANTS[choice % len(CONSTANTS)], opcode, bool(choice >> 8 & 1))
        return SHIFTS[choice % len(SHIFTS)] if kind == "s" else _chosen(pools[kind], choice)

    def look_up(choices: Iterator[int]) -> None:
        into = target("r", choices)
        index = INDEX[next(choices) % len(INDEX)]
        source = _chosen(pools["r"], next(choices))
        space = ("global", "shared")[next(choices) % 2]
        t, q = fresh("r"), fresh("q")
        opcode, rest = index.format(t="t", r="r").split(" ", 1)
        lines.append(f".loc 1 {len(actions) + 1} 0")
        lines.append(index.format(t=f"%{t}", r=f"%{source}") + ";")
        actions.append(("set", t, "r", opcode, (source, *(int(o) for o in rest.split(", ")[2:]))))
        name = into or fresh("r")
        lines.append(f"mul.wide.u32 %{q}, %{t}, 4; add.s64 %{q}, %{'table' if space == 'global' else 'words'}, %{q};")
        lines.append(f"ld.{space}.u32 %{name}, [%{q}];")
        actions.append(("table", name, t))
        if into is None:
            pools["r"].append(name)

    for special in ("%tid.x", "%tid.y", "%tid.z", "%laneid", "%ctaid.x", "%ctaid.y", "%ntid.x"):
        assign("r", "mov.u32", special)
    for name in ("a", "b"):
        lines.append(f"ld.param.u32 %{fresh('r')}, [{name}];")
        actions.append(("param", f"r{count['r']}", name))
        pools["r"].append(f"r{count['r']}")
    lines.append(f"ld.param.u64 %{fresh('q')}, [c];")
    actions.append(("param", "q1", "c"))
    pools["q"].append("q1")
    assign("r", "mad.lo.s32", pools["r"][4], pools["r"][6], pools["r"][0])  # the global index
    assign("q", "cvt.s64.s32", pools["r"][-1])
    assign("h", "cvt.u16.u32", pools["r"][0])
    assign("p", "setp.lt.s32", pools["r"][0], 17)
    lines.append(f"ld.global.u8 %{fresh('r')}, [%table+7];")
    actions.append(("byte", f"r{count['r']}", 7))
    pools["r"].append(f"r{count['r']}")

    for step in steps:
        choices = iter(step.choices)
        if step.opcode == "loop":
            if len(depth) < 2:
                depth.append(
                    _Loop.open(
                        len(lines),
                        next(choices),
                        next(choices),
                        next(choices),
                        next(choices),
                        pools,
                        fresh,
                        assign,
                        mark,
                    )
                )
            continue
        if step.opcode == "end":
            if depth:
                close()
            continue
        if step.opcode == "look up":
            look_up(choices)
            continue
        before = None
        for opcode, result, kinds in (
            COMPOUNDS[next(choices) % len(COMPOUNDS)]
            if step.opcode == "compound"
            else [(step.opcode, step.result, step.operands)]
        ):
            operands = [before if kind == "." else operand(kind, opcode, next(choices)) for kind in kinds]
            before = assign(result, opcode, *operands, into=target(result, choices))
    while depth:
        close()
    stored = [(n, kind) for kind in ("r", "q", "h", "p") for n in pools[kind]]
    first = len(actions)
    actions += [("final", name, "q") for name, _ in stored]
    return Program(_whole(lines, count, stored, block, first), actions, stored, block)


def _chosen(pool: list[str], choice: int) -> str:
    """A register that the program began with (their lanes have a pattern), one of the newest, or any."""
    how, which = choice % 8, choice // 8
    if how < 3:
        return pool[which % min(len(pool), 11)]
    return pool[-1 - which % min(len(pool), 3)] if how < 7 else pool[which % len(pool)]


def _constant(value: int, opcode: str, minus: bool) -> int:
    """As an operand of the instruction's type: negative where a signed type needs it, or (`minus`) may have it."""
    if opcode.startswith(
        ("sub.s64", "add.s64", "mul.lo.s64", "mad.lo.s64", "min.s64", "div.s64", "setp.lt.s64", "and.b64")
    ):
        return value - (1 << 32) if value >> 31 else value
    if opcode.split(".")[-1][1:] == "16":
        return value & 0x7FFF
    return value - (1 << 32) if minus and value >> 31 and opcode.endswith("32") else value


def _shown(operand: object) -> str:
    return str(operand) if isinstance(operand, int) or str(operand).startswith("%") else f"%{operand}"


def _whole(
    lines: list[str], count: dict[str, int], stored: list[tuple[str, str]], block: tuple[int, int, int], first: int
) -> str:
    threads = block[0] * block[1] * block[2]
    text = [f".reg .{REGISTER[kind]} %{kind}<{count[kind] + 1}>;" for kind in count] + [
        ".reg .b64 %table, %words, %out, %w<4>; .reg .b32 %i<9>; .reg .b16 %j;",
        f".shared .align 16 .b8 sh[{4 * TABLE_WORDS}];",
        "ld.param.u64 %table, [table]; ld.param.u64 %out, [out];",
        "cvta.to.global.u64 %table, %table; cvta.to.global.u64 %out, %out;",
        "mov.u64 %words, sh;",
        # the linear thread number, and the table copied to shared memory
        "mov.u32 %i0, %tid.x; mov.u32 %i1, %tid.y; mov.u32 %i2, %tid.z; mov.u32 %i3, %ntid.x; mov.u32 %i4, %ntid.y;",
        "mad.lo.s32 %i5, %i2, %i4, %i1; mad.lo.s32 %i5, %i5, %i3, %i0;",
    ]
    for start in range(0, TABLE_WORDS, threads):
        text.append(f"add.s32 %i6, %i5, {start}; and.b32 %i6, %i6, {TABLE_WORDS - 1}; mul.wide.u32 %w0, %i6, 4;")
        text.append(
            "add.s64 %w1, %table, %w0; ld.global.u32 %i7, [%w1]; add.s64 %w1, %words, %w0; st.shared.u32 [%w1], %i7;"
        )
    text.append("bar.sync 0;")
    text += lines
    text += [
        "mov.u32 %i0, %ctaid.z; mov.u32 %i1, %nctaid.y; mov.u32 %i2, %ctaid.y; mad.lo.s32 %i0, %i0, %i1, %i2;",
        "mov.u32 %i1, %nctaid.x; mov.u32 %i2, %ctaid.x; mad.lo.s32 %i0, %i0, %i1, %i2;",
        f"mad.lo.s32 %i0, %i0, {threads}, %i5;",
        "mov.u32 %i1, %nctaid.y; mov.u32 %i2, %nctaid.x; mul.lo.s32 %i1, %i1, %i2; mov.u32 %i2, %nctaid.z; mul.lo.s32 %i1, %i1, %i2;",
        f"mul.lo.s32 %i1, %i1, {threads};",
        "mul.wide.u32 %w0, %i0, 8; add.s64 %w0, %out, %w0; mul.wide.u32 %w1, %i1, 8;",
    ]
    for n, (name, kind) in enumerate(stored):
        text.append(f".loc 1 {first + n + 1} 0")
        wide = {"q": f"mov.b64 %w2, %{name};", "r": f"cvt.u64.u32 %w2, %{name};", "h": f"cvt.u64.u16 %w2, %{name};",
                "p": f"selp.b64 %w2, 1, 0, %{name};"}[kind]  # fmt: skip
        text.append(f"{wide} st.global.u64 [%w0], %w2; add.s64 %w0, %w0, %w1;")
    text.append("ret;")
    return "\n".join(text)


def _interpret(
    actions: list[tuple[object, ...]],
    ids: dict[str, int],
    a: int,
    b: int,
    c: int,
    table: list[int],
    log: Log | None = None,
) -> dict[str, int]:
    values: dict[str, int] = {}
    given = {"a": a & 0xFFFFFFFF, "b": b & 0xFFFFFFFF, "c": c & (2**64 - 1)}
    labels = {action[1]: n for n, action in enumerate(actions) if action[0] == "label"}
    turns = {str(action[1])[1:]: 0 for action in actions if action[0] == "label"}
    n = 0
    while n < len(actions):
        match actions[n]:
            case ("set", str(name), str(kind), str(opcode), tuple(operands)):
                bits = [_value(o, values, ids) for o in operands]
                values[name] = _into(kind, opcode, evaluate(opcode, *_cut(opcode, bits, operands)))
                if log is not None:
                    log.setdefault(n, {})[tuple(turns.values())] = values[name]
            case ("label", str(label)):
                # A loop's next turn, or its end, begins the turns of what follows anew.
                turns[label[1:]] = turns[label[1:]] + 1 if label[0] == "L" else 0
                for later in [other for other in turns if other > label[1:]]:
                    turns[later] = 0
            case ("param", str(name), str(which)):
                values[name] = given[which]
            case ("final", str(name), str(_)):
                if log is not None:
                    log.setdefault(n, {})[()] = values[name]
            case ("byte", str(name), int(place)):
                values[name] = table[place // 4] >> 8 * (place % 4) & 255
            case ("table", str(name), str(index)):
                values[name] = table[values[index]]
            case ("branch", str(label), str(predicate), bool(negated)):
                if not predicate or bool(values[predicate]) != negated:
                    n = labels[label] - 1
        n += 1
    return values


def _value(operand: object, values: dict[str, int], ids: dict[str, int]) -> int:
    if isinstance(operand, int):
        return operand & (2**64 - 1)
    return ids[str(operand)] if str(operand).startswith("%") else values[str(operand)]


def _cut(opcode: str, bits: list[int], operands: Sequence[object]) -> list[int]:
    """Literals have the width of the operand they stand for."""
    parts = opcode.split(".")
    width = BITS[parts[-1]]
    wide = [64] * len(bits)
    for n, operand in enumerate(operands):
        if isinstance(operand, int):
            wide[n] = 32 if parts[0] in ("shl", "shr", "bfe", "bfi", "shf") and n else width
            if parts[0] == "bfi" and n < 2:
                wide[n] = width
    return [b & ((1 << w) - 1) for b, w in zip(bits, wide, strict=True)]


def _into(kind: str, opcode: str, value: int) -> int:
    """A narrow result of cvt fills the register by its sign."""
    type_ = opcode.split(".")[-2] if opcode.startswith("cvt") else "u64"
    width = {"r": 32, "q": 64, "h": 16, "p": 1}[kind]
    if type_[0] == "s" and BITS[type_] < width and value >> (BITS[type_] - 1):
        value -= 1 << BITS[type_]
    return value & ((1 << width) - 1)


def random_steps(seed: int, count: int) -> list[Step]:
    """Steps of a program, for runs without hypothesis."""
    source = random.Random(seed)
    steps = []
    for _ in range(count):
        kind = source.random()
        choices = tuple(source.randrange(1 << 16) for _ in range(6))
        if kind < 0.08:
            steps.append(Step("look up", "r", (), choices))
        elif kind < 0.11:
            steps.append(Step("loop", "r", (), choices))
        elif kind < 0.16:
            steps.append(Step("end", "r", (), choices))
        elif kind < 0.4:
            steps.append(Step("compound", "r", (), tuple(source.randrange(1 << 16) for _ in range(16))))
        else:
            opcode, result, operands = source.choice(STEPS)
            steps.append(Step(opcode, result, operands, choices))
    return steps
