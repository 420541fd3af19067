"""Shadow memory: what the sanitizer remembers of every granule of memory, and when the clock says that was.

A granule is as large as the smallest access of the kernel to that kind of memory, at most a word. Beside shared memory
and buffers lie four arrays of 32-bit words, one element a granule; beside local memory a word for each granule of a
warp's threads, a bit for each of them. All that is decided for an access is in the first two arrays, the last two are
read only to put a finding into words.

The clock moves on at every barrier; of two threads' accesses to shared memory those are ordered that one lies between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cudaops.emulator.function import Function
from cudaops.emulator.layout import LAUNCH, WORKER

if TYPE_CHECKING:
    import torch

    from cudaops.emulator.access import Site
    from cudaops.emulator.faults import Buffer

WRITES, READS, WRITE_SITES, READ_SITES = range(4)
ARRAYS = 4
ALONG = 16  # granules that are looked at together: the arrays go on for as long behind the last one

# Shared memory. A word of WRITES is clock | thread << 1 | atomic: less than the block's birth is "not written"; the
# birth itself, "written, by nobody"; IN_FLIGHT, "cp.async was asked to write it, and not yet waited for". A word of
# READS is clock | SEVERAL | SEVERAL_OF_WARP | thread.
CLOCK_SHIFT = 12
TICK = 1 << CLOCK_SHIFT
SEVERAL, SEVERAL_OF_WARP = 1 << 11, 1 << 10
IN_FLIGHT = 2  # less than any birth
LAST_TICK = (1 << 32) - 4 * TICK

# Buffers. A word of WRITES is (block + 1) << 1 | atomic or 0; a word of READS, block + 1, 0 or SEVERAL_BLOCKS.
UNWRITTEN = 1
SEVERAL_BLOCKS = -1


def granule(sites: Sequence[Site], space: str) -> int:
    """Bytes, a power of two: no access to `space` is smaller, nor lies across the granules of such a one."""
    return min(4, *(site.bytes for site in sites if site.bytes and site.space in (space, "generic")), 4)


# -- the clock --------------------------------------------------------------------------------------------------------
def functions() -> list[Function]:
    return [_born(), _ticked(), _tick_warp(), _rewound()]


def _born() -> Function:
    """born(ctx): a block begins. What its shared memory's shadow says is older, so that nothing is written."""
    f = Function("void @cudaops_born(ptr %ctx)")
    f.branch(f.test("eq", "ptr", f.field("shadow", "ptr"), "null"), "out", "on")
    f.place("on")
    f.line("call void @cudaops_tick(ptr %ctx)")
    f.keep("born", f.field("clock"))
    f.line("call void @cudaops_tick(ptr %ctx)")
    warps = f.at("warps", LAUNCH, f.field("launch", "ptr"))
    nbytes = f.binary("mul", "i64", f.binary("mul", "i64", f.field("local_words"), warps), "4")
    f.line(f"call void @llvm.memset.p0.i64(ptr {f.field('local_shadow', 'ptr')}, i8 0, i64 {nbytes}, i1 false)")
    f.jump("out")
    f.place("out")
    f.line("ret void")
    return f


def _ticked() -> Function:
    """tick(ctx): a barrier of the block, for all its warps."""
    f = Function("void @cudaops_tick(ptr %ctx)")
    f.branch(f.test("eq", "ptr", f.field("shadow", "ptr"), "null"), "out", "on")
    f.place("on")
    _advance(f)
    f.keep("block_clock", "%now")
    starts, warps = f.field("warp_clocks", "ptr"), f.at("warps", LAUNCH, f.field("launch", "ptr"))
    now32 = f.trunc("%now")
    f.jump("next")
    f.place("next")
    f.line("%w = phi i64 [ 0, %go ], [ %w.next, %next ]")
    f.line(f"store i32 {now32}, ptr {f.element('i32', starts, '%w')}, align 4")
    f.line("%w.next = add i64 %w, 1")
    f.branch(f.test("ult", "i64", "%w.next", warps), "next", "out")
    f.place("out")
    f.line("ret void")
    return f


def _tick_warp() -> Function:
    """tick_warp(ctx): a barrier of the warp that runs."""
    f = Function("void @cudaops_tick_warp(ptr %ctx)")
    _advance(f)
    place = f.element("i32", f.field("warp_clocks", "ptr"), f.field("warp"))
    f.line(f"store i32 {f.trunc('%now')}, ptr {place}, align 4")
    f.line("ret void")
    return f


def _advance(f: Function) -> None:
    """%now, one tick later; a clock that has come to its end starts again."""
    late = f.test("ugt", "i64", f.field("clock"), str(LAST_TICK))
    f.line(f"br i1 {late}, label %rewind, label %go, !prof !1")
    f.place("rewind")
    f.line("call void @cudaops_rewind(ptr %ctx)")
    f.jump("go")
    f.place("go")
    f.line(f"%now = add i64 {f.field('clock')}, {TICK}")
    f.keep("clock", "%now")


def _rewound() -> Function:
    """rewind(ctx): forget who wrote and read shared memory, but not what was written."""
    f = Function("void @cudaops_rewind(ptr %ctx) noinline")
    shift, born = f.field("shadow_shift"), f.trunc(f.field("born"))
    first = f.binary("lshr", "i64", f.field("shared"), shift)
    writes = f.element("i32", f.field("shadow", "ptr"), first)
    reads = f.past(writes, f.field("shadow_distance"))
    last = f.binary("lshr", "i64", f.field("shared_bytes"), shift)  # behind a last granule that is not whole
    f.jump("next")
    f.place("next")
    f.line("%n = phi i64 [ 0, %entry ], [ %n.next, %next ]")
    at = f.element("i32", writes, "%n")
    written = f.test("uge", "i32", f.load("i32", at, 4), born)
    f.line(f"store i32 {f.emit(f'select i1 {written}, i32 {TICK}, i32 0')}, ptr {at}, align 4")
    f.line(f"store i32 0, ptr {f.element('i32', reads, '%n')}, align 4")
    f.line("%n.next = add i64 %n, 1")
    f.branch(f.test("ule", "i64", "%n.next", last), "next", "warps")
    f.place("warps")
    f.keep("born", str(TICK))
    f.keep("clock", str(2 * TICK))
    f.keep("block_clock", str(2 * TICK))
    starts, warps = f.field("warp_clocks", "ptr"), f.at("warps", LAUNCH, f.field("launch", "ptr"))
    f.jump("warp")
    f.place("warp")
    f.line("%w = phi i64 [ 0, %warps ], [ %w.next, %warp ]")
    f.line(f"store i32 {2 * TICK}, ptr {f.element('i32', starts, '%w')}, align 4")
    f.line("%w.next = add i64 %w, 1")
    f.branch(f.test("ult", "i64", "%w.next", warps), "warp", "out")
    f.place("out")
    f.line("ret void")
    return f


# -- the memory -------------------------------------------------------------------------------------------------------
_spare: list[np.ndarray[Any, Any]] = []  # of launches that are over: fresh pages cost more than zeroing used ones
MOST_SPARE = 1 << 24  # words


class _Arrays:
    """The four arrays of [start, end); `bias` is where those of the granule at address 0 would be."""

    def __init__(self, start: int, end: int, shift: int) -> None:
        self.first, self.shift = start >> shift, shift
        self.length = -(-end >> shift) - self.first + ALONG
        self.distance = 4 * self.length

    def lay(self, words: np.ndarray[Any, Any], at: int) -> int:
        """Put them into zeroed memory; where they end."""
        end = at + ARRAYS * self.length
        self.words = words[at:end].reshape(ARRAYS, self.length)
        self.bias = self.words.ctypes.data - 4 * self.first
        return end

    def unwrite(self, start: int, end: int, whole: bool) -> None:
        """Nothing has written [start, end) yet; `whole`: nor the rest of the last granule."""
        last = -(-end >> self.shift) if whole else end >> self.shift
        self.words[WRITES, -(-start >> self.shift) - self.first : last - self.first] = UNWRITTEN


class Shadow:
    """The shadow memory of one launch, by one worker."""

    def __init__(
        self, sites: Sequence[Site], shared: tuple[int, int], local_bytes: int, warps: int, blocks: int,
        extents: Sequence[Buffer], uninitialised: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self.shifts = {s: granule(sites, s).bit_length() - 1 for s in ("shared", "local", "global")}
        self.released = np.zeros(blocks, dtype=np.uint8)
        self.warp_clocks = np.zeros(warps, dtype=np.int32)
        self.local_words = local_bytes >> self.shifts["local"]
        self.local = np.zeros(warps * self.local_words + 1, dtype=np.int32)
        self.shared = _Arrays(shared[0], shared[0] + shared[1], self.shifts["shared"])
        arrays = _of_extents(extents, self.shifts["global"])
        self.memory = _zeros(ARRAYS * sum(a.length for a in {self.shared, *arrays}))
        end = self.shared.lay(self.memory, 0)
        for a in dict.fromkeys(arrays):
            end = a.lay(self.memory, end)
        self.places = np.array([(a.bias, a.distance) for a in arrays] or [(0, 0)], dtype=np.int64)
        fresh = [(e.address, e.address + e.nbytes) for e in extents if not e.initialised]
        fresh += [(t.data_ptr(), t.untyped_storage().data_ptr() + t.untyped_storage().nbytes()) for t in uninitialised]
        for extent, a in zip(extents, arrays, strict=True):
            end = extent.address + extent.nbytes
            for low, high in fresh:
                if low < end and high > extent.address:
                    a.unwrite(max(low, extent.address), min(high, end), high >= end)

    def give_back(self) -> None:
        """The launch is over."""
        if len(self.memory) <= MOST_SPARE:
            _spare[:] = [self.memory]

    def attach(self, launch: ctypes.Array[ctypes.c_int64], fields: ctypes.Array[ctypes.c_int64]) -> None:
        """Tell the launch and its worker where everything is."""
        for structure, offsets, values in (
            (
                launch, LAUNCH,
                {"shadows": self.places.ctypes.data, "released": self.released.ctypes.data,
                 "granule_shift": self.shifts["global"]},
            ),
            (
                fields, WORKER,
                {"shadow": self.shared.bias, "shadow_distance": self.shared.distance,
                 "shadow_shift": self.shifts["shared"], "warp_clocks": self.warp_clocks.ctypes.data,
                 "local_shadow": self.local.ctypes.data, "local_words": self.local_words,
                 "local_shift": self.shifts["local"]},
            ),
        ):  # fmt: skip
            for name, value in values.items():
                structure[offsets[name] // 8] = value


def _zeros(words: int) -> np.ndarray[Any, Any]:
    try:
        found = _spare.pop()
    except IndexError:
        return np.zeros(words, dtype=np.int32)
    if len(found) < words:
        return np.zeros(words, dtype=np.int32)
    found[:words] = 0
    return found


def _of_extents(extents: Sequence[Buffer], shift: int) -> list[_Arrays]:
    """Arrays for each extent; those that overlap, or share a granule, have the same ones."""
    order = sorted(range(len(extents)), key=lambda n: extents[n].address)
    groups: list[tuple[int, int, list[int]]] = []
    for n in order:
        low, high = extents[n].address, extents[n].address + extents[n].nbytes
        if groups and low >> shift < -(-groups[-1][1] >> shift):
            start, end, members = groups[-1]
            groups[-1] = start, max(end, high), [*members, n]
        else:
            groups.append((low, high, [n]))
    found = {n: arrays for s, e, members in groups for arrays in [_Arrays(s, e, shift)] for n in members}
    return [found[n] for n in range(len(extents))]
