"""What a launch found wrong, in words: where in the source, which thread, and which element of which argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cudaops.emulator import layout, sanitizer
from cudaops.emulator.access import Site
from cudaops.emulator.lanes import WARP
from cudaops.emulator.sanitizer import CHECKS, Record


class Buffer(NamedTuple):
    """Memory that a launch may access: `nbytes` from the host address on, named in messages."""

    address: int
    nbytes: int
    name: str
    initialised: bool = True  # False: the sanitizer reports bytes read before the launch wrote them


_TRAPS = {
    "__assertfail": "an assertion failed",
    "call": "a call through a pointer, which points to none of the functions that could be called there",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of the sanitizer.

    `check` is 'memcheck', 'racecheck', 'initcheck' or 'synccheck'; `block` and `thread` are (x, y, z); `argument` and
    `index` name the element touched, where it lies in a buffer of the launch or in shared memory ('shared', by bytes).
    """

    check: str
    kernel: str
    file: str
    line: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    argument: str | None
    index: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Place:
    """What is needed to put a record into words."""

    kernel: str
    sites: Sequence[Site]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    extents: Sequence[Buffer]
    shared: tuple[int, int]  # host address and bytes
    max_steps: int | None
    warps: Sequence[tuple[int, int]]  # of the block: (program counter, number of the site) where each stands

    def finding(self, record: Record) -> Finding:
        stands = self._first_waiting() if record.kind == layout.ERROR_DEADLOCK else record.site
        site = self.sites[stands]
        block = self.block_of(record.block)
        thread = self.thread_of(record.warp * WARP + record.lane)
        argument, index, place = self.element(site, record.address)
        head = f"{self.kernel}: {site.file}:{site.line}: "
        who = f"block {block}, thread {thread} "
        verb = "writes" if site.opcode.startswith(("st", "red", "atom", "wmma.store", "mbarrier")) else "reads"
        match record.kind:
            case layout.ERROR_BARRIER:
                text = (
                    f"block {block}, warp {record.warp}: {site.opcode} in divergent code is not reached by every "
                    "thread; move it out of the branch"
                )
            case layout.ERROR_DEADLOCK:
                text = f"block {block}: deadlock, no warp can go on: {self._standing()}{self._hint()}"
            case layout.ERROR_TRAP:
                what = _TRAPS.get(site.opcode, f"the kernel executed {site.opcode}")
                text = f"block {block}, warp {record.warp}: {what}"
            case layout.ERROR_ARRIVALS:
                text = f"{who}arrives by {site.opcode} at {place}, where this phase expects nobody any more"
            case layout.ERROR_NUMBER:
                text = (
                    f"block {block}, warp {record.warp}: {site.opcode} has a number of a barrier beyond 15, or a count "
                    "of threads that is no multiple of 32 from 32 to 1024"
                )
            case layout.ERROR_STEPS:
                text = (
                    f"block {block}: more than {self.max_steps} loop iterations (max_steps); is this loop infinite? "
                    "If not, raise the limit"
                )
            case sanitizer.MISALIGNED:
                text = f"{who}{verb} {site.bytes} bytes {place}, which is not a multiple of {site.bytes} bytes away"
            case sanitizer.UNINITIALISED:
                text = f"{who}reads {site.bytes} bytes {place}, which nothing has written"
            case sanitizer.IN_FLIGHT:
                text = (
                    f"{who}reads {site.bytes} bytes {place}, which {self.other_line(record)} is still to bring; "
                    "wait for its group, and then at a barrier"
                )
            case sanitizer.RACE_SHARED:
                text = f"{who}{verb} {place} in a race with {self.other_thread(record)}: no barrier lies between"
            case sanitizer.RACE_GLOBAL:
                text = f"{who}{verb} {place} in a race with {self.other_block(record)}: blocks have no order"
            case sanitizer.OTHER_BARRIER:
                text = (
                    f"block {block}, warp {record.warp} waits at {site.opcode} while warp {record.other} waits at "
                    f"{self.other_line(record)}; every thread must come to the same barrier"
                )
            case sanitizer.INACTIVE_LANE:
                text = f"{who}gets by {site.opcode} the value of lane {record.other}, which does not take part in it"
            case sanitizer.NOT_MEMBER:
                text = f"{who}executes {site.opcode} without being in its own member mask"
            case sanitizer.MISSING_MEMBER:
                text = f"{who}names lane {record.other} as a member of {site.opcode}, which that lane does not execute"
            case _:
                verb = "writes" if record.kind == layout.ERROR_STORE else "reads"
                text = f"{who}{verb} {site.bytes} bytes {self.outside(site, record.address)}"
        check = CHECKS.get(record.kind, "")
        return Finding(check, self.kernel, site.file, site.line, block, thread, argument, index, head + text)

    def _first_waiting(self) -> int:
        return next((site for pc, site in self.warps if pc > 0), 0)

    def _standing(self) -> str:
        """Where the warps of the block stand, those at one place together."""
        places: dict[int, list[int]] = {}
        for warp, (pc, number) in enumerate(self.warps):
            places.setdefault(number if pc > 0 else -1, []).append(warp)
        return "; ".join(self._standing_at(number, warps) for number, warps in places.items())

    def _hint(self) -> str:
        """What may be the matter where warps look at what other blocks should write."""
        looks = any(pc > 0 and not self.sites[number].opcode.startswith("bar") for pc, number in self.warps)
        if not looks or self.grid == (1, 1, 1):
            return ""
        return (
            "; blocks are run in order, each to its end, and at once only as many as there are threads (under the "
            "sanitizer one): let none wait for a later one, or launch fewer"
        )

    def _standing_at(self, number: int, warps: Sequence[int]) -> str:
        who = f"warp {warps[0]}" if len(warps) == 1 else f"warps {_ranges(warps)}"
        if number < 0:
            return f"{who} ended"
        site = self.sites[number]
        does = "stopped at" if site.opcode.startswith("bar") else "looked in vain, again and again, in the loop of"
        return f"{who} {does} {site.opcode} at {site.file}:{site.line}"

    def block_of(self, b: int) -> tuple[int, int, int]:
        gx, gy, _ = self.grid
        return b % gx, b // gx % gy, b // (gx * gy)

    def thread_of(self, t: int) -> tuple[int, int, int]:
        x, y, _ = self.block
        return t % x, t // x % y, t // (x * y)

    def other_line(self, record: Record) -> str:
        if not 0 <= record.other_site < len(self.sites):
            return "elsewhere"
        site = self.sites[record.other_site]
        return f"{site.opcode} at {site.file}:{site.line}"

    def other_thread(self, record: Record) -> str:
        if record.other >= 0:
            return f"thread {self.thread_of(record.other)}, {self.other_line(record)}"
        if record.other == sanitizer.SEVERAL:
            return f"several threads, {self.other_line(record)}"
        return f"several threads of warp {-record.other - 2}, {self.other_line(record)}"

    def other_block(self, record: Record) -> str:
        if record.other > 0:
            return f"block {self.block_of(record.other - 1)}, {self.other_line(record)}"
        return f"several blocks, {self.other_line(record)}"

    def element(self, site: Site, address: int) -> tuple[str | None, int | None, str]:
        """(argument, index, words) of an address inside something known."""
        address &= 2**64 - 1
        size = max(site.bytes, 1)
        if site.space == "local":
            return None, None, "of its local memory"
        start, length = self.shared
        if start <= address < start + length:
            return "shared", address - start, f"shared[{address - start}] (bytes)"
        for extent in self.extents:
            if extent.address <= address < extent.address + extent.nbytes:
                offset = address - extent.address
                if offset % size:
                    return extent.name, None, f"byte {offset} of {extent.name}"
                return extent.name, offset // size, f"{extent.name}[{offset // size}]"
        return None, None, f"address {address:#x}"

    def outside(self, site: Site, address: int) -> str:
        address &= 2**64 - 1
        if site.space == "shared":
            offset, length = address - self.shared[0], self.shared[1]
            return f"at shared[{offset}] (bytes), but the block has {length} bytes of shared memory"
        if site.space == "local":
            return "outside its local memory"
        if not self.extents:
            return f"at address {address:#x}, but the launch has no buffers"

        def distance(extent: Buffer) -> int:
            return max(extent.address - address, address - (extent.address + extent.nbytes), 0)

        near = min(self.extents, key=distance)
        if distance(near) > 1 << 32:
            return f"at address {address:#x}, which is in none of the launch's buffers"
        offset, size = address - near.address, max(site.bytes, 1)
        if offset % size:
            return f"at byte {offset} of {near.name}, which has {near.nbytes} bytes"
        return f"at {near.name}[{offset // size}], but {near.name} has {near.nbytes // size} elements of {size} bytes"


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 5"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
