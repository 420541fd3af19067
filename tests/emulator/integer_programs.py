"""Random integer programs in PTX, with what each thread must compute.

A program is a list of steps over three pools of registers (32, 64 and 16 bits) and one of predicates. It ends by
storing every register. All arithmetic is exact in `reference.evaluate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cudaops.emulator.control import Flow, results
from cudaops.emulator.lanes import Geometry, LaneAnalysis, Lanes
from cudaops.emulator.ptx import parse
from tests.emulator import harness
from tests.emulator.integer_steps import COMPOUNDS, CONSTANTS, INDEX, REGISTER, SHIFTS, TABLE_WORDS, Step
from tests.emulator.reference import BITS, evaluate

Log = dict[int, dict[tuple[int, ...], int]]  # action -> the values it gave, by the turns of the loops it is in
PARAMETERS = ".param .u64 out, .param .u64 table, .param .u32 a, .param .u32 b, .param .u64 c"
MASK32 = 0xFFFFFFFF


@dataclass
class Program:
    text: str
    actions: list[tuple[object, ...]]  # the same as text, one a line of the source: see `_interpret`
    registers: list[tuple[str, str]]  # (name, class) in the order they are stored
    block: tuple[int, int, int]
    kernel: harness.Kernel = field(init=False)

    def __post_init__(self) -> None:
        self.kernel = harness.ptx(self.text, PARAMETERS)

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


@dataclass(frozen=True)
class _Loop:
    """An open loop: counted up or down, tested where it begins or ends, its limit a number or a register."""

    label: str
    own: tuple[str, str, str]  # counter, limit and predicate: its body must not change them
    step: int
    test: str
    bottom: bool


class _Builder:
    """Writes a program twice: as PTX, and as actions to interpret. Line n of the source is action n - 1."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.actions: list[tuple[object, ...]] = []
        self.pools: dict[str, list[str]] = {kind: [] for kind in REGISTER}
        self.count = dict.fromkeys(REGISTER, 0)
        self.loops: list[_Loop] = []

    def fresh(self, kind: str) -> str:
        self.count[kind] += 1
        return f"{kind}{self.count[kind]}"

    def pooled(self, kind: str) -> str:
        self.pools[kind].append(self.fresh(kind))
        return self.pools[kind][-1]

    def assign(self, kind: str, opcode: str, *operands: object, into: str | None = None) -> str:
        name = into or self.fresh(kind)
        self.lines.append(f".loc 1 {len(self.actions) + 1} 0")
        self.lines.append(f"{opcode} %{name}, {', '.join(_shown(o) for o in operands)};")
        self.actions.append(("set", name, kind, opcode, operands))
        if into is None and not self.loops:  # what a loop defines is not defined if it runs zero times
            self.pools[kind].append(name)
        return name

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.actions.append(("label", name))

    def branch(self, label: str, predicate: str = "", negated: bool = False) -> None:
        self.lines.append(f"@{'!' if negated else ''}%{predicate} bra {label};" if predicate else f"bra {label};")
        self.actions.append(("branch", label, predicate, negated))

    def begin(self) -> None:
        """Registers that are the same in all lanes, differ by a constant of the lane, or have no pattern."""
        for special in ("%tid.x", "%tid.y", "%tid.z", "%laneid", "%ctaid.x", "%ctaid.y", "%ntid.x"):
            self.assign("r", "mov.u32", special)
        for name, kind, type_ in (("a", "r", "u32"), ("b", "r", "u32"), ("c", "q", "u64")):
            register = self.pooled(kind)
            self.lines.append(f"ld.param.{type_} %{register}, [{name}];")
            self.actions.append(("param", register, name))
        r = self.pools["r"]
        self.assign("r", "mad.lo.s32", r[4], r[6], r[0])  # the global index
        self.assign("q", "cvt.s64.s32", r[-1])
        self.assign("h", "cvt.u16.u32", r[0])
        self.assign("p", "setp.lt.s32", r[0], 17)
        register = self.pooled("r")
        self.lines.append(f"ld.global.u8 %{register}, [%table+7];")
        self.actions.append(("byte", register, 7))

    def add(self, step: Step) -> None:
        choices = iter(step.choices)
        if step.opcode == "loop":
            if len(self.loops) < 2:
                self.open_loop(*itertools.islice(choices, 4))
        elif step.opcode == "end":
            if self.loops:
                self.close_loop()
        elif step.opcode == "look up":
            self.look_up(choices)
        else:
            one = ((step.opcode, step.result, step.operands),)
            before = ""
            for opcode, result, kinds in (
                COMPOUNDS[next(choices) % len(COMPOUNDS)] if step.opcode == "compound" else one
            ):
                operands = [before if kind == "." else self.operand(kind, opcode, next(choices)) for kind in kinds]
                before = self.assign(result, opcode, *operands, into=self.target(result, choices))

    def open_loop(self, form: int, begin: int, turns: int, source: int) -> None:
        step = (1, 1, 2, 4, 32, -1, -3)[form % 7]
        up, bottom = step > 0, form // 21 % 2 == 1
        test = ("setp.ne.s32", "setp.lt.s32" if up else "setp.gt.s32", "setp.lo.u32" if up else "setp.hi.u32")[
            form // 7 % 3
        ]
        start = (0, 0, 1, 5, 64, 0x7FFFFFF8, 0xFFFFFFF8, 0x80000000)[begin % 8]
        counter, limit, predicate = own = self.fresh("r"), self.fresh("r"), self.fresh("p")
        loop = _Loop(f"{len(self.lines):04d}", own, step, test, bottom)
        self.assign("r", "mov.u32", start, into=counter)
        if begin // 8 % 2:  # a limit that depends on a register
            self.assign("r", "and.b32", self.pools["r"][source % len(self.pools["r"])], turns % 4, into=limit)
            self.assign("r", "mad.lo.s32", limit, step & MASK32, (start + bottom * step) & MASK32, into=limit)
        else:
            self.assign("r", "mov.u32", (start + step * (turns % 5 + bottom)) & MASK32, into=limit)
        self.label(f"L{loop.label}")
        if not bottom:
            self.assign("p", test, counter, limit, into=predicate)
            self.branch(f"E{loop.label}", predicate, negated=True)
        self.pools["r"] += [counter, counter]
        self.loops.append(loop)

    def close_loop(self) -> None:
        loop = self.loops.pop()
        counter, limit, predicate = loop.own
        self.assign("r", "add.s32", counter, loop.step & MASK32, into=counter)
        if loop.bottom:
            self.assign("p", loop.test, counter, limit, into=predicate)
        self.branch(f"L{loop.label}", predicate if loop.bottom else "")
        self.label(f"E{loop.label}")
        if self.loops:  # the loop around it may run zero times
            self.pools["r"] = [name for name in self.pools["r"] if name not in loop.own]

    def target(self, kind: str, choices: Iterator[int]) -> str | None:
        """Inside a loop, a register that is there already."""
        if not self.loops:
            return None
        kept = {name for loop in self.loops for name in loop.own}
        options = [name for name in self.pools[kind] if name not in kept]
        return options[next(choices) % len(options)]

    def operand(self, kind: str, opcode: str, choice: int) -> str | int:
        if kind == "c":
            return _constant(CONSTANTS[choice % len(CONSTANTS)], opcode, bool(choice >> 8 & 1))
        return SHIFTS[choice % len(SHIFTS)] if kind == "s" else _chosen(self.pools[kind], choice)

    def look_up(self, choices: Iterator[int]) -> None:
        """A word of the table, in global or shared memory, by an index made of a register."""
        into = self.target("r", choices)
        opcode, *numbers = INDEX[next(choices) % len(INDEX)]
        source = _chosen(self.pools["r"], next(choices))
        base = ("table", "words")[next(choices) % 2]
        index = self.assign("r", str(opcode), source, *numbers, into=self.fresh("r"))
        address, name = self.fresh("q"), into or self.pooled("r")
        self.lines.append(f"mul.wide.u32 %{address}, %{index}, 4; add.s64 %{address}, %{base}, %{address};")
        self.lines.append(f"ld.{'global' if base == 'table' else 'shared'}.u32 %{name}, [%{address}];")
        self.actions.append(("table", name, index))


def build(steps: Sequence[Step], block: tuple[int, int, int]) -> Program:
    builder = _Builder()
    builder.begin()
    for step in steps:
        builder.add(step)
    while builder.loops:
        builder.close_loop()
    stored = [(name, kind) for kind in REGISTER for name in builder.pools[kind]]
    text = _whole(builder, stored, block)
    return Program(text, [*builder.actions, *(("final", name, "q") for name, _ in stored)], stored, block)


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


def _whole(builder: _Builder, stored: list[tuple[str, str]], block: tuple[int, int, int]) -> str:
    threads = block[0] * block[1] * block[2]
    text = [f".reg .{type_} %{kind}<{builder.count[kind] + 1}>;" for kind, type_ in REGISTER.items()] + [
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
    text += builder.lines
    text += [
        "mov.u32 %i0, %ctaid.z; mov.u32 %i1, %nctaid.y; mov.u32 %i2, %ctaid.y; mad.lo.s32 %i0, %i0, %i1, %i2;",
        "mov.u32 %i1, %nctaid.x; mov.u32 %i2, %ctaid.x; mad.lo.s32 %i0, %i0, %i1, %i2;",
        f"mad.lo.s32 %i0, %i0, {threads}, %i5;",
        "mov.u32 %i1, %nctaid.y; mov.u32 %i2, %nctaid.x; mul.lo.s32 %i1, %i1, %i2; mov.u32 %i2, %nctaid.z; mul.lo.s32 %i1, %i1, %i2;",
        f"mul.lo.s32 %i1, %i1, {threads};",
        "mul.wide.u32 %w0, %i0, 8; add.s64 %w0, %out, %w0; mul.wide.u32 %w1, %i1, 8;",
    ]
    for n, (name, kind) in enumerate(stored):
        text.append(f".loc 1 {len(builder.actions) + n + 1} 0")
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
