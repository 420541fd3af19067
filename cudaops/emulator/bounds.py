"""What branches say about loop counters: on the way into a loop `k < 16` holds, so k keeps an interval there.

Only integer registers with several definitions, compared where a block ends, are followed block by block; everything
else has one value of the analysis for the whole function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cudaops.emulator.control import Flow, results
from cudaops.emulator.ptx import TYPE_BITS, Imm, Instruction, Operand, Reg

OPPOSITE = {
    "eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt",
    "lo": "hs", "hs": "lo", "hi": "ls", "ls": "hi",
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@dataclass(frozen=True)
class Condition:
    """`register op limit` holds, both read as `type`."""

    op: str
    limit: Operand
    type: str


class Counters:
    """The registers followed, and what is known of them on each edge of the flow graph."""

    def __init__(self, flow: Flow) -> None:
        written = Counter(r.name for b in flow.reachable for ins in flow.blocks[b].instructions for r in results(ins))
        self.several = frozenset(name for name, count in written.items() if count > 1)
        self.edges: dict[tuple[int, int], list[tuple[str, Condition]]] = {}
        self.limits: dict[str, set[int]] = {}  # constants each is compared with
        for b in flow.reachable:
            self._look(flow, b)
        self.followed = frozenset(name for found in self.edges.values() for name, _ in found)

    def _look(self, flow: Flow, b: int) -> None:
        code, succ = flow.blocks[b].instructions, flow.succ[b]
        if len(succ) != 2 or succ[0] == succ[1] or not code or code[-1].guard is None:
            return
        guard = code[-1].guard
        changed: set[str] = set()
        for ins in reversed(code[:-1]):
            names = {r.name for r in results(ins)}
            if guard.name in names:
                for name, condition in _comparison(ins):
                    if name in self.several and name not in changed and name not in names:
                        other = Condition(OPPOSITE[condition.op], condition.limit, condition.type)
                        first, second = (other, condition) if guard.negated else (condition, other)
                        self.edges.setdefault((b, succ[0]), []).append((name, first))
                        self.edges.setdefault((b, succ[1]), []).append((name, second))
                        if isinstance(condition.limit, Imm):
                            self.limits.setdefault(name, set()).add(condition.limit.value)
                return
            changed |= names


def _comparison(ins: Instruction) -> list[tuple[str, Condition]]:
    """`setp.op p, register, limit`, also read backwards."""
    if ins.base != "setp" or len(ins.parts) != 3 or ins.type[0] not in "usb" or TYPE_BITS[ins.type] < 32:
        return []
    op, found = ins.parts[1], []
    if op not in OPPOSITE or not isinstance(ins.operands[0], Reg):
        return []
    _, x, y = ins.operands
    turned = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "lo": "hi", "hi": "lo", "ls": "hs", "hs": "ls"}
    if isinstance(x, Reg):
        found.append((x.name, Condition(op, y, ins.type)))
    if isinstance(y, Reg):
        found.append((y.name, Condition(turned.get(op, op), x, ins.type)))
    return found


Interval = tuple[int | None, int | None]


def narrowed(
    low: int | None, high: int | None, zeros: int, condition: Condition, limit: tuple[int, int] | None
) -> Interval:
    """The interval of a value with `zeros` trailing zero bits once `value op limit` is known to hold."""
    op, bits = condition.op, TYPE_BITS[condition.type]
    signed = condition.type[0] == "s" and op not in UNSIGNED
    op = UNSIGNED.get(op, op)
    bottom, top = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if op in ("eq", "ne"):  # the same bits: needs a value and a limit read alike
        if low is None or high is None or limit is None or limit[0] != limit[1]:
            return low, high
        if op == "eq":
            return (limit[0], limit[0]) if low <= limit[0] <= high else (low, high)
        if low == limit[0] < high:
            return low + (1 << zeros), high
        return (low, _down(high - 1, zeros)) if high == limit[0] > low else (low, high)
    if low is None or high is None or low < bottom or high > top:
        if not signed:  # an unknown value may be one with the top bit set, that is negative elsewhere
            return low, high
        low, high = bottom, top
    if limit is None or limit[0] < bottom or limit[1] > top:
        limit = (bottom, top)
    if op in ("lt", "le"):
        high = min(high, _down(limit[1] - (op == "lt"), zeros))
    else:
        low = max(low, limit[0] + (op == "gt"))
    return (low, high) if low <= high else (None, None)  # never taken: nothing is claimed


def _down(value: int, zeros: int) -> int:
    return value >> zeros << zeros


def widened(old: tuple[int, int] | None, low: int, high: int, zeros: int, limits: Iterable[int]) -> Interval:
    """[low, high], grown from `old`, stretched to where a loop that is left at one of `limits` would end: one step
    before it, or at it."""
    unit = 1 << zeros
    if old is None or old[1] != high:
        above = [end for limit in limits for end in (_down(limit - 1, zeros), _down(limit, zeros)) if end >= high]
        if not above:
            return None, None
        high = min(above)
    if old is None or old[0] != low:
        below = [end for limit in limits for end in (_down(limit + unit, zeros), limit) if end <= low]
        if not below:
            return None, None
        low = max(below)
    return low, high
