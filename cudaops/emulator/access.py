"""Addresses and checked accesses: what ld and st (isa/memory.py) are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cudaops.emulator import hull, layout, shadow
from cudaops.emulator.control import results, sources
from cudaops.emulator.lanes import ZERO, Geometry, Lanes
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import Function, Imm, Instruction, Mem, Module, Operand, Reg, Sym
from cudaops.emulator.spread import Spread
from cudaops.emulator.values import Values


@dataclass(frozen=True)
class Site:
    """A place in the source that may fault."""

    file: str
    line: int
    opcode: str
    bytes: int
    space: str


def _memory(space: str) -> str:
    """Which of the sanitizer's three kinds of memory a state space is in."""
    return space if space in ("shared", "local") else "global"


class Access(Protocol):
    """What an ld or st touches (isa/memory.py has the real one)."""

    ins: Instruction
    space: str
    items: tuple[Operand, ...]
    address: Lanes

    @property
    def element(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def total(self) -> int: ...


class Accesses(Values):
    def __init__(
        self, module: Module, function: Function, geometry: Geometry, dynamic_shared: int, checks: Checks
    ) -> None:
        super().__init__(module, function, geometry, dynamic_shared, checks)
        self.sites: list[Site] = []
        self.site_numbers: dict[Site, int] = {}
        self.slots: dict[object, int] = {}
        self.origin = self._origins()
        self.hulls: dict[hull.Hull, str] = {}  # what the sanitizer is told of accesses, by name
        self.spread = Spread()
        self.cold = False  # on a path that is hardly ever taken: calls there must not make the others spill

    def _origins(self) -> dict[str, frozenset[str]]:
        """register -> the 64-bit parameters it comes from: accesses by one pointer share a cached extent."""
        origin: dict[str, frozenset[str]] = {}
        changed = True
        while changed:
            changed = False
            for b in self.flow.reachable:
                for ins in self.flow.blocks[b].instructions:
                    if not ins.opcode.endswith("64"):
                        continue
                    if ins.base == "ld":
                        if not ins.opcode.startswith("ld.param"):
                            continue
                        address = ins.operands[1]
                        assert isinstance(address, Mem)
                        found = frozenset({str(address.base) + str(address.offset)})
                    else:
                        found = frozenset().union(*(origin.get(r.name, frozenset()) for r in sources(ins)))
                    for register in results(ins):
                        merged = origin.get(register.name, frozenset()) | found
                        if merged != origin.get(register.name):
                            origin[register.name] = merged
                            changed = True
        return origin

    def address_scalar(self, operand: Mem, space: str) -> str:
        """S of an address as a host address."""
        base = operand.base
        if isinstance(base, Reg):
            value = self.read(base, "b64", vector=False)
        elif isinstance(base, Imm):
            value = str(base.value)
        else:
            value = self._symbol(base.name)
        offset = operand.offset
        if space == "shared":
            if not value.startswith("%"):
                value, offset = "0", offset + int(value)
            value = self.binary("add", "i64", "%shared", value) if value != "0" else "%shared"
        if space == "param":
            value = self.binary("add", "i64", value, self.argument_address())
        return self.binary("add", "i64", value, str(offset)) if offset else value

    def address_vector(self, operand: Mem, space: str) -> str:
        value = self.read(operand.base, "b64", vector=True)
        if space == "shared":
            value = self.binary("add", "<32 x i64>", value, self.splat_value("i64", "%shared"))
        if space == "param":
            value = self.binary("add", "<32 x i64>", value, self.splat_value("i64", self.argument_address()))
        if operand.offset:
            value = self.binary("add", "<32 x i64>", value, f"splat (i64 {operand.offset})")
        return value

    def pointer(self, address: str, offset: int) -> str:
        value = self.binary("add", "i64", address, str(offset)) if offset else address
        return self.emit(f"inttoptr i64 {value} to ptr")

    def pointers(self, address: str, access: Access) -> list[str]:
        return [self.pointer(address, n * access.bytes) for n in range(len(access.items))]

    def checked(
        self,
        access: Access,
        address: str,
        size: int,
        low: int,
        fast: Callable[[], list[str]],
        slow: Callable[[], list[str]],
    ) -> list[str]:
        """`fast` if [address + low, + size) lies inside one extent, else `slow`; the values of either.

        With the sanitizer on, `slow` is for lanes that it does not vouch for as well, and the mask is without them.
        """
        if self.checks is Checks.NONE:
            return fast()
        if self.checks is Checks.SANITIZER:
            start = self.binary("add", "i64", address, str(low)) if low else address
            return self._watched(access, start, fast, slow)
        if access.space == "shared":
            span = access.address.span
            if span is not None and span[0] >= 0 and span[1] + access.total <= self.shared_bytes:
                return fast()
        _, slot = self.site(access)
        start = self.binary("add", "i64", address, str(low)) if low else address
        slots = self.emit(f"getelementptr i8, ptr %slots, i64 {slot * layout.SLOT_BYTES}")
        known = self.emit(f"load i64, ptr {slots}, align 8")
        length = self.emit(f"load i64, ptr {self.emit(f'getelementptr i8, ptr {slots}, i64 8')}, align 8")
        into = self.binary("sub", "i64", start, known)
        room = self.binary("sub", "i64", length, str(size))
        # A slot holds at least one byte more than nothing: an empty one has length -2^63, so that room is negative.
        fits = self.emit(f"icmp sle i64 {into}, {room}")
        above = self.emit(f"icmp sge i64 {into}, 0")
        good = self.binary("and", "i1", fits, above)
        ask, do, bad = (self.label(p) for p in ("ask", "do", "bad"))
        self.line(f"br i1 {good}, label %{do}, label %{ask}, !prof !0")
        self.place(ask)
        find = self.field("hull", "ptr")
        code = layout.SPACES[access.space]
        found = self.emit(f"call preserve_allcc i1 {find}(ptr %ctx, i64 {start}, i64 {size}, i32 {slot}, i32 {code})")
        self.line(f"br i1 {found}, label %{do}, label %{bad}")
        return self._either(access, do, bad, fast, slow)

    def _watched(
        self, access: Access, start: str, fast: Callable[[], list[str]], slow: Callable[[], list[str]]
    ) -> list[str]:
        """Let the sanitizer see an access of which `hull_known` holds."""
        mask = self.mask
        function = self.field(f"watch_{_memory(access.space)}_{'store' if access.ins.base == 'st' else 'load'}", "ptr")
        lanes = self.emit(
            f"call i64 {function}(ptr %ctx, i64 {start}, i32 {self.bits_of(self.mask_or_full())}, "
            f"ptr @{self._hull(access)})"
        )
        whole = self.emit(f"icmp eq i64 {lanes}, {hull.WHOLE}")
        do, bad = self.label("do"), self.label("bad")
        self.line(f"br i1 {whole}, label %{do}, label %{bad}, !prof !0")

        def some() -> list[str]:
            self.mask = self.emit(f"bitcast i32 {self.emit(f'trunc i64 {lanes} to i32')} to <32 x i1>")
            values = slow()
            self.mask = mask
            return values

        return self._either(access, do, bad, fast, some)

    def hull_known(self, access: Access) -> bool:
        """Whether the sanitizer can be shown this access as one hull (hull.py)."""
        offsets = access.address.offsets
        if offsets is None or access.space == "generic":
            return False
        if access.space == "local":
            return offsets == self.analysis.local_offsets
        low = min(offsets)
        if access.space == "param" and offsets != ZERO:
            return False  # parameters may be smaller than a granule
        straight = all((o - low) % access.total == 0 for o in offsets)
        return straight and max(offsets) - low + access.total <= hull.WIDEST

    def _hull(self, access: Access) -> str:
        """The name of what describes an access."""
        offsets = access.address.offsets
        assert offsets is not None
        site, slot = self.site(access)
        low = min(offsets)
        found = hull.Hull(tuple(o - low for o in offsets), access.total, site, slot, layout.SPACES[access.space])
        return self.hulls.setdefault(found, f"access{len(self.hulls)}")

    def hull_tables(self) -> list[str]:
        """What describes them all; how large granules are is known when all sites are."""
        spaces = {code: _memory(name) for name, code in layout.SPACES.items()}
        return [h.text(name, shadow.granule(self.sites, spaces[h.spaces])) for h, name in self.hulls.items()]

    def _either(
        self, access: Access, do: str, bad: str, fast: Callable[[], list[str]], slow: Callable[[], list[str]]
    ) -> list[str]:
        """The blocks `do` with `fast` and `bad`, seldom gone to, with `slow`; the values of either."""
        join = self.label("join")
        # Splats made on one side are not there on the other.
        kept = dict(self.splats)
        vectors, scalars = dict(self.vectors), dict(self.scalars)
        self.place(bad)
        self.cold = True
        other = slow()
        self.cold = False
        self.splats, self.vectors, self.scalars = dict(kept), dict(vectors), dict(scalars)
        from_bad = self._current_label()
        self.line(f"br label %{join}")
        self.place(do)
        values = fast()
        from_do = self._current_label()
        self.line(f"br label %{join}")
        self.splats, self.vectors, self.scalars = kept, vectors, scalars
        self.place(join)
        ty = self.shape(access.element, not access.address.uniform)
        return [
            self.emit(f"phi {ty} [ {v}, %{from_do} ], [ {w}, %{from_bad} ]") for v, w in zip(values, other, strict=True)
        ]

    def either(self, test: str, likely: Callable[[], None], unlikely: Callable[[], None]) -> None:
        """One of two ways, which give no values; what either reads first is not there afterwards."""
        ways, on = [self.label("way"), self.label("way")], self.label("on")
        self.line(f"br i1 {test}, label %{ways[0]}, label %{ways[1]}, !prof !0")
        kept, vectors, scalars = dict(self.splats), dict(self.vectors), dict(self.scalars)
        for way, act in zip(ways, (likely, unlikely), strict=True):
            self.place(way)
            act()
            self.line(f"br label %{on}")
            self.splats, self.vectors, self.scalars = dict(kept), dict(vectors), dict(scalars)
        self.place(on)

    def _current_label(self) -> str:
        for line in reversed(self.lines):
            if line.endswith(":") and not line.startswith(" "):
                return line[:-1]
        return "entry"

    def site_of(self, ins: Instruction) -> int:
        """The number of a place in the source."""
        return self._numbered(Site(ins.file, ins.line, ins.opcode, 0, ""))

    def _numbered(self, site: Site) -> int:
        number = self.site_numbers.setdefault(site, len(self.sites))
        if number == len(self.sites):
            self.sites.append(site)
        return number

    def site(self, access: Access) -> tuple[int, int]:
        """(number of this access site, its extent slot)"""
        ins = access.ins
        number = self._numbered(Site(ins.file, ins.line, ins.opcode, access.total, access.space))
        if access.space == "shared":
            return number, layout.SHARED_SLOT
        if access.space == "local":
            return number, layout.LOCAL_SLOT
        address = next(o for o in ins.operands if isinstance(o, Mem))
        key: object = id(ins)
        if isinstance(address.base, Reg):
            key = self.origin.get(address.base.name) or key
        elif isinstance(address.base, Sym):
            key = address.base.name
        slot = self.slots.setdefault(key, len(self.slots) + layout.FIRST_SLOT)
        return number, slot

    def out_of_line_load(self, access: Access, places: str) -> str:
        site, slot = self.site(access)
        element = access.element
        where = f"i32 {self.bits_of(self.mask_or_full())}, i32 {site}, i32 {slot}, i32 {layout.SPACES[access.space]}"
        if self.cold:
            function = self.field(f"cold_load{element[1:]}", "ptr")
            self.line(f"store <32 x i64> {places}, ptr %cold.places, align 64")
            self.line(f"call preserve_allcc void {function}(ptr %ctx, ptr %cold.places, ptr %cold.value, {where})")
            return self.emit(f"load <32 x {element}>, ptr %cold.value, align 64")
        function = self.field(f"load{element[1:]}", "ptr")
        return self.emit(f"call <32 x {element}> {function}(ptr %ctx, <32 x i64> {places}, {where})")

    def out_of_line_wide(self, access: Access, places: str) -> None:
        """All of a vector load's bytes, lane by lane, to %wide."""
        self._wide(access, places, "wide")

    def out_of_line_wide_store(self, access: Access, places: str) -> None:
        """All of a vector store's bytes, lane by lane, from %wide."""
        self._wide(access, places, "wide_store")

    def _wide(self, access: Access, places: str, name: str) -> None:
        site, slot = self.site(access)
        where = (
            f"i32 {self.bits_of(self.mask_or_full())}, i32 {site}, i32 {slot}, i32 {layout.SPACES[access.space]}, "
            "ptr %wide"
        )
        if self.cold:
            function = self.field(f"cold_{name}{access.total}", "ptr")
            self.line(f"store <32 x i64> {places}, ptr %cold.places, align 64")
            self.line(f"call preserve_allcc void {function}(ptr %ctx, ptr %cold.places, {where})")
            return
        function = self.field(f"{name}{access.total}", "ptr")
        self.line(f"call void {function}(ptr %ctx, <32 x i64> {places}, {where})")

    def out_of_line_store(self, access: Access, places: str, value: str) -> None:
        site, slot = self.site(access)
        element = access.element
        where = f"i32 {self.bits_of(self.mask_or_full())}, i32 {site}, i32 {slot}, i32 {layout.SPACES[access.space]}"
        if self.cold:
            function = self.field(f"cold_store{element[1:]}", "ptr")
            self.line(f"store <32 x i64> {places}, ptr %cold.places, align 64")
            self.line(f"store <32 x {element}> {value}, ptr %cold.value, align 64")
            self.line(f"call preserve_allcc void {function}(ptr %ctx, ptr %cold.places, ptr %cold.value, {where})")
            return
        function = self.field(f"store{element[1:]}", "ptr")
        self.line(f"call void {function}(ptr %ctx, <32 x i64> {places}, <32 x {element}> {value}, {where})")

    def watch(self, access: Access, places: str, kind: int) -> None:
        """Let the sanitizer see an access; from here on the mask is of the lanes that may make it."""
        if {"release", "acq_rel", "sc"} & set(access.ins.parts):
            self.note_fence(access.ins)
        site, slot = self.site(access)
        function = self.field("watch", "ptr")
        allowed = self.emit(
            f"call i32 {function}(ptr %ctx, <32 x i64> {places}, i32 {self.bits_of(self.mask_or_full())}, "
            f"i32 {access.total}, i32 {kind}, i32 {site}, i32 {slot}, i32 {layout.SPACES[access.space]})"
        )
        self.mask = self.emit(f"bitcast i32 {allowed} to <32 x i1>")

    def note_fence(self, ins: Instruction) -> None:
        """What the block has written is released by its next strong write; a release is both in one."""
        for name in ("fenced_block",) if "cta" in ins.parts else ("fenced_block", "fenced"):
            pointer = self.emit(f"getelementptr i8, ptr %ctx, i64 {layout.WORKER[name]}")
            self.line(f"store i64 1, ptr {pointer}, align 8")

    def require_alignment(self, ins: Instruction, space: str, places: str, nbytes: int, lanes: int) -> None:
        """A finding for each of the first `lanes` lanes whose address is no multiple of `nbytes`."""
        if self.checks is not Checks.SANITIZER:
            return
        site = self._numbered(Site(ins.file, ins.line, ins.opcode, nbytes, space))
        some = (1 << lanes) - 1
        mask = self.binary("and", "i32", self.bits_of(self.mask_or_full()), str(some))
        function = self.field("aligned", "ptr")
        self.emit(f"call i32 {function}(ptr %ctx, <32 x i64> {places}, i32 {mask}, i64 {nbytes}, i64 {site})")

    def report(self, access: Access, places: str, store: bool) -> None:
        """Record a fault at `places`, which the caller knows to be outside every extent."""
        if store:
            self.out_of_line_store(access, places, "zeroinitializer")
        else:
            self.out_of_line_load(access, places)
