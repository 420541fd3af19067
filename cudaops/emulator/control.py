"""Control flow: which blocks need lane masks, and where lanes meet again.

A divergent branch sends lanes both ways. The blocks between it and its post-dominator are *masked*: each has a mask of
the lanes waiting to run it, and a connected group of them (a Region) is run as one chain in loop-contiguous
topological order, so that lanes meet again as early as they can. Everything else is ordinary scalar control flow.
A branch to a block that only returns does not count: it just shrinks the set of live lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cudaops.emulator.ptx import Block, Function, Group, Imm, Instruction, Mem, Operand, Pair, Reg, Sym, Vec
from cudaops.errors import EmulatorError

NO_RESULT = frozenset(
    [
        "st",
        "red",
        "bra",
        "ret",
        "exit",
        "trap",
        "bar",
        "barrier",
        "membar",
        "fence",
        "prefetch",
        "prefetchu",
        "cp",
        "vprintf",
        "discard",
        "applypriority",
        "griddepcontrol",
        "nanosleep",
        "stmatrix",
        "brkpt",
        "pmevent",
    ]
)
TERMINATORS = frozenset({"bra", "ret", "exit", "trap"})
RETURNS = frozenset({"ret", "exit"})
_MEMBERS = {"shfl": 4, "vote": 2, "match": 2, "redux": 2, "elect": 1, "bar": 0}  # which operand is the member mask
_TOGETHER = frozenset({*_MEMBERS, "mma", "wmma", "ldmatrix", "stmatrix", "movmatrix"})


def registers_in(operand: Operand) -> Iterator[Reg]:
    match operand:
        case Reg():
            yield operand
        case Mem(base, _):
            yield from registers_in(base)
        case Vec(items) | Group(items):
            for item in items:
                yield from registers_in(item)
        case Pair(first, second):
            yield from registers_in(first)
            yield from registers_in(second)


def results(ins: Instruction) -> tuple[Reg, ...]:
    """The registers an instruction writes."""
    if ins.base in NO_RESULT or not ins.operands:
        return ()
    if isinstance(ins.operands[0], Mem):
        return ()
    return tuple(registers_in(ins.operands[0]))


def sources(ins: Instruction) -> Iterator[Reg]:
    """The registers an instruction reads, its guard included."""
    if ins.guard is not None:
        yield ins.guard
    skip = 1 if results(ins) else 0
    for operand in ins.operands[skip:]:
        yield from registers_in(operand)


def is_barrier(ins: Instruction) -> bool:
    """bar.sync, bar.red, barrier.sync ...: lanes wait here. (bar.arrive and bar.warp.sync do not.)"""
    return ins.base in ("bar", "barrier") and bool({"sync", "red"} & set(ins.parts)) and "warp" not in ins.parts


def is_aligned(ins: Instruction) -> bool:
    """Whether all lanes of a warp come to a barrier at once, or the program is wrong."""
    return ins.base == "bar" or "aligned" in ins.parts


def members_of(ins: Instruction) -> Operand | None:
    """The member mask of a collective of the warp; None where it is for all lanes, or no such instruction."""
    place = _MEMBERS.get("bar" if ins.base == "barrier" else ins.base)
    if place is None or "sync" not in ins.parts or (place == 0 and "warp" not in ins.parts):
        return None
    return ins.operands[place]


def is_collective(ins: Instruction) -> bool:
    """Whether lanes of a warp execute it together, and wait for each other there."""
    return "sync" in ins.parts and ins.base in _TOGETHER and not is_barrier(ins)


def observes(ins: Instruction) -> bool:
    """Whether it reads what another warp may be about to write."""
    match ins.base:
        case "atom":
            return True
        case "ld":
            return bool({"volatile", "relaxed", "acquire", "mmio", "cg", "cv"} & set(ins.parts))
        case "mbarrier":
            return bool({"test_wait", "try_wait"} & set(ins.parts))
    return False


@dataclass
class Loop:
    header: int
    last: int  # the last block of the loop in chain order: the back edge is taken after it
    depth: int


@dataclass(frozen=True)
class Waiting:
    """A loop that waits for others."""

    blocks: frozenset[int]
    look: Instruction  # the first that reads what others may write
    only_looks: bool  # it stores nothing but by atomics, which may have no effect


@dataclass
class Region:
    """Masked blocks that run as one chain; every lane leaves it for `exit` (None: they return)."""

    chain: list[int]
    exit: int | None
    loops: list[Loop] = field(default_factory=list)
    cycles: list[frozenset[int]] = field(default_factory=list)


class Flow:
    """The control-flow graph of a function; a barrier is a block of its own.

    With `collectives`, each collective of the warp begins a block, so that lanes can wait there for others.
    """

    def __init__(self, function: Function, collectives: bool = False) -> None:
        self.function = function
        blocks: Iterable[Block] = _split_at_barriers(function.blocks)
        self.blocks = list(_split_at_collectives(blocks) if collectives else blocks)
        index = {block.label: n for n, block in enumerate(self.blocks)}
        n = len(self.blocks)
        self.succ: list[tuple[int, ...]] = []
        for b, block in enumerate(self.blocks):
            last = block.instructions[-1] if block.instructions else None
            base = last.base if last is not None else ""
            if base == "bra":
                assert last is not None
                target = last.operands[-1]
                if not isinstance(target, Sym) or target.name not in index:
                    raise EmulatorError(f"{last.file}:{last.line}: branch to an unknown label: {last}")
                to = index[target.name]
                self.succ.append((to, b + 1) if last.guard is not None else (to,))
            elif base in TERMINATORS or b + 1 == n:
                self.succ.append(())
            else:
                self.succ.append((b + 1,))
        self.reachable = self._depth_first()
        self.pred: list[list[int]] = [[] for _ in range(n)]
        for b in self.reachable:
            for s in self.succ[b]:
                self.pred[s].append(b)
        self.lone_return = {
            b for b in self.reachable
            if len(self.blocks[b].instructions) <= 1 and all(i.base in RETURNS for i in self.blocks[b].instructions)
            and not self.succ[b]
        }  # fmt: skip
        self.dominators = self._dominators()
        self.post = self._post_dominators()
        self.live_in = self._liveness()
        self.barriers = [
            b for b in self.reachable if self.blocks[b].instructions and is_barrier(self.blocks[b].instructions[-1])
        ]
        self.waits = self._waiting_loops()
        self.polls_volatile = any(
            ins.base == "ld" and "volatile" in ins.parts and "global" not in ins.parts
            for wait in self.waits.values() for b in wait.blocks for ins in self.blocks[b].instructions
        )  # fmt: skip
        self.compared = self._compared()
        self.divergent: frozenset[int] = frozenset()  # as last given to `masked`

    # -- graph ----------------------------------------------------------------------------------------------------
    def _depth_first(self) -> list[int]:
        """Reachable blocks in reverse post-order."""
        seen, order = {0}, []
        stack = [(0, iter(self.succ[0]))]
        while stack:
            b, edges = stack[-1]
            for s in edges:
                if s not in seen:
                    seen.add(s)
                    stack.append((s, iter(self.succ[s])))
                    break
            else:
                order.append(b)
                stack.pop()
        return order[::-1]

    def _dominators(self) -> dict[int, int]:
        """block -> bit set of the blocks that dominate it (itself included)."""
        everything = sum(1 << b for b in self.reachable)
        dom = dict.fromkeys(self.reachable, everything)
        dom[0] = 1
        changed = True
        while changed:
            changed = False
            for b in self.reachable:
                if b == 0:
                    continue
                new = everything
                for p in self.pred[b]:
                    new &= dom[p]
                new |= 1 << b
                if new != dom[b]:
                    dom[b], changed = new, True
        return dom

    def meeting_succ(self, b: int) -> tuple[int, ...]:
        """Successors that count for where lanes meet: a conditional jump to a lone return does not."""
        kept = tuple(s for s in self.succ[b] if s not in self.lone_return)
        return kept if kept else self.succ[b]

    def _post_dominators(self) -> dict[int, int]:
        n = len(self.blocks)  # n is the virtual exit
        everything = sum(1 << b for b in self.reachable) | 1 << n
        post = dict.fromkeys(self.reachable, everything)
        post[n] = 1 << n
        changed = True
        while changed:
            changed = False
            for b in reversed(self.reachable):
                edges = self.meeting_succ(b) or (n,)
                new = everything
                for s in edges:
                    new &= post[s]
                new |= 1 << b
                if new != post[b]:
                    post[b], changed = new, True
        return post

    def meeting_point(self, blocks: Iterable[int]) -> int:
        """The nearest block that all of `blocks` must reach (they themselves count); n where there is none."""
        n = len(self.blocks)
        common = -1
        for b in blocks:
            common &= self.post[b]
        found = list(_bits(common))
        # The nearest is the one that every other common post-dominator post-dominates.
        return max(found, key=lambda b: self.post[b].bit_count()) if found else n

    def _liveness(self) -> dict[int, frozenset[str]]:
        use: dict[int, set[str]] = {}
        kill: dict[int, set[str]] = {}
        for b in self.reachable:
            use[b], kill[b] = set(), set()
            for ins in self.blocks[b].instructions:
                use[b].update(r.name for r in sources(ins) if r.name not in kill[b])
                kill[b].update(r.name for r in results(ins))
        live: dict[int, set[str]] = {b: set(use[b]) for b in self.reachable}
        changed = True
        while changed:
            changed = False
            for b in reversed(self.reachable):
                out: set[str] = set().union(*(live[s] for s in self.succ[b]))
                new = use[b] | (out - kill[b])
                if len(new) != len(live[b]):
                    live[b], changed = new, True
        return {b: frozenset(names) for b, names in live.items()}

    def _waiting_loops(self) -> dict[int, Waiting]:
        """Loops that may go round until another warp, or another lane of this one, has done something: a branch in them
        depends on what is observed. By their headers."""
        ends: dict[int, set[int]] = {}
        for b in self.reachable:
            for header in self.succ[b]:
                if self.dominators[b] >> header & 1:
                    ends.setdefault(header, set()).add(b)
        found = {}
        for header, last in ends.items():
            blocks = self._loop(header, last)
            code = [ins for b in sorted(blocks) for ins in self.blocks[b].instructions]
            if _branches_on_observed(code):
                only_looks = not any(ins.base in ("st", "red", "bar", "barrier", "cp") or _counts(ins) for ins in code)
                found[header] = Waiting(frozenset(blocks), next(filter(observes, code)), only_looks)
        return found

    def _compared(self) -> frozenset[str]:
        """Registers that a compare-and-swap compares with, and those that are moved there."""
        code = [ins for b in self.reachable for ins in self.blocks[b].instructions]
        found = {r.name for i in code if i.base == "atom" and "cas" in i.parts for r in registers_in(i.operands[2])}
        while True:
            moves = (i for i in code if i.base == "mov" and any(r.name in found for r in results(i)))
            more = {r.name for i in moves for r in sources(i)}
            if more <= found:
                return frozenset(found)
            found |= more

    def _loop(self, header: int, last: set[int]) -> set[int]:
        """The natural loop of the back edges from `last` to `header`."""
        inside, stack = {header}, list(last)
        while stack:
            b = stack.pop()
            if b not in inside:
                inside.add(b)
                stack.extend(self.pred[b])
        return inside

    # -- masks ----------------------------------------------------------------------------------------------------
    def masked(self, divergent: set[int]) -> set[int]:
        """The blocks that need a mask, given the blocks that end in a divergent branch."""
        n = len(self.blocks)
        self.divergent = frozenset(divergent)
        found: set[int] = set()
        for b in divergent:
            edges = self.meeting_succ(b)
            if len(edges) > 1:
                found |= self._between(edges, self.meeting_point(edges))
        while True:
            grown = False
            for group in self._components(found):
                exits = self._exits(group)
                if exits and any(b in self.waits or b in self.barriers for b in group):
                    more = self._before_barriers(exits, found)  # lanes may wait for others of their warp
                    if not more - found and len(exits) > 1:
                        more = exits  # a region has one exit: where lanes may leave for several barriers, it goes on
                    if more - found:
                        found |= more
                        grown = True
                elif len(exits) > 1:
                    meet = self.meeting_point(exits)
                    more = self._between(exits, meet)
                    if meet == n:
                        more |= exits
                    if more - found:
                        found |= more
                        grown = True
            if not grown:
                return found - self.lone_return

    def _before_barriers(self, starts: Iterable[int], masked: set[int]) -> set[int]:
        """What can be reached without passing a barrier that a warp comes to as a whole."""
        seen: set[int] = set()
        stack = list(starts)
        while stack:
            b = stack.pop()
            whole = b in self.barriers and b not in masked and is_aligned(self.blocks[b].instructions[-1])
            if b in seen or b in self.lone_return or whole:
                continue
            seen.add(b)
            stack.extend(self.succ[b])
        return seen

    def _between(self, starts: Iterable[int], stop: int) -> set[int]:
        seen: set[int] = set()
        stack = [b for b in starts if b != stop]
        while stack:
            b = stack.pop()
            if b in seen:
                continue
            seen.add(b)
            stack.extend(s for s in self.meeting_succ(b) if s != stop and s not in seen)
        return seen

    def _components(self, masked: set[int]) -> list[set[int]]:
        """Connected groups; the two sides of a divergent branch are connected, even where it itself has no mask."""
        sides: dict[int, set[int]] = {}
        for d in self.divergent:
            both = {s for s in self.succ[d] if s in masked}
            for s in both:
                sides.setdefault(s, set()).update(both)
        left, groups = set(masked), []
        while left:
            stack, group = [left.pop()], set()
            while stack:
                b = stack.pop()
                group.add(b)
                for s in (*self.succ[b], *self.pred[b], *sides.get(b, ())):
                    if s in left:
                        left.discard(s)
                        stack.append(s)
            groups.append(group)
        return groups

    def _exits(self, group: set[int]) -> set[int]:
        return {s for b in group for s in self.succ[b] if s not in group and s not in self.lone_return}

    def regions(self, masked: set[int]) -> list[Region]:
        found = []
        for group in self._components(masked):
            exits = self._exits(group)
            region = Region([], min(exits) if exits else None)
            self._order(group, region, None, 0)
            found.append(region)
        return found

    def stops(self, region: Region) -> bool:
        """Whether lanes wait in it: at a barrier, in a loop, or at one of several places for others of their warp."""
        if any(b in self.waits or b in self.barriers for b in region.chain):
            return True
        code = (ins for b in region.chain for ins in self.blocks[b].instructions)
        return sum(ins.base == "bar" and "warp" in ins.parts for ins in code) > 1

    def stops_at_collectives(self, masked: set[int]) -> bool:
        """Whether lanes may come to a collective while others of its members wait elsewhere."""
        stopping = (b for r in self.regions(masked) if self.stops(r) for b in r.chain)
        return any(is_collective(ins) for b in stopping for ins in self.blocks[b].instructions)

    def waiting(self, masked: set[int]) -> dict[int, set[int]]:
        """Masked block -> blocks where other lanes may wait while it runs.

        Follows pairs of blocks that lanes of one warp stand at: from the two sides of a divergent branch on, the one
        that its chain runs first moves to its successors.
        """
        place: dict[int, int] = {}
        loops: dict[int, tuple[int, bool]] = {}  # header -> (place of the last block, entered elsewhere too)
        for region in self.regions(masked):
            place.update((b, len(place)) for b in region.chain)
            for loop in region.loops:
                end = place[loop.last]
                inside = set(region.chain[region.chain.index(loop.header) : region.chain.index(loop.last) + 1])
                others = inside - {loop.header}
                loops[loop.header] = end, any(p not in inside for b in others for p in self.pred[b])
        found: dict[int, set[int]] = {b: set() for b in masked}
        seen: set[tuple[int, int]] = set()
        todo: list[tuple[int, int]] = []

        def add(b: int, c: int) -> None:
            b, c = sorted((b, c), key=lambda x: place.get(x, len(place)))
            if b != c and b in place and (b, c) not in seen and not {b, c} & self.lone_return:
                seen.add((b, c))
                todo.append((b, c))

        for region in self.regions(masked):
            if self.stops(region):  # lanes wait at any of its blocks while others go on
                everywhere = {*region.chain} | ({region.exit} if region.exit is not None else set())
                for b in region.chain:
                    found[b] |= everywhere - {b}
        for d in self.divergent:
            add(self.succ[d][0], self.succ[d][-1])
        while todo:
            b, c = todo.pop()
            orders = [(b, c)]
            if b in loops and c in place and place[c] <= loops[b][0]:  # lanes at b wait for the loop's next turn
                orders = [(c, b), (b, c)] if loops[b][1] else [(c, b)]
            for runs, waits in orders:
                found[runs].add(waits)
                for s in self.succ[runs]:
                    add(s, waits)
        return found

    def _order(self, blocks: set[int], region: Region, header: int | None, depth: int) -> None:
        """Append `blocks` to the chain in topological order, each loop in one piece, its header first."""
        for part in _strong_components(blocks, lambda b: [s for s in self.succ[b] if s in blocks and s != header]):
            if len(part) == 1 and (b := next(iter(part))) not in (s for s in self.succ[b] if s != header):
                region.chain.append(b)
                continue
            entries = [b for b in part if any(p not in part for p in self.pred[b])]
            rank = {b: n for n, b in enumerate(self.reachable)}
            top = min(entries or part, key=lambda b: rank[b])
            region.cycles.append(frozenset(part))
            loop = Loop(top, -1, depth)
            region.loops.append(loop)
            self._order(set(part), region, top, depth + 1)
            loop.last = region.chain[-1]


def _counts(ins: Instruction) -> bool:
    """Whether it is an atomic that changes what it reads each time: a number is drawn, nobody is waited for."""
    drawn = {"add", "inc", "dec"} & set(ins.parts)
    return ins.base == "atom" and bool(drawn) and not (isinstance(by := ins.operands[2], Imm) and by.value == 0)


def _branches_on_observed(code: list[Instruction]) -> bool:
    """Whether a branch in `code`, a loop, depends on what is observed there."""
    known: set[str] = set()
    while True:
        before = len(known)
        for ins in code:
            if observes(ins) or any(r.name in known for r in sources(ins)):
                known.update(r.name for r in results(ins))
        if len(known) == before:
            return any(ins.guard is not None and ins.guard.name in known for ins in code if ins.base == "bra")


def _bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def _strong_components(blocks: set[int], succ) -> list[set[int]]:  # type: ignore[no-untyped-def]
    """Tarjan's strongly connected components, in topological order (no recursion: kernels can be long)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[set[int]] = []
    for root in sorted(blocks):
        if root in index:
            continue
        work = [(root, iter(succ(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            b, edges = work[-1]
            for s in edges:
                if s not in index:
                    index[s] = low[s] = len(index)
                    stack.append(s)
                    on_stack.add(s)
                    work.append((s, iter(succ(s))))
                    break
                if s in on_stack:
                    low[b] = min(low[b], index[s])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[b])
                if low[b] == index[b]:
                    part = set()
                    while True:
                        top = stack.pop()
                        on_stack.discard(top)
                        part.add(top)
                        if top == b:
                            break
                    found.append(part)
    return found[::-1]


def _split_at_barriers(blocks: Iterable[Block]) -> Iterator[Block]:
    count = 0
    for block in blocks:
        label, code = block.label, []  # what is before a barrier stays a block, as with collectives
        for ins in block.instructions:
            if not is_barrier(ins):
                code.append(ins)
                continue
            result: tuple[Instruction, ...] = ()
            if "red" in ins.parts:  # its result is there when the barrier is complete
                parts = ("barrier_result", next(p for p in ins.parts if p in ("popc", "and", "or")), ins.type)
                result = (Instruction(".".join(parts), parts, ins.operands[:2], ins.file, ins.line),)
                ins = replace(ins, operands=ins.operands[1:])
            count += 1
            yield Block(label, tuple(code))
            yield Block(f"$barrier{count}", (ins,))
            label, code = f"$after_barrier{count}", list(result)
        yield Block(label, tuple(code))


def _split_at_collectives(blocks: Iterable[Block]) -> Iterator[Block]:
    """What is before a collective stays a block, even if it is empty: no branch leads to the collective's own one."""
    count = 0
    for block in blocks:
        label, code = block.label, list[Instruction]()
        for ins in block.instructions:
            if is_collective(ins):
                yield Block(label, tuple(code))
                count += 1
                label, code = f"$collective{count}", []
            code.append(ins)
        yield Block(label, tuple(code))
