"""ld and st: every space, type, vector width and way the lanes' addresses can lie; registers wider than the access."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulator import harness
from tests.emulator.reference import BITS

TYPES = (
    "b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64",
)  # fmt: skip
THREADS = 64
REGION = 4096  # bytes of memory that one access ranges over
# Element of thread %t: the same for all, neighbours, spread, backwards, rows, and without a pattern (%v is loaded).
FORMS = {
    "uniform": ("mov.u32 %k, 5;", lambda t, v: 5),
    "contiguous": ("mov.u32 %k, %t;", lambda t, v: t),
    "strided": ("mad.lo.s32 %k, %t, 3, 1;", lambda t, v: 3 * t + 1),
    "backwards": ("sub.s32 %k, 63, %t;", lambda t, v: 63 - t),
    "pairs": ("shr.u32 %k, %t, 1;", lambda t, v: t >> 1),
    "swapped": ("xor.b32 %k, %t, 1;", lambda t, v: t ^ 1),
    "scattered": ("mov.u32 %k, %v;", lambda t, v: v),
}
SPACES = ("global", "shared", "generic", "generic shared")
HINTS = (
    "ca", "cg", "cs", "lu", "cv", "volatile", "relaxed.gpu", "relaxed.sys", "relaxed.cta", "relaxed.cluster", "acquire.gpu",
    "weak", "mmio.relaxed.sys", "nc", "nc.L1::no_allocate", "nc.L1::no_allocate.L2::128B", "L1::evict_last", "L1::evict_first",
    "L1::evict_normal", "L1::evict_unchanged", "L2::64B", "L2::128B", "L2::256B", "ca.L2::cache_hint", "L2::evict_last",
    "L2::evict_first", "L2::evict_normal",
)  # fmt: skip
STORE_HINTS = (
    "wb", "cg", "cs", "wt", "volatile", "relaxed.gpu", "relaxed.cta", "relaxed.cluster", "release.gpu", "release.sys", "weak",
    "mmio.relaxed.sys", "L1::no_allocate", "L1::evict_last", "L1::evict_first", "L1::evict_normal", "L1::evict_unchanged",
    "L2::cache_hint", "L2::evict_last", "L2::evict_first", "L2::evict_normal",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What one access moves: a type, and how many of it."""

    type: str
    width: int

    @property
    def size(self) -> int:
        return BITS[self.type] // 8 * self.width

    @property
    def suffix(self) -> str:
        return (f".v{self.width}" if self.width > 1 else "") + f".{self.type}"


SHAPES = [
    *(Shape(t, 1) for t in TYPES), *(Shape(t, 2) for t in ("s8", "u16", "b32", "f32", "b64", "f64")),
    *(Shape(t, 4) for t in ("u8", "s16", "b32", "f32")),
]  # fmt: skip
SOME = [
    Shape("s8", 1),
    Shape("u16", 1),
    Shape("f32", 1),
    Shape("b64", 1),
    Shape("u8", 4),
    Shape("f32", 4),
    Shape("f64", 2),
]
SHAPES_OF = {"global": SHAPES, "shared": SOME, "generic": SOME, "generic shared": SOME}

HEAD = """
.reg .pred %p<4>; .reg .b32 %t, %k, %v, %x<4>; .reg .b64 %in, %out, %at, %o, %w<5>, %base, %q<5>;
.reg .f32 %f<4>; .reg .f64 %d<4>; .reg .b16 %h<4>;
.shared .align 16 .b8 sh[4096];
mov.u32 %t, %tid.x; ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; ld.param.u64 %at, [places];
cvta.to.global.u64 %in, %in; cvta.to.global.u64 %out, %out; cvta.to.global.u64 %at, %at;
mul.wide.u32 %o, %t, 4; add.s64 %at, %at, %o; ld.global.u32 %v, [%at];
"""
PARAMS = ".param .u64 out, .param .u64 in, .param .u64 places"


def registers(shape: Shape) -> str:
    """Integers are moved through 64-bit registers: loads extend, stores cut."""
    name = {"f32": "f", "f64": "d"}.get(shape.type, "q")
    items = [f"%{name}{n}" for n in range(shape.width)]
    return "{" + ", ".join(items) + "}" if shape.width > 1 else items[0]


def as_words(shape: Shape) -> Iterator[str]:
    """%w0, ...: the loaded registers as 64 bits."""
    for n in range(shape.width):
        if shape.type == "f32":
            yield f"mov.b32 %x0, %f{n}; cvt.u64.u32 %w{n}, %x0;"
        else:
            yield f"mov.b64 %w{n}, %{'d' if shape.type == 'f64' else 'q'}{n};"


def from_words(shape: Shape) -> Iterator[str]:
    for n in range(shape.width):
        if shape.type == "f32":
            yield f"cvt.u32.u64 %x0, %w{n}; mov.b32 %f{n}, %x0;"
        else:
            yield f"mov.b64 %{'d' if shape.type == 'f64' else 'q'}{n}, %w{n};"


def fill_shared(back: bool = False) -> str:
    """Copy the region at %in to shared memory, 64 bytes a thread (`back`: shared memory to the region at %out)."""
    lines = ["bar.sync 0; mul.wide.u32 %o, %t, 64; mov.u64 %at, sh; add.s64 %at, %at, %o;"]
    lines.append(f"add.s64 %o, {'%out' if back else '%in'}, %o;")
    for n in range(0, 64, 8):
        if back:
            lines.append(f"ld.shared.b64 %w0, [%at+{n}]; st.global.b64 [%o+{n}], %w0;")
        else:
            lines.append(f"ld.global.b64 %w0, [%o+{n}]; st.shared.b64 [%at+{n}], %w0;")
    return "\n".join([*lines, "bar.sync 0;"])


def base_of(space: str, pointer: str) -> str:
    return {
        "global": f"mov.b64 %base, {pointer};",
        "shared": "mov.u64 %base, sh;",
        "generic": f"cvta.global.u64 %base, {pointer};",
        "generic shared": "mov.u64 %base, sh; cvta.shared.u64 %base, %base;",
    }[space]


def loads(space: str, form: str, masked: bool, base: str = "ld") -> harness.Kernel:
    dot = "" if space.startswith("generic") else f".{space}"
    lines = [HEAD]
    for n, shape in enumerate(SHAPES_OF[space]):
        if "shared" in space:
            lines.append(fill_shared())
        lines += [base_of(space, "%in"), FORMS[form][0], f"mul.wide.u32 %o, %k, {shape.size}; add.s64 %at, %base, %o;"]
        lines += ["mov.b64 %w0, -1; mov.b64 %w1, -1; mov.b64 %w2, -1; mov.b64 %w3, -1;"]
        if masked:
            lines.append(f"rem.u32 %k, %t, 3; setp.eq.s32 %p0, %k, 0; @%p0 bra skip{n};")
        lines += [f"{base}{dot}{shape.suffix} {registers(shape)}, [%at];", *as_words(shape)]
        lines.append(f"skip{n}: mul.wide.u32 %o, %t, 32; add.s64 %o, %out, %o;")
        lines += [f"st.global.v2.b64 [%o+{8 * m}], {{%w{m}, %w{m + 1}}};" for m in (0, 2)]
        lines.append(f"add.s64 %in, %in, {REGION}; add.s64 %out, %out, {32 * THREADS};")
    return harness.ptx("\n".join([*lines, "ret;"]), PARAMS)


def stores(space: str, form: str, masked: bool) -> harness.Kernel:
    dot = "" if space.startswith("generic") else f".{space}"
    lines = [HEAD]
    for n, shape in enumerate(SHAPES_OF[space]):
        lines += ["mul.wide.u32 %o, %t, 32; add.s64 %o, %in, %o;"]
        if "shared" in space:  # what is there before comes from the region of the output
            lines.append(fill_shared().replace("%in", "%out") + "mul.wide.u32 %o, %t, 32; add.s64 %o, %in, %o;")
        lines += [f"ld.global.v2.b64 {{%w{m}, %w{m + 1}}}, [%o+{8 * m}];" for m in (0, 2)]
        lines += [*from_words(shape), base_of(space, "%out"), FORMS[form][0]]
        lines.append(f"mul.wide.u32 %o, %k, {shape.size}; add.s64 %at, %base, %o;")
        if masked:
            lines.append(f"rem.u32 %k, %t, 3; setp.eq.s32 %p0, %k, 0; @%p0 bra skip{n};")
        lines += [f"st{dot}{shape.suffix} [%at], {registers(shape)};", f"skip{n}:"]
        if "shared" in space:
            lines.append(fill_shared(back=True))
        lines.append(f"add.s64 %in, %in, {32 * THREADS}; add.s64 %out, %out, {REGION};")
    return harness.ptx("\n".join([*lines, "ret;"]), PARAMS)


def element(shape: Shape, memory: np.ndarray, place: int) -> list[int]:
    """The values of one access, as 64-bit registers hold them."""
    size = BITS[shape.type] // 8
    found = []
    for n in range(shape.width):
        start = place * shape.size + n * size
        value = int.from_bytes(memory[start : start + size].tobytes(), "little", signed=shape.type[0] == "s")
        found.append(value & (2**64 - 1))
    return found


WAYS = [
    (space, form, masked)
    for space in SPACES for form in FORMS for masked in (False, True)
    if not (masked and form in ("pairs", "swapped"))
    and (not space.startswith("generic") or form in ("uniform", "contiguous", "scattered"))
]  # fmt: skip


@pytest.mark.parametrize(("space", "form", "masked"), WAYS)
def test_loads(space: str, form: str, masked: bool, seed: int) -> None:
    check_loads(space, form, masked, seed, "ld")


def test_ldu(seed: int) -> None:
    check_loads("global", "uniform", False, seed, "ldu")


def check_loads(space: str, form: str, masked: bool, seed: int, base: str) -> None:
    source, shapes = np.random.default_rng(seed), SHAPES_OF[space]
    memory = source.integers(0, 256, (len(shapes), REGION), dtype=np.uint8)
    places = source.integers(0, 190, THREADS).astype(np.uint32)
    out = np.zeros((len(shapes), THREADS, 4), np.uint64)
    harness.run(loads(space, form, masked, base), 1, THREADS, out, memory, places)
    for n, shape in enumerate(shapes):
        for t in range(THREADS):
            wanted = element(shape, memory[n], FORMS[form][1](t, int(places[t])))
            if masked and t % 3 == 0:
                wanted = [2**64 - 1] * shape.width
            got = [int(v) for v in out[n, t, : shape.width]]
            assert got == wanted, f"ld{shape.suffix}, thread {t}"


@pytest.mark.parametrize(("space", "form", "masked"), WAYS)
def test_stores(space: str, form: str, masked: bool, seed: int) -> None:
    source, shapes = np.random.default_rng(seed), SHAPES_OF[space]
    values = source.integers(0, 2**64, (len(shapes), THREADS, 4), dtype=np.uint64)
    places = source.permutation(190)[:THREADS].astype(np.uint32)
    before = source.integers(0, 256, (len(shapes), REGION), dtype=np.uint8)
    out = before.copy()
    harness.run(stores(space, form, masked), 1, THREADS, out, values, places)
    active = [t for t in range(THREADS) if not (masked and t % 3 == 0)]
    for n, shape in enumerate(shapes):
        size = BITS[shape.type] // 8
        writers: dict[int, list[bytes]] = {}
        for t in active:
            data = b"".join(int(v).to_bytes(8, "little")[:size] for v in values[n, t, : shape.width])
            writers.setdefault(FORMS[form][1](t, int(places[t])), []).append(data)
        for place in range(REGION // shape.size):
            got = out[n, place * shape.size : (place + 1) * shape.size].tobytes()
            # Where several threads write, one of them is seen.
            allowed = writers.get(place, [before[n, place * shape.size : (place + 1) * shape.size].tobytes()])
            assert got in allowed, f"st{shape.suffix}, element {place}"


def test_hints_change_nothing() -> None:
    lines = [HEAD, "mul.wide.u32 %o, %t, 4; add.s64 %in, %in, %o; add.s64 %out, %out, %o; mov.b64 %q0, 0;"]
    for hint in HINTS:
        policy = ", %q0" if "cache_hint" in hint else ""
        order = (
            f"ld.{hint}.global"
            if hint.split(".")[0] in ("relaxed", "acquire", "volatile", "weak", "mmio")
            else f"ld.global.{hint}"
        )
        lines.append(f"{order}.b32 %x0, [%in]{policy}; st.global.b32 [%out], %x0; add.s64 %out, %out, {4 * THREADS};")
    for hint in STORE_HINTS:
        policy = ", %q0" if "cache_hint" in hint else ""
        order = (
            f"st.{hint}.global"
            if hint.split(".")[0] in ("relaxed", "release", "volatile", "weak", "mmio")
            else f"st.global.{hint}"
        )
        lines.append(f"ld.global.b32 %x0, [%in]; {order}.b32 [%out], %x0{policy}; add.s64 %out, %out, {4 * THREADS};")
    lines += [
        "prefetch.global.L1 [%in]; prefetch.global.L2 [%in]; prefetch.global.L2::evict_last [%in]; prefetch.L1 [%in];",
        "prefetch.global.L2::evict_normal [%in]; prefetchu.L1 [%in]; prefetch.local.L1 [mine]; ret;",
    ]
    lines.insert(1, ".local .align 4 .b8 mine[4];")
    count = len(HINTS) + len(STORE_HINTS)
    data = np.random.randint(0, 2**31, THREADS).astype(np.int32)
    out = np.zeros((count, THREADS), np.int32)
    harness.run(harness.ptx("\n".join(lines), PARAMS), 1, THREADS, out, data, np.zeros(THREADS, np.uint32))
    assert (out == data).all()


def test_local_memory_is_each_threads_own() -> None:
    """Constant and computed places, scalars and vectors, and generic addresses of it."""
    body = """
    .local .align 16 .b8 mine[64]; .local .align 8 .b8 other[8];
    mov.u64 %base, mine; st.local.v4.b32 [mine], {%t, %t, %t, %t}; st.local.v4.b32 [mine+16], {%t, %t, %t, %t};
    st.local.v4.b32 [mine+32], {%t, %t, %t, %t}; st.local.v4.b32 [mine+48], {%t, %t, %t, %t};
    and.b32 %k, %v, 15; mul.wide.u32 %o, %k, 4; add.s64 %at, %base, %o; st.local.b32 [%at], %v;
    cvta.local.u64 %q0, %base; add.s64 %q0, %q0, %o; ld.b32 %x0, [%q0];
    mov.b64 %q1, 0x1122334455667788; st.local.b64 [other], %q1; ld.local.s8 %x2, [other+1];
    ld.local.v2.b32 {%x1, %x3}, [mine+8]; st.shared::cta.b32 [sh], %x1; ld.shared::cta.b32 %k, [sh];
    st.b32 [%q0], %x2; cvta.to.local.u64 %q1, %q0; ld.local.b32 %x2, [%q1];
    mul.wide.u32 %o, %t, 16; add.s64 %out, %out, %o; st.global.v4.b32 [%out], {%x0, %x1, %x2, %x3}; ret;"""
    places = np.random.randint(0, 1000, THREADS).astype(np.uint32)
    out = np.zeros((THREADS, 4), np.uint32)
    harness.run(harness.ptx(HEAD + body, PARAMS), 1, THREADS, out, np.zeros(1), places)
    t = np.arange(THREADS, dtype=np.uint32)
    slot = places & 15
    assert np.array_equal(out[:, 0], places)
    assert np.array_equal(out[:, 1], np.where(slot == 2, places, t))
    assert np.array_equal(out[:, 2], np.full(THREADS, 0x77))
    assert np.array_equal(out[:, 3], np.where(slot == 3, places, t))


MODULE = """
.const .align 16 .b8 table[64] = {1, 2, 3, 4, 250, 251, 252, 253, 9};
.const .align 4 .f32 third = 0f3EAAAAAB;
.global .align 8 .u64 pointer = generic(numbers);
.global .align 4 .s32 numbers[6] = {-1, 2, 0x7fffffff, 077};
.global .align 8 .f64 real[2] = {0d3FF8000000000000, 2.5};
"""


def test_constants_and_module_variables() -> None:
    """Initial values shorter than the array, floats, pointers; constant memory read uniformly and by every lane."""
    body = """
    ld.const.u8 %x0, [table+4]; ld.const.s8 %x1, [table+5]; ld.const.v4.u8 {%h0, %h1, %h2, %h3}, [table+8]; cvt.u32.u16 %x2, %h0;
    mov.u64 %base, table; and.b32 %k, %t, 15; cvt.u64.u32 %o, %k; add.s64 %at, %base, %o; ld.const.u8 %x3, [%at];
    mul.wide.u32 %o, %t, 64; add.s64 %out, %out, %o; st.global.v4.b32 [%out], {%x0, %x1, %x2, %x3};
    ld.const.f32 %f0, [third]; ld.global.f64 %d0, [real+8]; ld.global.u64 %q0, [pointer]; ld.s32 %x0, [%q0+12]; ld.s32 %x1, [%q0+20];
    cvta.const.u64 %q1, %base; ld.u8 %x2, [%q1]; cvta.to.const.u64 %q1, %q1; ld.const.b16 %x3, [%q1+2];
    st.global.f32 [%out+16], %f0; st.global.f64 [%out+24], %d0; st.global.v4.b32 [%out+32], {%x0, %x1, %x2, %x3}; ret;"""
    out = np.zeros((THREADS, 64), np.uint8)
    harness.run(
        harness.ptx(HEAD + body, PARAMS, module=MODULE), 1, THREADS, out, np.zeros(1), np.zeros(THREADS, np.uint32)
    )
    table = np.array([1, 2, 3, 4, 250, 251, 252, 253, 9, 0, 0, 0, 0, 0, 0, 0], np.uint32)
    for t in range(THREADS):
        words = out[t].view(np.int32)
        assert words[:4].tolist() == [250, -5, 9, table[t & 15]]
        assert out[t, 16:20].view(np.float32)[0] == np.float32(1 / 3)
        assert out[t, 24:32].view(np.float64)[0] == 2.5
        assert words[8:12].tolist() == [63, 0, 1, 0x0403]


def test_parameters_are_read_at_any_offset_and_width() -> None:
    """A struct by value, read as scalars and vectors, by constant offsets and through a register."""
    body = """
    .reg .b32 %a<8>; .reg .b64 %b<4>; .reg .f32 %c; .reg .b16 %e;
    ld.param.u64 %b0, [out]; mov.u32 %a0, %tid.x; mul.wide.u32 %b1, %a0, 64; add.s64 %b0, %b0, %b1;
    ld.param.v4.b32 {%a1, %a2, %a3, %a4}, [s]; ld.param.u8 %e, [s+17]; cvt.u32.u16 %a5, %e; ld.param.s16 %a6, [s+18];
    ld.param.f32 %c, [s+20]; ld.param.v2.b64 {%b2, %b3}, [s+32]; ld.param::entry.b8 %e, [small]; cvt.u32.u16 %a7, %e;
    st.global.v4.b32 [%b0], {%a1, %a2, %a3, %a4}; st.global.v2.b32 [%b0+16], {%a5, %a6}; st.global.f32 [%b0+24], %c;
    st.global.v2.b64 [%b0+32], {%b2, %b3}; st.global.b32 [%b0+48], %a7;
    mov.b64 %b1, s; ld.param.b32 %a1, [%b1+8]; cvta.param.u64 %b1, %b1; ld.b32 %a2, [%b1+12]; st.global.v2.b32 [%b0+56], {%a1, %a2};
    ret;"""
    data = np.random.randint(0, 256, 48).astype(np.uint8)
    out = np.zeros((32, 64), np.uint8)
    kernel = harness.ptx(body, ".param .u64 out, .param .u8 small, .param .align 16 .b8 s[48]")
    harness.run(kernel, 1, 32, out, 201, data.tobytes())
    wanted = np.zeros(64, np.uint8)
    wanted[:16] = data[:16]
    wanted[16:20] = np.array([data[17]], np.uint32).view(np.uint8)
    wanted[20:24] = np.array([data[18:20].view(np.int16)[0]], np.int32).view(np.uint8)
    wanted[24:28] = data[20:24]
    wanted[32:48] = data[32:48]
    wanted[48:52] = np.array([201], np.uint32).view(np.uint8)
    wanted[56:64] = data[8:16]
    assert (out == wanted).all()


def test_signalling_nan_bits_are_moved_unchanged() -> None:
    body = """mul.wide.u32 %o, %t, 4; add.s64 %at, %in, %o; ld.global.f32 %f0, [%at]; mov.f32 %f1, %f0; add.s64 %o, %out, %o;
    st.global.f32 [%o], %f1; ret;"""
    bits = np.full(THREADS, 0x7F800001, np.uint32)
    bits[1::2] = 0xFFA00000
    out = np.zeros(THREADS, np.uint32)
    harness.run(harness.ptx(HEAD + body, PARAMS), 1, THREADS, out, bits, np.zeros(THREADS, np.uint32))
    assert np.array_equal(out, bits)


OPCODES = [
    *(f"{base}.global{shape.suffix}" for base in ("ld", "ldu", "st") for shape in SHAPES),
    *(f"{base}.{space}.b32" for base in ("ld", "st") for space in ("shared", "shared::cta", "local")),
    "ld.const.u8", "ld.param.u64", "ld.param::entry.b8",
    *(f"ld.global.{hint}.b32" for hint in HINTS), *(f"st.global.{hint}.b32" for hint in STORE_HINTS),
    "prefetch.global.L1", "prefetch.global.L2", "prefetch.global.L2::evict_last", "prefetch.global.L2::evict_normal", "prefetchu.L1", "prefetch.local.L1",
    "cvta.to.global.u64", "cvta.shared.u64", "cvta.to.local.u64", "cvta.const.u64", "cvta.param.u64",
]  # fmt: skip
