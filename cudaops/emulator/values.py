"""The values of a PTX function as LLVM values: registers, literals, special registers, addresses of variables.

A 32-bit register is <32 x i32> or <32 x float>, a predicate <32 x i1>; what is the same in all lanes, or differs by a
constant of the lane, is one scalar (see lanes.py). An instruction is written in one of two shapes: on the scalars, or
on vectors of 32 lanes. Within a block every register is loaded from its home and stored to it at most once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from cudaops.emulator import layout, native
from cudaops.emulator.approximate import APPROXIMATE
from cudaops.emulator.control import Flow
from cudaops.emulator.lanes import LANE, WARP, ZERO, Geometry, LaneAnalysis, Lanes
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import TYPE_BITS, Function, Imm, Instruction, Mem, Module, Operand, Reg, Special, Sym
from cudaops.emulator.text import Text, argument_types, element_bits, float_text, integer_text, llvm_type
from cudaops.errors import EmulatorError


class Values(Text):
    def __init__(
        self, module: Module, function: Function, geometry: Geometry, dynamic_shared: int, checks: Checks
    ) -> None:
        super().__init__()
        self.module, self.function, self.geometry = module, function, geometry
        self.checks = checks
        self._lay_out_memory(dynamic_shared)
        for collectives in (False, True):
            self.flow = Flow(function, collectives)
            symbols, local = self.shared_offsets | self.parameters, frozenset(self.local_offsets)
            self.analysis = LaneAnalysis(self.flow, geometry, symbols, self.local_bytes, local)
            if not self.flow.stops_at_collectives(self.analysis.masked):
                break
        self.globals_used: list[str] = []
        self.tables: dict[str, str] = {}  # constant data that the code refers to
        self.helpers: dict[str, str] = {}  # functions that this kernel's instructions call
        self.homes: dict[str, str] = {}  # register -> pointer to where it lives between blocks
        # state of the block being written
        self.block = 0
        self.mask: str | None = None  # None: all 32 lanes
        self.scalars: dict[str, str] = {}
        self.vectors: dict[str, str] = {}
        self.splats: dict[tuple[str, str], str] = {}
        self.pending: dict[str, int] = {}  # writes of a register that the block has still to make
        # state of the instruction being written
        self.vector = False  # its shape
        self.lanes = Lanes(None)  # its result over the lanes

    # -- memory layout ------------------------------------------------------------------------------------------------
    def _lay_out_memory(self, dynamic_shared: int) -> None:
        named: set[str] = set()
        for block in self.function.blocks:
            for ins in block.instructions:
                for operand in ins.operands:
                    base = operand.base if isinstance(operand, Mem) else operand
                    if isinstance(base, Sym):
                        named.add(base.name)
        self.shared_offsets: dict[str, int] = {}
        self.local_offsets: dict[str, int] = {}
        shared = [v for v in self.function.variables if v.space == "shared"]
        shared += [v for v in self.module.variables.values() if v.space == "shared" and v.name in named]
        offset = 0
        for v in sorted((v for v in shared if not v.extern), key=lambda v: -v.align):
            offset = -(-offset // v.align) * v.align
            self.shared_offsets[v.name] = offset
            offset += v.size
        for v in shared:
            if v.extern:  # all dynamic arrays are one, behind the static ones
                offset = -(-offset // max(v.align, 16)) * max(v.align, 16)
        self.static_shared_bytes = offset
        for v in shared:
            if v.extern:
                self.shared_offsets[v.name] = offset
        self.shared_bytes = offset + dynamic_shared
        offset = 0
        for v in self.function.variables:
            if v.space == "local":
                offset = -(-offset // v.align) * v.align
                self.local_offsets[v.name] = offset
                offset += v.size
        self.local_bytes = -(-offset // 16) * 16
        self.parameters: dict[str, int] = {}
        offset = 0
        for p in self.function.params:
            offset = -(-offset // p.align) * p.align
            self.parameters[p.name] = offset
            offset += p.size

    # -- types and constants ------------------------------------------------------------------------------------------
    def shape(self, element: str, vector: bool) -> str:
        return f"<32 x {element}>" if vector else element

    def vector_of(self, element: str) -> str:
        """The element type in the shape of the instruction being written."""
        return self.shape(element, self.vector)

    def llvm(self, type_: str, vector: bool) -> str:
        return self.shape(llvm_type(type_), vector)

    def ty(self, type_: str) -> str:
        return self.llvm(type_, self.vector)

    def element(self, type_: str) -> str:
        return llvm_type(type_)

    def suffix(self, type_: str) -> str:
        name = {"f32": "f32", "f64": "f64"}.get(type_, llvm_type(type_))
        return f"v32{name}" if self.vector else name

    def splat(self, element: str, value: int) -> str:
        text = integer_text(element, value)
        return f"splat ({element} {text})" if self.vector else text

    def splat32(self, value: int) -> str:
        return f"splat (i32 {value})"

    def constant(self, type_: str, bits: int) -> str:
        """A constant given by its bits, in the shape of the instruction."""
        if type_[0] != "f":
            return self.splat(llvm_type(type_), bits)
        text = float_text(type_, bits)
        return f"splat ({llvm_type(type_)} {text})" if self.vector else text

    def vector_text(self, element: str, values: Iterable[int]) -> str:
        return "<" + ", ".join(f"{element} {integer_text(element, v)}" for v in values) + ">"

    def constant_vector(self, element: str, values: Iterable[int]) -> str:
        items = list(values)
        return f"<{len(items)} x {element}> " + self.vector_text(element, items)

    # -- operations -------------------------------------------------------------------------------------------------
    def emit(self, text: str) -> str:
        if text.startswith("load <32 x i1>") and native.vector_extension() != "AVX-512":
            # Without mask registers LLVM would take a vector of bits from memory bit by bit.
            word = super().emit(text.replace("<32 x i1>", "i32", 1))
            return super().emit(f"bitcast i32 {word} to <32 x i1>")
        return super().emit(text)

    def call(self, name: str, type_: str, *values: str) -> str:
        """An intrinsic whose operands and result are all of `type_`."""
        ty = self.ty(type_)
        if name.startswith("cudaops."):
            return self._approximated(name.removeprefix("cudaops."), values[0])
        full = self.declare(f"{name}.{self.suffix(type_)}", ty, ", ".join([ty] * len(values)))
        return self.emit(f"call {ty} @{full}({', '.join(f'{ty} {v}' for v in values)})")

    def _approximated(self, name: str, value: str) -> str:
        """By a function of its own: these are long, and LLVM takes more than twice the time for twice the code."""
        ty = self.ty("f32")
        full = f"cudaops_{name}_{self.suffix('f32')}"
        if full not in self.helpers:
            outside, self.lines = self.lines, []
            result = APPROXIMATE[name](self, "%x")
            body, self.lines = self.lines, outside
            self.helpers[full] = "\n".join(
                [f"define internal {ty} @{full}({ty} %x) noinline #0 {{", *body, f"  ret {ty} {result}", "}"]
            )
        return self.emit(f"call {ty} @{full}({ty} {value})")

    def call_raw(self, name: str, type_: str, arguments: str, result: str = "", suffix: str = "") -> str:
        """An intrinsic with its arguments given as text, `type value, ...`."""
        result = result or self.ty(type_)
        overloads = self.suffix(type_) + (f".{suffix}" if suffix else "")
        kinds = ", ".join(argument_types(arguments))
        full = self.declare(f"{name}.{overloads}", result, kinds)
        return self.emit(f"call {result} @{full}({arguments})")

    def resize(self, value: str, source: str, to: str) -> str:
        """An integer of type `source` as one of type `to`, extended by the sign of `source`."""
        n, m = TYPE_BITS[to], TYPE_BITS[source]
        if n == m:
            return value
        op = "trunc" if n < m else "sext" if source[0] == "s" else "zext"
        return self.emit(f"{op} {self.ty(source)} {value} to {self.ty(to)}")

    def flush(self, value: str) -> str:
        """.ftz: a subnormal becomes zero and keeps its sign."""
        ty, bools = self.ty("f32"), self.vector_of("i1")
        size = self.call("llvm.fabs", "f32", value)
        tiny = self.emit(f"fcmp olt {ty} {size}, {self.constant('f32', 0x00800000)}")
        zero = self.call("llvm.copysign", "f32", self.constant("f32", 0), value)
        return self.emit(f"select {bools} {tiny}, {ty} {zero}, {ty} {value}")

    def saturate(self, value: str, type_: str) -> str:
        """.sat: clamped to [0, 1]; NaN gives +0."""
        one = 0x3F800000 if type_ == "f32" else 0x3FF0000000000000
        high = self.call("llvm.maximumnum", type_, value, self.constant(type_, 0))
        return self.call("llvm.minimumnum", type_, high, self.constant(type_, one))

    def splat_value(self, element: str, scalar: str) -> str:
        """A scalar in all 32 lanes."""
        if not scalar.startswith("%"):
            return f"splat ({element} {scalar})"
        key = (element, scalar)
        if key not in self.splats:
            first = self.emit(f"insertelement <32 x {element}> poison, {element} {scalar}, i32 0")
            self.splats[key] = self.emit(
                f"shufflevector <32 x {element}> {first}, <32 x {element}> poison, <32 x i32> zeroinitializer"
            )
        return self.splats[key]

    def scalar_to_shape(self, element: str, scalar: str) -> str:
        return self.splat_value(element, scalar) if self.vector else scalar

    def permute32(self, value: str, places: str) -> str:
        """value[places[lane]] in every lane, places in 0..31."""
        slot = "%permute"
        self.line(f"store <32 x i32> {value}, ptr {slot}, align 64")
        wide = self.emit(f"zext <32 x i32> {places} to <32 x i64>")
        pointers = self.emit(f"getelementptr i32, ptr {slot}, <32 x i64> {wide}")
        ty = "<32 x i32>"
        name = self.declare("llvm.masked.gather.v32i32.v32p0", ty, f"<32 x ptr>, i32, <32 x i1>, {ty}")
        return self.emit(
            f"call {ty} @{name}(<32 x ptr> {pointers}, i32 4, <32 x i1> splat (i1 true), {ty} zeroinitializer)"
        )

    # -- masks ------------------------------------------------------------------------------------------------------
    def mask_or_full(self) -> str:
        return self.mask if self.mask is not None else "splat (i1 true)"

    def bits_of(self, mask: str) -> str:
        if mask == "splat (i1 true)":
            return "-1"
        return self.emit(f"bitcast <32 x i1> {mask} to i32")

    def last_active_lane(self) -> str:
        if self.mask is None:
            return "31"
        name = self.declare("llvm.ctlz.i32", "i32", "i32, i1")
        zeros = self.emit(f"call i32 @{name}(i32 {self.bits_of(self.mask)}, i1 true)")
        return self.binary("sub", "i32", "31", zeros)

    # -- reading operands -------------------------------------------------------------------------------------------
    def lanes_of(self, operand: Operand) -> Lanes:
        return self.analysis.of(operand)

    def src(self, ins: Instruction, place: int, type_: str | None = None) -> str:
        """Operand `place` as `type_` (default: the instruction's), in the shape of the instruction."""
        return self.read(ins.operands[place], type_ or ins.type, self.vector)

    def read(self, operand: Operand, type_: str, vector: bool) -> str:
        wanted = llvm_type(type_)
        if isinstance(operand, Imm):
            return self._literal(operand, type_, vector)
        if isinstance(operand, Reg):
            held = llvm_type(operand.type)
            value = self._vector(operand) if vector else self._scalar(operand)
            if operand.negated:
                value = self.emit(f"xor {self.shape('i1', vector)} {value}, {'splat (i1 true)' if vector else 'true'}")
        elif isinstance(operand, Special):
            value, held = self._special(operand.name, vector)
        elif isinstance(operand, Sym):
            held = "i64"
            value = self._symbol(operand.name)
            if vector:
                value = self.splat_value(held, value)
                if operand.name in self.local_offsets:
                    value = self.binary(
                        "add", "<32 x i64>", value, self.vector_text("i64", self.analysis.local_offsets)
                    )
        else:
            raise EmulatorError(f"operand {operand} where a value is wanted")
        return self._as(value, held, wanted, vector)

    def _as(self, value: str, held: str, wanted: str, vector: bool) -> str:
        """Same bits, another type; a wider register is cut, a narrower one (which PTX forbids) is zero-extended."""
        if held == wanted:
            return value
        have, want = element_bits(held), element_bits(wanted)
        if held in ("float", "double"):
            value = self.emit(f"bitcast {self.shape(held, vector)} {value} to {self.shape(f'i{have}', vector)}")
        if have != want:
            op = "trunc" if have > want else "zext"
            value = self.emit(f"{op} {self.shape(f'i{have}', vector)} {value} to {self.shape(f'i{want}', vector)}")
        if wanted in ("float", "double"):
            value = self.emit(f"bitcast {self.shape(f'i{want}', vector)} {value} to {self.shape(wanted, vector)}")
        return value

    def _literal(self, operand: Imm, type_: str, vector: bool) -> str:
        element = llvm_type(type_)
        value = operand.value
        if type_[0] == "f":
            bits = value
            if operand.float_bits == 0:
                bits = struct.unpack("<Q", struct.pack("<d", float(value)))[0]
            if operand.float_bits != 32 and type_ == "f32":
                bits = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", bits.to_bytes(8, "little"))[0]))[0]
            text = float_text(type_, bits)
        elif type_ == "pred":
            text = "true" if value else "false"
        else:
            text = integer_text(element, value)
        return f"splat ({element} {text})" if vector else text

    def _scalar(self, register: Reg) -> str:
        name = register.name
        if name in self.scalars:
            return self.scalars[name]
        lanes = self.analysis.lanes.get(name)
        if lanes is None:
            return "0" if register.type[0] != "f" else "0.0"
        if lanes.varying:
            raise EmulatorError(f"internal: {name} differs between lanes where one value is wanted")
        if lanes.constant and lanes.low is not None and register.type in TYPE_BITS and register.type[0] not in "fp":
            return integer_text(llvm_type(register.type), lanes.low)
        value = self.emit(f"load {llvm_type(register.type)}, ptr {self.home(register)}, align 1")
        self.scalars[name] = value
        return value

    def _vector(self, register: Reg) -> str:
        name = register.name
        if name in self.vectors:
            return self.vectors[name]
        element = llvm_type(register.type)
        lanes = self.analysis.lanes.get(name)
        if lanes is None:
            return "zeroinitializer"
        if lanes.varying:
            value = self.emit(
                f"load <32 x {element}>, ptr {self.home(register)}, align {'64' if element != 'i1' else '1'}"
            )
        else:
            value = self._spread(self._scalar(register), element, lanes)
        self.vectors[name] = value
        return value

    def _spread(self, scalar: str, element: str, lanes: Lanes) -> str:
        """S + L[lane] as a vector."""
        value = self.splat_value(element, scalar)
        if lanes.offsets is not None and lanes.offsets != ZERO:
            value = self.binary("add", f"<32 x {element}>", value, self.vector_text(element, lanes.offsets))
        return value

    def _special(self, name: str, vector: bool) -> tuple[str, str]:
        lanes = self.analysis.of(Special(name))
        kind, _, axis = name[1:].partition(".")
        place = "xyz".find(axis) if axis else 0
        if kind in ("clock64", "globaltimer", "clock", "clock_hi", "globaltimer_lo", "globaltimer_hi"):
            timer = self.declare("llvm.readcyclecounter", "i64", "")
            value = self.emit(f"call i64 @{timer}()")
            if kind.endswith("_hi"):
                value = self.binary("lshr", "i64", value, "32")
            return (self.splat_value("i64", value) if vector else value), "i64"
        if kind.startswith("lanemask"):
            value = self.vector_text("i32", [LANEMASKS[kind](lane) for lane in LANE])
            if not vector:
                raise EmulatorError(f"internal: {name} differs between lanes where one value is wanted")
            return value, "i32"
        if kind == "tid" and lanes.varying:
            return self._thread_table(place), "i32"
        scalar = self._special_scalar(kind, place, lanes)
        return (self._spread(scalar, "i32", lanes) if vector else scalar), "i32"

    def _special_scalar(self, kind: str, place: int, lanes: Lanes) -> str:
        if lanes.constant and lanes.low is not None:
            return str(lanes.low)
        if kind == "tid":
            return self._thread_scalar(place)
        if kind == "warpid":
            return "%warp"
        if kind in ("ctaid", "nctaid"):
            field = layout.WORKER[f"{kind}_xy" if place < 2 else f"{kind}_z"] + (4 if place == 1 else 0)
            pointer = self.emit(f"getelementptr i8, ptr %ctx, i64 {field}")
            return self.emit(f"load i32, ptr {pointer}, align 4")
        values = {
            "nwarpid": str(self.geometry.warps), "smid": "0", "nsmid": "1", "gridid": "0",
            "dynamic_smem_size": str(self.shared_bytes - self.static_shared_bytes),
            "total_smem_size": str(self.shared_bytes),
        }  # fmt: skip
        if kind not in values:
            raise EmulatorError(f"special register %{kind} is not emulated")
        return values[kind]

    def _thread_scalar(self, axis: int) -> str:
        """The scalar S of threadIdx along an axis, from the warp's index (see Geometry.tid)."""
        x, y, _ = self.geometry.block
        warp = "%warp"
        if x % WARP == 0 or self.geometry.block[1:] == (1, 1):
            per_row = max(x // WARP, 1) if self.geometry.block[1:] != (1, 1) else self.geometry.warps
            if axis == 0:
                return self.binary("shl", "i32", self.binary("urem", "i32", warp, str(per_row)), "5")
            row = self.binary("udiv", "i32", warp, str(per_row))
            return self.binary("urem" if axis == 1 else "udiv", "i32", row, str(y))
        rows = WARP // x
        row = self.binary("mul", "i32", warp, str(rows))
        if y % rows == 0:
            return self.binary("urem" if axis == 1 else "udiv", "i32", row, str(y))
        return self.binary("mul", "i32", warp, str(rows // y))  # axis 2: several planes a warp

    def _thread_table(self, axis: int) -> str:
        x, y, _ = self.geometry.block
        values = []
        for t in range(self.geometry.warps * WARP):
            t = min(t, self.geometry.threads - 1)
            values.append((t % x, t // x % y, t // (x * y))[axis])
        name = f"tid{axis}"
        self.tables[name] = (
            f"@{name} = internal constant [{len(values)} x i32] [{', '.join(f'i32 {v}' for v in values)}], align 64"
        )
        pointer = self.emit(f"getelementptr [32 x i32], ptr @{name}, i32 %warp")
        return self.emit(f"load <32 x i32>, ptr {pointer}, align 64")

    # -- symbols ----------------------------------------------------------------------------------------------------
    def symbol_address(self, ins: Instruction, name: str, bits: int) -> str:
        value = self._symbol(name)
        if self.vector:
            value = self.splat_value("i64", value)
            if name in self.local_offsets:
                value = self.binary("add", "<32 x i64>", value, self.vector_text("i64", self.analysis.local_offsets))
        if bits == 32:
            value = self.emit(f"trunc {self.vector_of('i64')} {value} to {self.vector_of('i32')}")
        return value

    def _symbol(self, name: str) -> str:
        """A variable's address: an offset for shared, the lane-0 host address for local, else a host address."""
        if name in self.shared_offsets:
            return str(self.shared_offsets[name])
        if name in self.parameters:
            return str(self.parameters[name])  # an offset into the argument block
        if name in self.local_offsets:
            base = self.field("locals")
            size = self.local_bytes * WARP
            warp = self.emit("zext i32 %warp to i64")
            mine = self.binary("add", "i64", base, self.binary("mul", "i64", warp, str(size)))
            return self.binary("add", "i64", mine, str(self.local_offsets[name]))
        variable = self.module.variables.get(name)
        if variable is not None and variable.space in ("global", "const"):
            if name not in self.globals_used:
                self.globals_used.append(name)
            table = self.field("globals", "ptr")
            pointer = self.emit(f"getelementptr i64, ptr {table}, i64 {self.globals_used.index(name)}")
            return self.emit(f"load i64, ptr {pointer}, align 8")
        if name in self.module.functions:
            return str(self.module.function_address(name))
        raise EmulatorError(f"symbol {name} is not defined in this PTX")

    def field(self, name: str, ty: str = "i64") -> str:
        pointer = self.emit(f"getelementptr i8, ptr %ctx, i64 {layout.WORKER[name]}")
        return self.emit(f"load {ty}, ptr {pointer}, align 8")

    def shared_base(self) -> str:
        return "%shared"

    def argument_block(self) -> str:
        return "%arguments"

    def argument_address(self) -> str:
        return self.emit("ptrtoint ptr %arguments to i64")

    def parameter_offset(self, ins: Instruction, name: str) -> int:
        if name not in self.parameters:
            self.unsupported(ins, f"parameter {name} of a called function")
        return self.parameters[name]

    def unsupported(self, ins: Instruction, what: str) -> None:
        raise EmulatorError(f"{ins.file}:{ins.line}: PTX instruction `{ins}`: {what} is not emulated")

    # -- writing results --------------------------------------------------------------------------------------------
    def result(self, ins: Instruction, value: str, type_: str | None = None) -> None:
        """Write the first operand with a value of `type_` in the shape of the instruction."""
        self.write(ins.operands[0], value, type_ or ins.type, self.vector)

    def write(self, operand: Operand, value: str, type_: str, vector: bool | None = None) -> None:
        if vector is None:
            vector = self.vector
        if isinstance(operand, Sym) and operand.name == "_":
            return
        if not isinstance(operand, Reg):
            raise EmulatorError(f"operand {operand} where a register is wanted")
        held = llvm_type(operand.type)
        have, want = element_bits(llvm_type(type_)), element_bits(held)
        if type_[0] == "s" and have < want:
            value = self.emit(f"sext {self.llvm(type_, vector)} {value} to {self.shape(f'i{want}', vector)}")
            if held in ("float", "double"):
                value = self.emit(f"bitcast {self.shape(f'i{want}', vector)} {value} to {self.shape(held, vector)}")
        else:
            value = self._as(value, llvm_type(type_), held, vector)
        self._put(operand, value, held, vector)

    def _put(self, register: Reg, value: str, held: str, vector: bool) -> None:
        name = register.name
        lanes = self.analysis.lanes[name]
        if not lanes.varying:
            if vector:
                raise EmulatorError(f"internal: lanes of {name} written as one value")
            self.scalars[name] = value
            self.vectors.pop(name, None)
        else:
            if not vector:
                mine = self.lanes if self.lanes.offsets is not None and held[0] == "i" and held != "i1" else Lanes(ZERO)
                value = self._spread(value, held, mine)
            if self.mask is not None and self.analysis.blends(self.block, name):
                old = self._vector(register)
                value = self.emit(f"select <32 x i1> {self.mask}, <32 x {held}> {value}, <32 x {held}> {old}")
            self.vectors[name] = value
            self.scalars.pop(name, None)
        if name in self.homes:
            self.pending[name] -= 1
            if self.pending[name] == 0:
                if lanes.varying:
                    align = "64" if held != "i1" else "1"
                    self.line(f"store <32 x {held}> {self.vectors[name]}, ptr {self.home(register)}, align {align}")
                else:
                    self.line(f"store {held} {value}, ptr {self.home(register)}, align 1")

    def home(self, register: Reg) -> str:
        return self.homes[register.name]


LANEMASKS: dict[str, Callable[[int], int]] = {
    "lanemask_eq": lambda lane: 1 << lane,
    "lanemask_lt": lambda lane: (1 << lane) - 1,
    "lanemask_le": lambda lane: (2 << lane) - 1,
    "lanemask_gt": lambda lane: 0xFFFFFFFF & ~((2 << lane) - 1),
    "lanemask_ge": lambda lane: 0xFFFFFFFF & ~((1 << lane) - 1),
}
