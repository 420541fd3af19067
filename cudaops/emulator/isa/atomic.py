"""atom and red: the lanes of a warp one after the other, each against memory that other threads use as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudaops.emulator import layout, sanitizer
from cudaops.emulator.isa.memory import access
from cudaops.emulator.isa.table import rule
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import TYPE_BITS, Instruction, Mem, Operand, Sym
from cudaops.emulator.text import each_lane

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

WHERE = "global shared shared::cta relaxed acquire release acq_rel cta gpu sys cluster noftz L2::cache_hint"
INTEGER = {
    "and": "and", "or": "or", "xor": "xor", "exch": "xchg", "add": "add", "inc": "uinc_wrap", "dec": "udec_wrap",
    "smin": "min", "smax": "max", "umin": "umin", "umax": "umax",
}  # fmt: skip


@rule("atom", "b32 u32 s32 b64 u64 s64 f32 f64", f"{WHERE} and or xor add inc dec min max exch cas")
@rule("red", "b32 u32 s32 b64 u64 s64 f32 f64", f"{WHERE} and or xor add inc dec min max")
@rule("atom red", "f16 bf16 f16x2 bf16x2", WHERE, needs="add noftz")
@rule("atom", "b16", WHERE, needs="cas")
def atomic(g: Codegen, ins: Instruction) -> None:
    has_result = ins.base == "atom"
    operands = ins.operands[1:] if has_result else ins.operands
    if "L2::cache_hint" in ins.parts:
        operands = operands[:-1]
    target = operands[0]
    assert isinstance(target, Mem)
    a = access(g, ins, ins.operands[0] if has_result else operands[1])
    op = next(p for p in ins.parts[1:] if p in (*INTEGER, "min", "max", "cas"))
    if op in ("min", "max"):
        op = ("s" if ins.type[0] == "s" else "u") + op
    values = [_as_bits(g, value, ins.type) for value in operands[1:]]
    flush = ins.type == "f32" and a.space == "global" and "noftz" not in ins.parts
    name = _helper(g, op, ins.type, flush)
    places, mask = g.address_vector(target, a.space), g.mask
    if g.checks is Checks.SANITIZER:
        g.watch(a, places, sanitizer.ATOMIC)
    site, slot = g.site(a)
    v = f"<32 x {a.element}>"
    old = g.emit(
        f"call {v} @{name}(ptr %ctx, <32 x i64> {places}, {v} {values[0]}, "
        f"{v} {values[1] if len(values) > 1 else 'zeroinitializer'}, i32 {g.bits_of(g.mask_or_full())}, "
        f"i32 {site}, i32 {slot}, i32 {layout.SPACES[a.space]})"
    )
    g.mask = mask
    if has_result and not (isinstance(ins.operands[0], Sym) and ins.operands[0].name == "_"):
        g.write(ins.operands[0], old, f"b{TYPE_BITS[ins.type]}", vector=True)


def _as_bits(g: Codegen, operand: Operand, type_: str) -> str:
    bits = TYPE_BITS[type_]
    if "f16" in type_:
        return g.read(operand, f"b{bits}", vector=True)
    value = g.read(operand, type_, vector=True)
    return g.emit(f"bitcast {g.llvm(type_, True)} {value} to <32 x i{bits}>") if type_[0] == "f" else value


def _helper(g: Codegen, op: str, type_: str, flush: bool) -> str:
    """The name of a function that does `op` lane by lane and returns the old values; it is added to the module."""
    bits = TYPE_BITS[type_]
    floating = type_[0] == "f" or "f16" in type_
    name = f"cudaops_atom_{op}_{type_ if floating else bits}{'_ftz' if flush else ''}"
    v, i = f"<32 x i{bits}>", f"i{bits}"
    if op == "cas":
        act = f"""
  %pair = cmpxchg ptr %p, {i} %a, {i} %b acq_rel monotonic
  %old = extractvalue {{ {i}, i1 }} %pair, 0
  br label %put"""
    elif "f16" in type_:
        act = _half_loop(type_)
    elif type_[0] == "f":
        act = _float_loop(g, type_, flush)
    else:
        act = f"""
  %old = atomicrmw {INTEGER[op]} ptr %p, {i} %a acq_rel
  br label %put"""
    body = f"""
  %lane64 = zext i32 %lane to i64
  %place = getelementptr i64, ptr %places, i64 %lane64
  %address = load i64, ptr %place, align 8
  %p = inttoptr i64 %address to ptr
  %a.at = getelementptr {i}, ptr %firsts, i64 %lane64
  %a = load {i}, ptr %a.at, align {bits // 8}
  %b.at = getelementptr {i}, ptr %seconds, i64 %lane64
  %b = load {i}, ptr %b.at, align {bits // 8}{act}
put:
  %after = load atomic {i}, ptr %p monotonic, align {bits // 8}
  %changed = icmp ne {i} %after, %old
  br i1 %changed, label %progress, label %keep
progress:
  %progress.at = getelementptr i8, ptr %ctx, i64 {layout.WORKER["progress"]}
  store i64 1, ptr %progress.at, align 8
  br label %keep
keep:
  %old.at = getelementptr {i}, ptr %olds, i64 %lane64
  store {i} %old, ptr %old.at, align {bits // 8}
  br label %more"""
    g.helpers[name] = f"""
define internal {v} @{name}(ptr %ctx, <32 x i64> %addresses, {v} %first, {v} %second, i32 %mask,
    i32 %site, i32 %slot, i32 %spaces) noinline #0 {{
entry:
  %places = alloca <32 x i64>, align 64
  %firsts = alloca {v}, align 64
  %seconds = alloca {v}, align 64
  %olds = alloca {v}, align 64
  store <32 x i64> %addresses, ptr %places, align 64
  store {v} %first, ptr %firsts, align 64
  store {v} %second, ptr %seconds, align 64
  store {v} zeroinitializer, ptr %olds, align 64
  %allowed.at = getelementptr i8, ptr %ctx, i64 {layout.WORKER["allowed"]}
  %allowed = load ptr, ptr %allowed.at, align 8
  %good = call i32 %allowed(ptr %ctx, <32 x i64> %addresses, i32 %mask, i64 {bits // 8}, i32 %site, i32 %slot,
    i32 %spaces, i32 {layout.ERROR_STORE})
  br label %next{each_lane("%good", "entry", body)}
  %result = load {v}, ptr %olds, align 64
  ret {v} %result
}}"""
    return name


def _float_loop(g: Codegen, type_: str, flush: bool) -> str:
    """Add by compare and swap. On global memory f32 flushes subnormals and keeps their sign, on shared it does not."""
    f, i = ("float", "i32") if type_ == "f32" else ("double", "i64")
    flushed = {}
    for what in ("x", "y", "sum"):
        flushed[what] = ""
        if flush:
            g.declare("llvm.fabs.f32", "float", "float")
            g.declare("llvm.copysign.f32", "float", "float, float")
            flushed[what] = f"""
  %{what}.size = call float @llvm.fabs.f32(float %{what})
  %{what}.tiny = fcmp olt float %{what}.size, 0x3810000000000000
  %{what}.zero = call float @llvm.copysign.f32(float 0.0, float %{what})
  %{what}.f = select i1 %{what}.tiny, float %{what}.zero, float %{what}"""
    end = ".f" if flush else ""
    return f"""
  %seen = load atomic {i}, ptr %p monotonic, align {int(i[1:]) // 8}
  br label %try
try:
  %old = phi {i} [ %seen, %do ], [ %now, %try ]
  %x = bitcast {i} %old to {f}
  %y = bitcast {i} %a to {f}{flushed["x"]}{flushed["y"]}
  %sum = fadd {f} %x{end}, %y{end}{flushed["sum"]}
  %new = bitcast {f} %sum{end} to {i}
  %pair = cmpxchg ptr %p, {i} %old, {i} %new acq_rel monotonic
  %now = extractvalue {{ {i}, i1 }} %pair, 0
  %done = extractvalue {{ {i}, i1 }} %pair, 1
  br i1 %done, label %put, label %try"""


def _half_loop(type_: str) -> str:
    """Add one or both halves of a word by compare and swap: more than is promised, which is each half by itself."""
    packed = type_.endswith("x2")
    bits, kind = (32 if packed else 16), type_.removesuffix("x2")
    i = f"i{bits}"
    if packed:
        parts = "".join(
            f"""
  %{v}.low = trunc i32 {source} to i16
  %{v}.up = lshr i32 {source}, 16
  %{v}.high = trunc i32 %{v}.up to i16"""
            for v, source in (("x", "%old"), ("y", "%a"))
        )
        sums = _half_sum(kind, "%x.low", "%y.low", "low") + _half_sum(kind, "%x.high", "%y.high", "high")
        joined = """
  %low.wide = zext i16 %low to i32
  %high.wide = zext i16 %high to i32
  %high.up = shl i32 %high.wide, 16
  %new = or i32 %low.wide, %high.up"""
    else:
        parts, sums, joined = "", _half_sum(kind, "%old", "%a", "new"), ""
    return f"""
  %seen = load atomic {i}, ptr %p monotonic, align {bits // 8}
  br label %try
try:
  %old = phi {i} [ %seen, %do ], [ %now, %try ]{parts}{sums}{joined}
  %pair = cmpxchg ptr %p, {i} %old, {i} %new acq_rel monotonic
  %now = extractvalue {{ {i}, i1 }} %pair, 0
  %done = extractvalue {{ {i}, i1 }} %pair, 1
  br i1 %done, label %put, label %try"""


def _half_sum(kind: str, x: str, y: str, out: str) -> str:
    """%out = x + y of two i16 that hold halves, rounded once; a NaN is 0x7FFF."""
    if kind == "f16":
        widened = "".join(
            f"""
  %{out}.{v}.half = bitcast i16 {value} to half
  %{out}.{v} = fpext half %{out}.{v}.half to float"""
            for v, value in (("x", x), ("y", y))
        )
        rounded = f"""
  %{out}.half = fptrunc float %{out}.sum to half
  %{out}.bits = bitcast half %{out}.half to i16"""
    else:
        widened = "".join(
            f"""
  %{out}.{v}.wide = zext i16 {value} to i32
  %{out}.{v}.up = shl i32 %{out}.{v}.wide, 16
  %{out}.{v} = bitcast i32 %{out}.{v}.up to float"""
            for v, value in (("x", x), ("y", y))
        )
        rounded = f"""
  %{out}.raw = bitcast float %{out}.sum to i32
  %{out}.above = lshr i32 %{out}.raw, 16
  %{out}.last = and i32 %{out}.above, 1
  %{out}.half = add i32 %{out}.last, 32767
  %{out}.round = add i32 %{out}.raw, %{out}.half
  %{out}.top = lshr i32 %{out}.round, 16
  %{out}.bits = trunc i32 %{out}.top to i16"""
    return f"""{widened}
  %{out}.sum = fadd float %{out}.x, %{out}.y{rounded}
  %{out}.nan = fcmp uno float %{out}.sum, %{out}.sum
  %{out} = select i1 %{out}.nan, i16 32767, i16 %{out}.bits"""
