"""What each value is across the 32 lanes of a warp: uniform, affine, or varying.

A value is S + L[lane] modulo 2^width, with S one scalar for the warp and L a constant of the code generator; L is all
zero for a uniform value and None for a varying one. For S (for the value itself when it varies) an interval and the
number of trailing zero bits are kept: they prove that widening does not wrap, that S and L share no bit, and that an
address stays inside shared memory. Wherever a rule below gives an L, the scalar S of the result is the same
instruction applied to the scalars of the operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cudaops.emulator.bounds import Counters, narrowed, widened
from cudaops.emulator.control import Flow, members_of, results, sources
from cudaops.emulator.ptx import TYPE_BITS, Imm, Instruction, Mem, Operand, Pair, Reg, Special, Sym

WARP = 32
ZERO = (0,) * WARP
LANE = tuple(range(WARP))


@dataclass(frozen=True, slots=True)
class Lanes:
    offsets: tuple[int, ...] | None  # L, or None: varying
    low: int | None = None  # interval of S (of the value, if varying); None: unknown
    high: int | None = None
    zeros: int = 0  # trailing zero bits of S

    @property
    def uniform(self) -> bool:
        return self.offsets == ZERO

    @property
    def varying(self) -> bool:
        return self.offsets is None

    @property
    def constant(self) -> bool:
        return self.offsets is not None and self.low is not None and self.low == self.high

    @property
    def interval(self) -> tuple[int, int] | None:
        """The interval of S."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def span(self) -> tuple[int, int] | None:
        """The interval of the value over all lanes."""
        if self.low is None or self.high is None:
            return None
        if self.offsets is None:
            return self.low, self.high
        return self.low + min(self.offsets), self.high + max(self.offsets)

    @property
    def disjoint(self) -> bool:
        """S and every L share no bit, so that bitwise operations act on each alone."""
        return self.offsets is not None and min(self.offsets) >= 0 and max(self.offsets) < 1 << self.zeros


VARYING = Lanes(None)
UNIFORM = Lanes(ZERO)


def _trailing_zeros(value: int) -> int:
    return 64 if value == 0 else (value & -value).bit_length() - 1


def constant(value: int) -> Lanes:
    return Lanes(ZERO, value, value, _trailing_zeros(value))


def uniform(low: int | None, high: int | None, zeros: int = 0) -> Lanes:
    return constant(low) if low is not None and low == high else Lanes(ZERO, low, high, zeros)


def join(a: Lanes | None, b: Lanes) -> Lanes:
    if a is None or a == b:
        return b
    if a.offsets is not None and a.offsets == b.offsets:
        low, high = _union((a.low, a.high), (b.low, b.high))
        return Lanes(a.offsets, low, high, min(a.zeros, b.zeros))
    low, high = _union(a.span or (None, None), b.span or (None, None))
    return Lanes(None, low, high)


def _union(a: tuple[int | None, int | None], b: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    if a[0] is None or b[0] is None or a[1] is None or b[1] is None:
        return None, None
    return min(a[0], b[0]), max(a[1], b[1])


@dataclass(frozen=True)
class Geometry:
    """What the code is specialised for: the block's shape, and how large the grid may be."""

    block: tuple[int, int, int]
    small_grid: bool  # grid.x <= 65 536, as grid.y and grid.z always are

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def warps(self) -> int:
        return -(-self.threads // WARP)

    def tid(self, axis: int) -> Lanes:
        """threadIdx.x / y / z as lanes; varying where the block's shape does not repeat by warps."""
        x, y, z = self.block
        extent = self.block[axis]
        if extent == 1:
            return constant(0)
        if y == z == 1 or x % WARP == 0:
            if axis == 0:
                top = extent - WARP if extent % WARP == 0 else (self.warps - 1) * WARP
                return Lanes(LANE, 0, top, 5 if top else 64)
            return uniform(0, extent - 1)
        if WARP % x == 0:
            rows = WARP // x
            if axis == 0:
                return Lanes(tuple(lane % x for lane in LANE), 0, 0, 64)
            row = tuple(lane // x for lane in LANE)
            if y % rows == 0:
                if axis == 1:
                    return Lanes(row, 0, y - rows, (rows & -rows).bit_length() - 1)
                return uniform(0, extent - 1)
            if rows % y == 0:
                if axis == 1:
                    return Lanes(tuple(r % y for r in row), 0, 0, 64)
                step = rows // y
                top = (self.warps - 1) * step
                return Lanes(tuple(r // y for r in row), 0, top, (step & -step).bit_length() - 1)
        return Lanes(None, 0, extent - 1)


@dataclass(slots=True)
class _Step:
    """An instruction in the fixed point: it is looked at again only when something it reads has changed."""

    instruction: Instruction
    written: tuple[Reg, ...]
    reads: tuple[str, ...]
    memory: tuple[Mem, ...]
    counters: bool  # reads or writes one that is followed block by block
    seen: int = -1


class LaneAnalysis:
    """Lanes of every register, the divergent branches, and the masked blocks of one function."""

    def __init__(
        self, flow: Flow, geometry: Geometry, symbols: Mapping[str, int], local_bytes: int, local: frozenset[str]
    ) -> None:
        self.flow = flow
        self.geometry = geometry
        self.symbols = symbols  # shared variables and parameters -> their offset
        self.local = local  # names of local variables; a lane's copy lies local_bytes behind the one before
        self.local_offsets = tuple(lane * local_bytes for lane in LANE)
        self.registers = flow.function.registers
        self.divergent: set[int] = set()
        self.counters = Counters(flow)
        self.lanes: dict[str, Lanes] = {}
        self.transfers: dict[int, Lanes] = {}  # id of an instruction -> lanes of its result
        self.addresses: dict[int, list[Lanes]] = {}  # id of an instruction -> lanes of its addresses
        self.counters_now: dict[str, Lanes] = {}  # those followed, where the pass is
        while True:
            self.masked = flow.masked(self.divergent)
            self.blended = self._blended()
            self._fixed_point()
            grown = {
                b for b in flow.reachable
                if (last := _last(flow, b)) is not None and last.guard is not None
                and not self.of(last.guard).uniform
            }  # fmt: skip
            if grown <= self.divergent:
                return
            self.divergent |= grown

    def of(self, operand: Operand) -> Lanes:
        match operand:
            case Reg(name):
                lanes = self.lanes.get(name, UNIFORM)
                now = self.counters_now.get(name)
                if now is None:
                    return lanes
                # Only the interval is known better here: what the register is over the lanes is one for the function.
                return now if now.offsets == lanes.offsets else Lanes(lanes.offsets, *(now.span or (None, None)))
            case Imm(value, 0):
                return constant(value)
            case Imm():
                return UNIFORM
            case Special(name):
                return self._special(name)
            case Sym(name) if name in self.local:
                return Lanes(self.local_offsets)
            case Sym(name):
                return constant(self.symbols[name]) if name in self.symbols else UNIFORM
            case Mem(base, offset):
                lanes = self.of(base)
                zeros = min(lanes.zeros, _trailing_zeros(offset))
                if lanes.low is None or lanes.high is None:
                    return Lanes(lanes.offsets, None, None, zeros)
                return Lanes(lanes.offsets, lanes.low + offset, lanes.high + offset, zeros)
        return VARYING

    def _special(self, name: str) -> Lanes:
        kind, _, axis = name[1:].partition(".")
        place = "xyz".find(axis) if axis else 0
        if kind == "tid":
            return self.geometry.tid(place)
        if kind == "ntid":
            return constant(self.geometry.block[place])
        if kind in ("ctaid", "nctaid"):
            top = 65535 if place or self.geometry.small_grid else 2**31 - 1
            return uniform(0, top) if kind == "ctaid" else uniform(1, top + 1)
        if kind == "laneid":
            return Lanes(LANE, 0, 0, 64)
        if kind == "warpid":
            return uniform(0, self.geometry.warps - 1)
        if kind.startswith("lanemask"):
            return VARYING
        return UNIFORM

    # -- which definitions must keep the other lanes' values ------------------------------------------------------
    def _blended(self) -> dict[int, frozenset[str]]:
        """block -> registers that lanes waiting elsewhere still need while the block runs."""
        waiting = self.flow.waiting(self.masked)
        return {b: frozenset().union(*(self.flow.live_in[c] for c in others)) for b, others in waiting.items()}

    def blends(self, block: int, name: str) -> bool:
        return name in self.blended.get(block, ())

    # -- the fixed point ------------------------------------------------------------------------------------------
    def _fixed_point(self) -> None:
        self.lanes = {}
        self.tick = 1
        self.changed_at: dict[str, int] = {}
        self.steps = {b: [self._step(ins) for ins in self.flow.blocks[b].instructions] for b in self.flow.reachable}
        self.exits: dict[int, dict[str, Lanes]] = {}  # counters at the end of each block
        self.entries: dict[tuple[int, str], Lanes] = {}  # and where it begins
        rounds: dict[object, int] = {}
        while self._pass(rounds):
            pass
        self._pass(None)  # once more, without looking back: takes away what widening gave too much

    def _step(self, ins: Instruction) -> _Step:
        reads = tuple({r.name for r in sources(ins)})
        written = results(ins)
        followed = self.counters.followed
        counters = any(name in followed for name in reads) or any(r.name in followed for r in written)
        return _Step(ins, written, reads, tuple(o for o in ins.operands if isinstance(o, Mem)), counters)

    def _pass(self, rounds: dict[object, int] | None) -> bool:
        """Go through all blocks once; True if anything changed. `rounds` counts changes, to end endless ones."""
        before = self.tick
        for b in self.flow.reachable:
            self.counters_now = self._entry(b, rounds)
            for step in self.steps[b]:
                if step.counters or step.seen < max((self.changed_at.get(n, 0) for n in step.reads), default=0):
                    step.seen = self.tick
                    self._visit(b, step, rounds)
            if self.exits.get(b) != self.counters_now:
                self.exits[b] = self.counters_now
                self.tick += 1
        self.counters_now = {}
        return self.tick != before

    def _visit(self, b: int, step: _Step, rounds: dict[object, int] | None) -> None:
        ins = step.instruction
        self.addresses[id(ins)] = [self.of(memory) for memory in step.memory]
        if not step.written:
            return
        new = self.transfers[id(ins)] = self._transfer(ins)
        for register in step.written:
            name = register.name
            mine = Lanes(None, *(new.span or (None, None))) if self.blends(b, name) else new
            if register.type in _NO_OFFSETS and not mine.uniform:
                mine = VARYING
            if name in self.counters.followed:
                self.counters_now[name] = mine
            old = self.lanes.get(name)
            if name in self.counters.several and rounds is not None:
                mine = join(old, mine)
                if mine != old:
                    rounds[name] = rounds.get(name, 0) + 1
                    if rounds[name] > 16 and mine.low is not None:  # give up its interval
                        mine = Lanes(mine.offsets, None, None, mine.zeros)
            elif name in self.counters.several or (rounds is None and old and old.offsets != mine.offsets):
                continue
            if mine != old:
                self.lanes[name] = mine
                self.tick += 1
                self.changed_at[name] = self.tick

    def _entry(self, b: int, rounds: dict[object, int] | None) -> dict[str, Lanes]:
        """The counters where block `b` begins: what its predecessors leave, narrowed by how they branch."""
        entry: dict[str, Lanes] = {}
        for p in self.flow.pred[b]:
            self.counters_now = self.exits.get(p, {})  # what a limit is there
            conditions = self.counters.edges.get((p, b), ())
            for name, lanes in self.exits.get(p, {}).items():
                for subject, condition in conditions:
                    if subject == name and lanes.uniform:
                        limit = self.of(condition.limit).span
                        lanes = Lanes(
                            lanes.offsets, *narrowed(lanes.low, lanes.high, lanes.zeros, condition, limit), lanes.zeros
                        )
                entry[name] = join(entry.get(name), lanes)
        if rounds is not None:
            for name, lanes in entry.items():
                entry[name] = self._widened(b, name, lanes, rounds)
        return entry

    def _widened(self, b: int, name: str, lanes: Lanes, rounds: dict[object, int]) -> Lanes:
        """Never less than in the last round; after some growth up to a constant it is compared with, then anything."""
        old = self.entries.get((b, name))
        new = join(old, lanes)
        if new != old:
            rounds[b, name] = count = rounds.get((b, name), 0) + 1
            if count > 8 and new.low is not None and new.high is not None:
                limits = self.counters.limits.get(name, ()) if count < 16 else ()
                new = Lanes(
                    new.offsets,
                    *widened(old.interval if old is not None else None, new.low, new.high, new.zeros, limits),
                    new.zeros,
                )
            self.entries[b, name] = new
        return new

    def _transfer(self, ins: Instruction) -> Lanes:
        base = ins.base
        operands = ins.operands[1:]
        if isinstance(ins.operands[0], Pair) and (base == "setp" or "cc" in ins.parts):
            return UNIFORM if all(self.of(o).uniform for o in operands) else VARYING
        if base == "ld" or base == "ldu":
            address = operands[0]
            if ins.parts[1].startswith("param") and isinstance(address, Mem) and isinstance(address.base, Sym):
                return UNIFORM
            if not self.of(address).uniform or "volatile" in ins.parts:
                return VARYING if not self.of(address).uniform else UNIFORM
            low, high = _load_interval(ins)
            return uniform(low, high)
        if base in ("vote", "activemask", "redux"):
            members = members_of(ins)
            return VARYING if members is not None and not self.of(members).uniform else UNIFORM
        if base == "elect":
            return VARYING
        if base in _VARYING_ALWAYS and not {"test_wait", "try_wait", "pending_count"} & set(ins.parts):
            return VARYING
        values = [self.of(o) for o in operands]
        if base in _INTEGER and ins.type in TYPE_BITS:
            rule = _INTEGER[base]
            found = rule(ins, values)
            if found is not None:
                found = _fit(found, _result_bits(ins))
                if found.offsets is not None and not found.constant and any(v.varying for v in values):
                    return Lanes(None, *(found.span or (None, None)))  # an operand without S: it must be a vector
                return found
        if any(isinstance(o, Special) and o.name.startswith(("%clock", "%globaltimer")) for o in operands):
            return UNIFORM
        if all(v.uniform for v in values):
            return UNIFORM
        return VARYING


_NO_OFFSETS = frozenset({"pred", "f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "b128"})
_VARYING_ALWAYS = frozenset(
    ["shfl", "match", "atom", "ldmatrix", "mma", "wmma", "movmatrix", "mbarrier", "cp"]
)  # results that depend on the lane whatever the operands


def _last(flow: Flow, b: int) -> Instruction | None:
    code = flow.blocks[b].instructions
    return code[-1] if code else None


def _load_interval(ins: Instruction) -> tuple[int | None, int | None]:
    if ins.type in ("u8", "u16"):
        return 0, 2 ** TYPE_BITS[ins.type] - 1
    if ins.type in ("s8", "s16"):
        bits = TYPE_BITS[ins.type]
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return None, None


def _result_bits(ins: Instruction) -> int:
    bits = TYPE_BITS[ins.type]
    if ins.base == "cvt":
        return TYPE_BITS[ins.parts[-2]]
    return bits * 2 if "wide" in ins.parts else bits


def _fit(lanes: Lanes, bits: int) -> Lanes:
    """Drop an interval that the register cannot hold, and fold constants into their register's range."""
    low, high = lanes.low, lanes.high
    if low is None or high is None:
        return lanes
    if low == high and lanes.offsets is not None:
        value = low & ((1 << bits) - 1)
        signed = value - (1 << bits) if value >> (bits - 1) else value
        if low not in (value, signed):
            low = high = signed
        return Lanes(lanes.offsets, low, high, _trailing_zeros(low))
    if low < -(1 << (bits - 1)) or high >= 1 << bits:
        return Lanes(lanes.offsets, None, None, lanes.zeros)
    return lanes


# -- rules of the integer instructions: (instruction, operand lanes) -> lanes, or None for "no rule" -------------------
Values = list[Lanes]


def _combine(
    a: Lanes, b: Lanes, interval: Callable[[int, int, int, int], tuple[int, int]], offsets: tuple[int, ...] | None,
    zeros: int,
) -> Lanes:  # fmt: skip
    """Interval of a binary operation on the scalars (offsets known) or on the values (varying)."""
    first, second = (x.span for x in (a, b)) if offsets is None else (x.interval for x in (a, b))
    if first is None or second is None:
        return Lanes(offsets, None, None, zeros if offsets is not None else 0)
    low, high = interval(*first, *second)
    return Lanes(offsets, low, high, zeros if offsets is not None else 0)


def _add_lanes(a: Lanes, b: Lanes, sign: int) -> Lanes:
    offsets = None
    if a.offsets is not None and b.offsets is not None:
        offsets = tuple(x + sign * y for x, y in zip(a.offsets, b.offsets, strict=True))
    zeros = min(a.zeros, b.zeros)
    if sign > 0:
        return _combine(a, b, lambda p, q, r, s: (p + r, q + s), offsets, zeros)
    return _combine(a, b, lambda p, q, r, s: (p - s, q - r), offsets, zeros)


def _add(ins: Instruction, v: Values) -> Lanes | None:
    if "cc" in ins.parts or "sat" in ins.parts or ins.type[0] in "fb":
        return None
    return _add_lanes(v[0], v[1], -1 if ins.base == "sub" else 1)


def _neg(ins: Instruction, v: Values) -> Lanes | None:
    if ins.type[0] in "fb":
        return None
    return _add_lanes(constant(0), v[0], -1)


def _scale(a: Lanes, b: Lanes) -> Lanes:
    """a * b, exact product."""
    for x, y in ((a, b), (b, a)):
        if y.constant and y.uniform and y.low is not None:
            factor = y.low
            offsets = None if x.offsets is None else tuple(o * factor for o in x.offsets)
            span = (x.low, x.high) if x.offsets is not None else x.span
            if span is None or span[0] is None or span[1] is None:
                return Lanes(offsets, None, None, x.zeros + y.zeros if offsets is not None else 0)
            ends = sorted((span[0] * factor, span[1] * factor))
            return Lanes(offsets, ends[0], ends[1], x.zeros + y.zeros if offsets is not None else 0)
    offsets = ZERO if a.uniform and b.uniform else None

    def ends_of(p: int, q: int, r: int, s: int) -> tuple[int, int]:
        products = (p * r, p * s, q * r, q * s)
        return min(products), max(products)

    return _combine(a, b, ends_of, offsets, a.zeros + b.zeros)


def _widen(lanes: Lanes, bits: int, signed: bool) -> Lanes:
    """The value of a `bits` wide register read as a signed / unsigned integer."""
    bottom, top = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    span = lanes.span
    if span is not None and bottom <= span[0] and span[1] <= top:
        if lanes.offsets is None:
            return Lanes(None, *span)
        assert lanes.low is not None and lanes.high is not None
        if bottom <= lanes.low and lanes.high <= top:
            return lanes
        # S alone would wrap when widened: move the smallest L into it is not possible for a register; give up.
        return Lanes(None, *span)
    if lanes.uniform:
        if lanes.constant and lanes.low is not None:
            value = lanes.low & ((1 << bits) - 1)
            return constant(value - (1 << bits) if signed and value >> (bits - 1) else value)
        return Lanes(ZERO, bottom, top, min(lanes.zeros, bits - 1))
    zeros = min(lanes.zeros, bits - 1)
    if lanes.offsets is not None and min(lanes.offsets) >= 0 and max(lanes.offsets) < 1 << zeros:
        return Lanes(lanes.offsets, bottom, top >> zeros << zeros, zeros)  # adding L carries into nothing
    return Lanes(None, bottom, top)


def _mul(ins: Instruction, v: Values) -> Lanes | None:
    bits, signed = TYPE_BITS[ins.type], ins.type[0] == "s"
    if ins.type[0] in "fb" or "hi" in ins.parts:
        return None
    if "wide" in ins.parts:
        return _scale(_widen(v[0], bits, signed), _widen(v[1], bits, signed))
    return _scale(v[0], v[1])


def _mad(ins: Instruction, v: Values) -> Lanes | None:
    product = _mul(ins, v)
    if product is None or "cc" in ins.parts or ins.base == "madc" or "sat" in ins.parts:
        return None
    return _add_lanes(_fit(product, _result_bits(ins)), v[2], 1)


def _shl(ins: Instruction, v: Values) -> Lanes | None:
    if not (v[1].constant and v[1].uniform and v[1].low is not None):
        return None
    count = v[1].low
    return _scale(v[0], constant(1 << count)) if 0 <= count < TYPE_BITS[ins.type] else constant(0)


def _shr(ins: Instruction, v: Values) -> Lanes | None:
    bits, signed = TYPE_BITS[ins.type], ins.type[0] == "s"
    if not (v[1].constant and v[1].uniform and v[1].low is not None):
        return None
    a, count = v[0], min(max(v[1].low, 0), bits - 1)
    if v[1].low >= bits and not signed:
        return constant(0)
    bottom, top = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    span = a.span
    inside = span is not None and bottom <= span[0] and span[1] <= top
    if inside and span is not None and span[0] >> count == span[1] >> count:
        return constant(span[0] >> count)
    if a.disjoint and a.offsets is not None and max(a.offsets) <= top:  # L itself does not wrap, nor reach the sign
        offsets = tuple(o >> count for o in a.offsets)
        zeros = max(a.zeros - count, 0)
        if a.low is not None and a.high is not None and bottom <= a.low and a.high <= top:
            return Lanes(offsets, a.low >> count, a.high >> count, zeros)
        return Lanes(offsets, bottom >> count, top >> count, zeros)
    if inside and span is not None:
        return Lanes(None, span[0] >> count, span[1] >> count)
    return Lanes(None, bottom >> count, top >> count)


def _scalar_within(a: Lanes, top: int) -> bool:
    """S itself, not only S + L, lies in [0, top], so that an instruction on S means the same."""
    return a.offsets is None or (a.low is not None and a.high is not None and a.low >= 0 and a.high <= top)


def _mask_and(a: Lanes, mask: int, bits: int) -> Lanes:
    """a & mask for a constant mask (read as unsigned)."""
    mask &= (1 << bits) - 1
    span = a.span
    if span is not None and span[0] >= 0 and mask & (mask + 1) == 0 and span[1] <= mask and _scalar_within(a, mask):
        return a  # the mask changes nothing
    zeros = _trailing_zeros(mask)
    high = mask if not mask >> (bits - 1) else None
    if a.disjoint and a.offsets is not None:
        if a.low is not None and a.high is not None and a.low >= 0:
            high = min(a.high, mask)
        offsets = tuple(o & mask for o in a.offsets)
        if a.constant and a.low is not None:
            return Lanes(offsets, a.low & mask, a.low & mask, zeros)
        keep = a.zeros if a.zeros >= zeros else zeros
        if high is not None and high < 1 << keep:
            return Lanes(offsets, 0, 0, 64)
        return Lanes(offsets, 0 if high is not None else None, high, keep)
    return Lanes(None, 0 if high is not None else None, high)


def _bits(ins: Instruction, v: Values) -> Lanes | None:
    """and / or / xor"""
    bits = TYPE_BITS[ins.type]
    if bits == 1:
        return None
    op = ins.base
    for a, b in ((v[0], v[1]), (v[1], v[0])):
        if b.constant and b.uniform and b.low is not None:
            if op == "and":
                return _mask_and(a, b.low, bits)
            if a.disjoint and a.offsets is not None:
                low_bits = (1 << min(a.zeros, bits)) - 1
                c = b.low & low_bits
                offsets = tuple((o | c if op == "or" else o ^ c) - c for o in a.offsets)
                zeros = min(a.zeros, b.zeros)
                low, high = _or_interval(a, b, bits)
                return Lanes(offsets, low, high if high is None else high >> zeros << zeros, zeros)
    if op in ("or", "xor"):
        for a, b in ((v[0], v[1]), (v[1], v[0])):
            span = b.span
            if (
                a.offsets is not None and b.offsets is not None and span is not None and span[0] >= 0
                and a.zeros < 64 and span[1] < 1 << a.zeros and all(o % (1 << a.zeros) == 0 for o in a.offsets)
                and (b.low or 0) >= 0
            ):  # fmt: skip
                return _add_lanes(a, b, 1)  # no common bits
            if a.constant and a.low == 0 and a.uniform:
                return b
    if v[0].uniform and v[1].uniform:
        zeros = min(v[0].zeros, v[1].zeros)
        low, high = _bit_interval(op, v[0], v[1])
        return Lanes(ZERO, low, high if high is None else high >> zeros << zeros, zeros)
    return _lane_by_lane(op, v[0], v[1]) or Lanes(None, *_bit_interval(op, v[0], v[1]))


def _lane_by_lane(op: str, a: Lanes, b: Lanes) -> Lanes | None:
    """a and b where below some bit all is known, and above it the two S are alone: an address swizzled by its row."""
    act = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[op]
    unknown = min((x.zeros for x in (a, b) if not x.constant), default=64)
    below = (1 << unknown) - 1
    known = [x.low & below if x.constant and x.low is not None else 0 for x in (a, b)]  # of S
    low_bits = [[o + k for o in x.offsets or ()] for x, k in zip((a, b), known, strict=True)]
    if not all(bits and min(bits) >= 0 and max(bits) <= below for bits in low_bits):
        return None
    offsets = tuple(act(x, y) - act(*known) for x, y in zip(*low_bits, strict=True))
    if a.constant and b.constant and a.low is not None and b.low is not None:
        both = constant(act(a.low, b.low))
        return Lanes(offsets, both.low, both.high, both.zeros)
    zeros = min(a.zeros, b.zeros)
    low, high = _bit_interval(op, Lanes(ZERO, a.low, a.high), Lanes(ZERO, b.low, b.high))
    return Lanes(offsets, low, high if high is None else high >> zeros << zeros, zeros)


def _or_interval(a: Lanes, b: Lanes, bits: int) -> tuple[int | None, int | None]:
    if a.low is None or a.high is None or b.low is None or a.low < 0 or b.low < 0:
        return None, None
    return 0, min((1 << max(a.high.bit_length(), b.low.bit_length())) - 1, a.high + b.low)


def _bit_interval(op: str, a: Lanes, b: Lanes) -> tuple[int | None, int | None]:
    x, y = a.span, b.span
    if op == "and":
        tops = [s[1] for s in (x, y) if s is not None and s[0] >= 0]
        return (0, min(tops)) if tops else (None, None)
    if x is None or y is None or x[0] < 0 or y[0] < 0:
        return None, None
    return 0, min((1 << max(x[1].bit_length(), y[1].bit_length())) - 1, x[1] + y[1])


def _bfe(ins: Instruction, v: Values) -> Lanes | None:
    bits = TYPE_BITS[ins.type]
    if not all(x.constant and x.uniform for x in v[1:3]) or ins.type[0] == "s":
        return None
    pos, length = (v[1].low or 0) & 255, (v[2].low or 0) & 255
    if length == 0 or pos >= bits:
        return constant(0)
    length = min(length, bits - pos)
    shifted = _shr(_fake(ins, f"u{bits}"), [v[0], constant(pos)])
    return None if shifted is None else _mask_and(shifted, (1 << length) - 1, bits)


def _bfi(ins: Instruction, v: Values) -> Lanes | None:
    bits = TYPE_BITS[ins.type]
    if not all(x.constant and x.uniform for x in v[2:4]):
        return None
    pos, length = (v[2].low or 0) & 255, (v[3].low or 0) & 255
    if length == 0 or pos >= bits:
        return v[1]
    length = min(length, bits - pos)
    field = ((1 << length) - 1) << pos
    keep = _mask_and(v[1], ~field, bits)
    span = v[0].span
    if span is not None and span[0] >= 0 and span[1] < 1 << length and _scalar_within(v[0], (1 << length) - 1):
        put = v[0]
    else:
        put = _mask_and(v[0], (1 << length) - 1, bits)
    put = _fit(_scale(put, constant(1 << pos)), bits)
    return _bits(_fake(ins, f"b{bits}", "or"), [put, keep])


def _fake(ins: Instruction, type_: str, base: str = "op") -> Instruction:
    return Instruction(base, (base, type_), ins.operands, ins.file, ins.line)


def _mov(ins: Instruction, v: Values) -> Lanes | None:
    return v[0] if len(v) == 1 and TYPE_BITS[ins.type] > 1 else None


def _cvt(ins: Instruction, v: Values) -> Lanes | None:
    to, source = ins.parts[-2], ins.parts[-1]
    if to[0] not in "us" or source[0] not in "us" or "sat" in ins.parts:
        return None
    n, m = TYPE_BITS[to], TYPE_BITS[source]
    value = _widen(v[0], m, source[0] == "s") if n > m else v[0]
    target = ins.operands[0]
    if isinstance(target, Reg) and TYPE_BITS[target.type] > n:  # extended again, by the destination's sign
        return _widen(value, n, to[0] == "s")
    return value


def _selp(ins: Instruction, v: Values) -> Lanes | None:
    a, b = v[0], v[1]
    if v[2].uniform and a.offsets is not None and a.offsets == b.offsets:
        return join(a, b)
    low, high = _union(a.span or (None, None), b.span or (None, None))
    return Lanes(None, low, high)


def _extremum(ins: Instruction, v: Values) -> Lanes | None:
    if ins.type[0] not in "us":
        return None
    bits, signed = TYPE_BITS[ins.type], ins.type[0] == "s"
    a, b = (_widen(x, bits, signed) for x in v[:2])
    pick = min if ins.base == "min" else max
    offsets = ZERO if v[0].uniform and v[1].uniform else None
    return _combine(a, b, lambda p, q, r, s: (pick(p, r), pick(q, s)), offsets, 0)


def _rem(ins: Instruction, v: Values) -> Lanes | None:
    offsets = ZERO if v[0].uniform and v[1].uniform else None
    span = v[1].span
    if ins.type[0] == "u" and span is not None and span[0] > 0:
        return Lanes(offsets, 0, span[1] - 1)
    return Lanes(offsets)


def _div(ins: Instruction, v: Values) -> Lanes | None:
    if ins.type[0] == "f":
        return None
    offsets = ZERO if v[0].uniform and v[1].uniform else None
    a, b = v[0].span, v[1].span
    top = (1 << (TYPE_BITS[ins.type] - (ins.type[0] == "s"))) - 1
    if a is not None and b is not None and a[0] >= 0 and a[1] <= top and b[0] > 0 and b[1] <= top:
        return Lanes(offsets, a[0] // b[1], a[1] // b[0])
    return Lanes(offsets)


def _setp(ins: Instruction, v: Values) -> Lanes | None:
    """S + L against a limit that no warp lies across, such as threadIdx.x < 64: what S says, every lane says."""
    order = {"lt": "lt", "lo": "lt", "ge": "lt", "hs": "lt", "gt": "gt", "hi": "gt", "le": "gt", "ls": "gt"}
    side = order.get(ins.parts[1])
    if side is None or ins.type[0] == "f" or not all(x.uniform for x in v[2:]):
        return None
    a, b = v[:2]
    if a.uniform:  # the limit comes first
        a, b, side = b, a, "gt" if side == "lt" else "lt"
    if not (b.uniform and a.disjoint and a.offsets is not None):
        return None
    bits = max(a.offsets).bit_length()
    if side == "lt":
        across = b.zeros < bits
    else:
        across = not b.constant or b.low is None or (b.low + 1) % (1 << bits) != 0
    return None if across else UNIFORM


def _cvta(ins: Instruction, v: Values) -> Lanes | None:
    return Lanes(v[0].offsets)


_INTEGER: dict[str, Callable[[Instruction, Values], Lanes | None]] = {
    "add": _add, "sub": _add, "neg": _neg, "mul": _mul, "mad": _mad, "shl": _shl, "shr": _shr,
    "and": _bits, "or": _bits, "xor": _bits, "bfe": _bfe, "bfi": _bfi, "mov": _mov, "cvt": _cvt,
    "selp": _selp, "min": _extremum, "max": _extremum, "rem": _rem, "div": _div, "cvta": _cvta,
    "setp": _setp,
}  # fmt: skip
