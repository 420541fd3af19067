"""Which operands of mma lie spread out in memory (isa/mma.py) where the code being written stands."""

from __future__ import annotations


class Spread:
    """Slots on the stack by family (operand and size), where the least recently used makes room; blocks share none."""

    def __init__(self) -> None:
        self.block: int | None = None
        self.held: dict[str, dict[tuple[str, ...], str]] = {}  # family of slots -> registers -> slot

    def find(self, block: int, family: str, key: tuple[str, ...]) -> str | None:
        if block != self.block:
            self.block, self.held = block, {}
        slots = self.held.get(family, {})
        slot = slots.pop(key, None)
        if slot is not None:
            slots[key] = slot  # the newest now
        return slot

    def take(self, family: str, key: tuple[str, ...], count: int) -> tuple[str, bool]:
        """(a slot, whether it is one not seen before in this block)"""
        slots = self.held.setdefault(family, {})
        fresh = len(slots) < count
        slot = f"%{family}.{len(slots)}" if fresh else slots.pop(next(iter(slots)))
        slots[key] = slot
        return slot, fresh
