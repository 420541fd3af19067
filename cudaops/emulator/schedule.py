"""The order in which a block's instructions are emitted.

A compiler for a GPU with 255 registers a thread interleaves everything; a CPU has 32 (16) vector registers, and a warp
needs two (four) of them for each value. So between stores and barriers the dependency cones of a few results at a time
are emitted: a register tile of 64 sums becomes tiles of 8 that stay in registers over the whole unrolled loop.
Loads that a later cone needs again are repeated there: cheaper than keeping them, which would mean spilling them.
"""

from __future__ import annotations

from collections.abc import Iterable

from cudaops.emulator.control import results, sources
from cudaops.emulator.ptx import Instruction, Reg

WORTH_IT = 48  # instructions: shorter pieces fit the registers as they are
_FENCES = frozenset(
    [
        "st",
        "atom",
        "red",
        "bar",
        "barrier",
        "vprintf",
        "shfl",
        "vote",
        "match",
        "redux",
        "cp",
        "mbarrier",
        "membar",
        "fence",
        "trap",
        "activemask",
        "ldmatrix",
        "mma",
        "wmma",
        "nanosleep",
        "elect",
    ]
)


def results_at_once(vectors: str) -> int:
    """How many sums stay in registers, for native.vector_extension().

    Measured on a matrix product and a convolution: with 16 registers of 8 lanes, 2 take two thirds of the time of 8.
    """
    return 8 if vectors == "AVX-512" else 2


def schedule(code: list[Instruction], live_out: frozenset[str], results_at_once: int) -> list[Instruction]:
    """`code` in the order to emit it. `live_out`: registers needed after it (the closing branch included)."""
    pieces: list[list[Instruction]] = [[]]
    for ins in code:
        if ins.base in _FENCES:
            pieces += [[ins], []]
        else:
            pieces[-1].append(ins)
    needed = set(live_out)
    ordered: list[list[Instruction]] = []
    for piece in reversed(pieces):
        ordered.append(_cones(piece, needed, results_at_once) if len(piece) >= WORTH_IT else piece)
        for ins in reversed(piece):
            needed.difference_update(r.name for r in results(ins))
            needed.update(r.name for r in sources(ins))
    return [ins for piece in reversed(ordered) for ins in piece]


def _cones(code: list[Instruction], needed: Iterable[str], results_at_once: int) -> list[Instruction]:
    wanted = set(needed)
    before: list[set[int]] = []  # what an instruction must come after
    flow: list[set[int]] = []  # ... because it reads what they write
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    writes: dict[str, int] = {}
    for n, ins in enumerate(code):
        data = {writer[r.name] for r in sources(ins) if r.name in writer}
        order = set(data)
        for r in results(ins):
            order.update(readers.pop(r.name, ()))
            if r.name in writer:
                order.add(writer[r.name])
            writer[r.name] = n
            writes[r.name] = writes.get(r.name, 0) + 1
        for r in sources(ins):
            readers.setdefault(r.name, []).append(n)
        order.discard(n)
        before.append(order)
        flow.append(data)
    roots = sorted({n for name, n in writer.items() if name in wanted})
    emitted: dict[int, int] = {}  # instruction -> the group it was emitted in last
    out: list[Instruction] = []
    for group, start in enumerate(range(0, len(roots), results_at_once)):
        cone = _collect(roots[start : start + results_at_once], before, emitted)
        again = {
            d
            for n in cone
            for d in flow[n]
            if emitted.get(d, group) != group and _repeatable(code[d], writes, writer, d)
        }
        for n in sorted(cone | again):
            emitted[n] = group
            out.append(code[n])
    out.extend(ins for n, ins in enumerate(code) if n not in emitted)  # results that nothing reads
    return out


def _collect(roots: list[int], before: list[set[int]], emitted: dict[int, int]) -> set[int]:
    cone: set[int] = set()
    stack = [n for n in roots if n not in emitted]
    while stack:
        n = stack.pop()
        if n in cone:
            continue
        cone.add(n)
        stack.extend(d for d in before[n] if d not in emitted and d not in cone)
    return cone


def _repeatable(ins: Instruction, writes: dict[str, int], writer: dict[str, int], n: int) -> bool:
    """A plain load from shared memory whose address and result are not overwritten in this piece."""
    return (
        ins.base == "ld"
        and ins.parts[1].startswith("shared")
        and isinstance(ins.operands[0], Reg)
        and writes[ins.operands[0].name] == 1
        and all(writes.get(r.name, 0) == 0 or (writes[r.name] == 1 and writer[r.name] < n) for r in sources(ins))
    )
