"""ld and st. Every access is checked against the extents it may touch; bad lanes are masked off before it happens.

By what is known of the address over the lanes, an access is a scalar, one plain vector access, one wide load and a
constant shuffle, a gather over constant offsets, or (varying) a call out of line that looks for runs of 8 lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudaops.emulator import native, sanitizer
from cudaops.emulator.control import results
from cudaops.emulator.isa.integer import BITS, INTS
from cudaops.emulator.isa.table import rule
from cudaops.emulator.lanes import Lanes
from cudaops.emulator.natural import check_alignment
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import TYPE_BITS, Instruction, Mem, Operand, Sym, Vec

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

ORDER = "volatile relaxed weak cta gpu sys cluster mmio v2 v4"
EVICTION = (
    "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate "
    "L2::evict_normal L2::evict_first L2::evict_last L2::cache_hint"
)
LOADS = (
    "global shared shared::cta local const param param::entry acquire nc ca cg cs lu cv L2::64B L2::128B L2::256B "
    f"{ORDER} {EVICTION}"
)
STORES = f"global shared shared::cta local release wb cg cs wt {ORDER} {EVICTION}"
TYPES = f"{BITS} {INTS} b8 s8 u8 f32 f64"
EXTENTS = ("global", "shared", "local", "const", "param")
WIDEST_HULL = 160  # elements: a wider spread of the lanes is gathered


@dataclass
class Access:
    """One ld or st, taken apart."""

    ins: Instruction
    space: str  # global (const too), shared, local, param, generic
    type: str
    items: tuple[Operand, ...]  # registers, one an element
    address: Lanes

    @property
    def element(self) -> str:
        return f"i{max(TYPE_BITS[self.type], 8)}"

    @property
    def bytes(self) -> int:
        return TYPE_BITS[self.type] // 8

    @property
    def total(self) -> int:
        return self.bytes * len(self.items)


def access(g: Codegen, ins: Instruction, register: Operand) -> Access:
    space = next((p.split("::")[0] for p in ins.parts if p.split("::")[0] in EXTENTS), "")
    if not space:
        space = "generic"
    items = register.items if isinstance(register, Vec) else (register,)
    width = next((int(p[1]) for p in ins.parts if p in ("v2", "v4")), 1)
    if len(items) != width and ins.base in ("ld", "ldu", "st"):
        g.unsupported(ins, f"an access of {width} elements to {len(items)} registers")
    return Access(ins, "global" if space == "const" else space, ins.type, items, g.analysis.addresses[id(ins)][0])


@rule("ld", TYPES, LOADS)
@rule("ldu", TYPES, "global v2 v4")
def ld(g: Codegen, ins: Instruction) -> None:
    source = ins.operands[1]
    assert isinstance(source, Mem)
    if ins.parts[1].startswith("param") and isinstance(source.base, Sym):
        _load_parameter(g, ins, source)
        return
    a = access(g, ins, ins.operands[0])
    if g.checks is Checks.SANITIZER and (_is_strong(g, ins) or not g.hull_known(a)):
        _watched_load(g, a, source)
        return
    check_alignment(g, a, source)
    if a.address.uniform:
        values = _load_uniform(g, a, source)
    elif not a.address.varying:
        values = _load_affine(g, a, source)
    else:
        values = _load_varying(g, a, g.address_vector(source, a.space))
    for item, value in zip(a.items, values, strict=True):
        g.write(item, value, a.type, vector=not a.address.uniform)


@rule("st", TYPES, STORES)
def st(g: Codegen, ins: Instruction) -> None:
    target = ins.operands[0]
    assert isinstance(target, Mem)
    a = access(g, ins, ins.operands[1])
    if g.checks is Checks.SANITIZER and (_is_strong(g, ins) or not g.hull_known(a)):
        places = g.address_vector(target, a.space)
        mask = g.mask
        g.watch(a, places, sanitizer.STRONG_WRITE if _is_strong(g, ins) else sanitizer.WRITE)
        _store_varying(g, a, places, [_bits(g, a, g.read(item, a.type, vector=True), True) for item in a.items])
        g.mask = mask
        return
    check_alignment(g, a, target)
    if a.address.uniform:
        _store_uniform(g, a, target)
    elif not a.address.varying:
        _store_affine(g, a, target)
    else:
        values = [_bits(g, a, g.read(item, a.type, vector=True), True) for item in a.items]
        _store_varying(g, a, g.address_vector(target, a.space), values)


def _is_strong(g: Codegen, ins: Instruction) -> bool:
    """Whether it may meet another thread's access without a race (PTX ISA, "Memory consistency model").

    Flags between blocks are often volatile only. In shared memory volatile is what one writes who forgot __syncwarp,
    but for kernels that wait in a loop for what they read so. A plain load of what is then compared and swapped is how
    the CUDA programming guide writes an atomic: the swap finds out whether it is still right.
    """
    if any(r.name in g.flow.compared for r in results(ins)):
        return True
    if "volatile" in ins.parts:
        return "global" in ins.parts or g.flow.polls_volatile
    return bool({"relaxed", "acquire", "release", "mmio"} & set(ins.parts))


def _watched_load(g: Codegen, a: Access, source: Mem) -> None:
    places, mask = g.address_vector(source, a.space), g.mask
    g.watch(a, places, sanitizer.STRONG_READ if _is_strong(g, a.ins) else sanitizer.READ)
    values = _load_varying(g, a, places, raw=True)
    uniform = a.address.uniform
    if uniform:
        values = _of_first_lane(g, a, values)
    g.mask = mask
    for item, value in zip(a.items, _values(g, a, values, not uniform), strict=True):
        g.write(item, value, a.type, vector=not uniform)


def _of_first_lane(g: Codegen, a: Access, values: list[str]) -> list[str]:
    """All lanes read the same: what the first one that may read got."""
    name = g.declare("llvm.cttz.i32", "i32", "i32, i1")
    lane = g.emit(f"call i32 @{name}(i32 {g.bits_of(g.mask_or_full())}, i1 false)")
    lane = g.binary("and", "i32", lane, "31")
    return [g.emit(f"extractelement <32 x {a.element}> {value}, i32 {lane}") for value in values]


def _load_parameter(g: Codegen, ins: Instruction, source: Mem) -> None:
    assert isinstance(source.base, Sym)
    base = g.parameter_offset(ins, source.base.name) + source.offset
    items = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
    size = TYPE_BITS[ins.type] // 8
    for n, item in enumerate(items):
        pointer = g.emit(f"getelementptr i8, ptr {g.argument_block()}, i64 {base + n * size}")
        held = f"b{8 * size}" if ins.type[0] == "f" else ins.type
        g.write(item, g.emit(f"load i{8 * size}, ptr {pointer}, align 1"), held, vector=False)


def _bits(g: Codegen, a: Access, value: str, vector: bool) -> str:
    """A float as the integer of its bits."""
    if a.type[0] != "f":
        return value
    ty = g.llvm(a.type, vector)
    return g.emit(f"bitcast {ty} {value} to {g.shape(a.element, vector)}")


def _values(g: Codegen, a: Access, values: list[str], vector: bool) -> list[str]:
    if a.type[0] != "f":
        return values
    ty = g.llvm(a.type, vector)
    return [g.emit(f"bitcast {g.shape(a.element, vector)} {v} to {ty}") for v in values]


# -- uniform ----------------------------------------------------------------------------------------------------------
def _load_uniform(g: Codegen, a: Access, source: Mem) -> list[str]:
    address = g.address_scalar(source, a.space)

    def fast() -> list[str]:
        return [g.emit(f"load {a.element}, ptr {p}, align 1") for p in g.pointers(address, a)]

    values = g.checked(a, address, a.total, 0, fast, lambda: _slow_scalar_load(g, a, address))
    return _values(g, a, values, False)


def _slow_scalar_load(g: Codegen, a: Access, address: str) -> list[str]:
    places = g.splat_value("i64", address)
    if g.checks is Checks.SANITIZER:  # some lanes may read
        return _of_first_lane(g, a, _load_varying(g, a, places, raw=True))
    g.report(a, places, store=False)
    return ["0"] * len(a.items)


def _store_uniform(g: Codegen, a: Access, target: Mem) -> None:
    """Every lane writes the same place: the highest active lane is the one seen."""
    address = g.address_scalar(target, a.space)
    values = []
    for item in a.items:
        if g.lanes_of(item).uniform:
            values.append(_bits(g, a, g.read(item, a.type, vector=False), False))
        else:
            value = _bits(g, a, g.read(item, a.type, vector=True), True)
            values.append(g.emit(f"extractelement <32 x {a.element}> {value}, i32 {g.last_active_lane()}"))

    def fast() -> list[str]:
        for p, value in zip(g.pointers(address, a), values, strict=True):
            g.line(f"store {a.element} {value}, ptr {p}, align 1")
        return []

    def slow() -> list[str]:
        places = g.splat_value("i64", address)
        if g.checks is Checks.SANITIZER:  # some lanes may write
            _store_varying(g, a, places, [g.splat_value(a.element, value) for value in values])
        else:
            g.report(a, places, store=True)
        return []

    g.checked(a, address, a.total, 0, fast, slow)


# -- affine -----------------------------------------------------------------------------------------------------------
def _load_affine(g: Codegen, a: Access, source: Mem) -> list[str]:
    offsets = a.address.offsets
    assert offsets is not None
    low = min(offsets)
    hull = max(offsets) - low + a.total
    address = g.address_scalar(source, a.space)

    def fast() -> list[str]:
        size = a.bytes
        count = hull // size
        steps = [(o - low) // size for o in offsets]
        if hull % size or any((o - low) % size for o in offsets) or count > WIDEST_HULL:
            return _gather_affine(g, a, address)
        start = g.pointer(address, low)
        if len(a.items) == 1 and steps == list(range(32)):
            return [g.emit(f"load <32 x {a.element}>, ptr {start}, align 1")]
        parts = _Parts(g, a.element, start, count)
        return [parts.pick([s + n for s in steps]) for n in range(len(a.items))]

    values = g.checked(
        a, address, hull, low, fast, lambda: _load_varying(g, a, g.address_vector(source, a.space), raw=True)
    )
    return _values(g, a, values, True)


class _Parts:
    """Neighbouring elements in memory, loaded as vectors of one register each, and lanes picked from them.

    One wide load and a wide shuffle would mean the same, but LLVM takes longer over them and makes more code.
    """

    def __init__(self, g: Codegen, element: str, start: str, count: int) -> None:
        self.g, self.element, self.start = g, element, start
        self.width = min(512 // int(element[1:]), count, 32)
        self.last = count - self.width  # where the last part begins: it may overlap the one before
        self.loaded: dict[int, str] = {}

    def _part(self, begin: int) -> str:
        if begin not in self.loaded:
            size = int(self.element[1:]) // 8
            pointer = self.g.emit(f"getelementptr i8, ptr {self.start}, i64 {begin * size}") if begin else self.start
            self.loaded[begin] = self.g.emit(f"load <{self.width} x {self.element}>, ptr {pointer}, align 1")
        return self.loaded[begin]

    def _shuffle(self, first: str, second: str, width: int, order: list[int]) -> str:
        ty = f"<{width} x {self.element}>"
        return self.g.emit(f"shufflevector {ty} {first}, {ty} {second}, {self.g.constant_vector('i32', order)}")

    def pick(self, indices: list[int]) -> str:
        """The elements of these numbers, one a lane."""
        step = min(512 // int(self.element[1:]), 32)
        pieces = [self._piece(indices[n : n + step]) for n in range(0, len(indices), step)]
        while len(pieces) > 1:
            pieces = [
                self._shuffle(a, b, step, list(range(2 * step))) for a, b in zip(pieces[::2], pieces[1::2], strict=True)
            ]
            step *= 2
        return pieces[0]

    def _piece(self, indices: list[int]) -> str:
        """As many lanes as one register holds, from two parts by one shuffle, and by one more for each further part."""
        places = [(min(n // self.width * self.width, self.last), n) for n in indices]
        first, *others = sorted({begin for begin, _ in places})
        order = [n - first if begin == first else 0 for begin, n in places]
        result, width = self._part(first), self.width
        for n, begin in enumerate(others or [first]):
            if n > 0:
                width, order = len(indices), list(range(len(indices)))
            order = [width + n - begin if b == begin and others else o
                     for o, (b, n) in zip(order, places, strict=True)]  # fmt: skip
            result = self._shuffle(result, self._part(begin) if others else "poison", width, order)
        return result


def _gather_affine(g: Codegen, a: Access, address: str) -> list[str]:
    assert a.address.offsets is not None
    found = []
    for n in range(len(a.items)):
        base = g.splat_value("i64", address)
        places = g.binary("add", "<32 x i64>", base, g.vector_text("i64", [o + n * a.bytes for o in a.address.offsets]))
        pointers = g.emit(f"inttoptr <32 x i64> {places} to <32 x ptr>")
        name = f"llvm.masked.gather.v32{a.element}.v32p0"
        ty = f"<32 x {a.element}>"
        found.append(
            g.emit(
                f"call {ty} @{g.declare(name, ty, '<32 x ptr>, i32, <32 x i1>, ' + ty)}(<32 x ptr> {pointers}, i32 1, "
                f"<32 x i1> {g.mask_or_full()}, {ty} zeroinitializer)"
            )
        )
    return found


def _store_affine(g: Codegen, a: Access, target: Mem) -> None:
    offsets = a.address.offsets
    assert offsets is not None
    low = min(offsets)
    hull = max(offsets) - low + a.total
    address = g.address_scalar(target, a.space)
    values = [_bits(g, a, g.read(item, a.type, vector=True), True) for item in a.items]
    contiguous = [o - low for o in offsets] == [n * a.total for n in range(32)]

    def fast() -> list[str]:
        if not contiguous:
            _store_varying(g, a, g.address_vector(target, a.space), values)
            return []
        count = 32 * len(values)
        whole, mask = interleave(g, a.element, values), g.mask
        ty = f"<{count} x {a.element}>"
        start = g.pointer(address, low)

        def store_all() -> None:
            g.line(f"store {ty} {whole}, ptr {start}, align 1")

        def store_some() -> None:
            if native.vector_extension() != "AVX-512":  # LLVM would make the wide mask bit by bit
                _store_varying(g, a, g.address_vector(target, a.space), values)
                return
            spread = g.mask_or_full() if len(values) == 1 else interleave(g, "i1", [g.mask_or_full()] * len(values))
            name = g.declare(f"llvm.masked.store.v{count}{a.element}.p0", "void", f"{ty}, ptr, i32, <{count} x i1>")
            g.line(f"call void @{name}({ty} {whole}, ptr {start}, i32 1, <{count} x i1> {spread})")

        if mask is None:
            store_all()
        else:
            g.either(g.emit(f"icmp eq i32 {g.bits_of(mask)}, -1"), store_all, store_some)
        return []

    if not contiguous and g.checks is not Checks.SANITIZER:
        fast()  # the out-of-line store does its own checks
        return
    g.checked(a, address, hull, low, fast, lambda: _slow_store(g, a, target, values))


def _slow_store(g: Codegen, a: Access, target: Mem, values: list[str]) -> list[str]:
    _store_varying(g, a, g.address_vector(target, a.space), values)
    return []


def interleave(g: Codegen, element: str, values: list[str]) -> str:
    """v0[0] v1[0] ... v0[1] v1[1] ... as one vector."""
    if len(values) == 1:
        return values[0]
    width, level = 32, list(values)
    while len(level) > 1:
        level = [
            g.emit(
                f"shufflevector <{width} x {element}> {level[i]}, <{width} x {element}> {level[i + 1]}, "
                + g.constant_vector("i32", range(2 * width))
            )
            for i in range(0, len(level), 2)
        ]
        width *= 2
    order = [n * 32 + lane for lane in range(32) for n in range(len(values))]
    ty = f"<{width} x {element}>"
    return g.emit(f"shufflevector {ty} {level[0]}, {ty} poison, {g.constant_vector('i32', order)}")


# -- varying ----------------------------------------------------------------------------------------------------------
def _load_varying(g: Codegen, a: Access, addresses: str, raw: bool = False) -> list[str]:
    if len(a.items) > 1 and a.total in (8, 16) and not g.cold:
        values = _load_wide(g, a, addresses)
        return values if raw else _values(g, a, values, True)
    values = []
    for n in range(len(a.items)):
        places = addresses
        if n:
            places = g.binary("add", "<32 x i64>", addresses, g.vector_text("i64", [n * a.bytes] * 32))
        values.append(g.out_of_line_load(a, places))
    return values if raw else _values(g, a, values, True)


def _load_wide(g: Codegen, a: Access, addresses: str) -> list[str]:
    """A vector load: each lane's bytes go side by side into memory, and are taken apart from there."""
    g.out_of_line_wide(a, addresses)
    count = len(a.items)
    ty = f"<{32 * count} x {a.element}>"
    whole = g.emit(f"load {ty}, ptr %wide, align 64")
    return [
        g.emit(
            f"shufflevector {ty} {whole}, {ty} poison, "
            + g.constant_vector("i32", [count * lane + n for lane in range(32)])
        )
        for n in range(count)
    ]


def _store_varying(g: Codegen, a: Access, addresses: str, values: list[str]) -> None:
    if len(values) > 1 and a.total in (8, 16) and not g.cold:
        whole = interleave(g, a.element, values)
        g.line(f"store <{32 * len(values)} x {a.element}> {whole}, ptr %wide, align 64")
        g.out_of_line_wide_store(a, addresses)
        return
    for n, value in enumerate(values):
        places = addresses
        if n:
            places = g.binary("add", "<32 x i64>", addresses, g.vector_text("i64", [n * a.bytes] * 32))
        g.out_of_line_store(a, places, value)


@rule("prefetch", "", "global local L1 L2 L2::evict_last L2::evict_normal")
@rule("prefetchu", "", "L1")
def prefetch(g: Codegen, ins: Instruction) -> None:
    """A hint."""


@rule("vprintf", "")
def vprintf(g: Codegen, ins: Instruction) -> None:
    """Note the format's address and the arguments of each active lane; they are printed when the launch has ended."""
    places = [g.read(operand, "b64", vector=True) for operand in ins.operands]
    function = g.field("printf", "ptr")
    mask = g.bits_of(g.mask_or_full())
    g.line(f"call void {function}(ptr %ctx, <32 x i64> {places[0]}, <32 x i64> {places[1]}, i32 {mask})")
