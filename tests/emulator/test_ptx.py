"""The parser: scopes, labels, initial values, operand lists, lines of the source, and text that is damaged."""

from __future__ import annotations

import contextlib
import random
import re

import numpy as np
import pytest

from cudaops.emulator import runtime
from cudaops.emulator.lanes import Geometry
from cudaops.emulator.ptx import Imm, Mem, Pair, Reg, Vec, parse
from cudaops.errors import EmulatorError
from tests.emulator import harness

HEAD = (
    ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .f32 %f<9>; ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x;"
    "mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;\n"
)


def stored(body: str, module: str = "", threads: int = 32) -> list[int]:
    """What each thread leaves in %r1."""
    out = np.zeros(threads, np.int32)
    harness.run(harness.ptx(f"{HEAD}{body}\nst.global.u32 [%rd1], %r1; ret;", module=module), 1, threads, out)
    return out.tolist()


def first(body: str, module: str = "") -> int:
    return stored(body, module)[0]


# -- scopes and labels ------------------------------------------------------------------------------------------------------
def test_a_scope_redeclares_a_register() -> None:
    """As NVRTC does around set-up code, and inline assembly does all the time."""
    body = """mov.u32 %r1, 1; mov.u32 %r2, 5;
    { .reg .b32 %r1; .reg .pred %p1; mov.u32 %r1, 100; { .reg .f64 %r1; mov.f64 %r1, 0d4000000000000000; } add.s32 %r2, %r2, %r1; }
    { .reg .b64 %r1; mov.b64 %r1, 7; }
    add.s32 %r1, %r1, %r2;"""
    assert first(body) == 106


def test_a_register_declared_without_a_blank() -> None:
    """As cuda_fp16.hpp has it in inline assembly."""
    module = parse(".version 8.0\n.target sm_80\n.entry k() {\n{.reg.b16 hl, hu;\nmov.b16 hl, 1;}\nret;\n}")
    assert set(module.functions["k"].registers.values()) == {"b16"}


def test_labels_of_scopes_are_their_own() -> None:
    body = """mov.u32 %r1, 0; mov.u32 %r2, 3;
    { again: add.s32 %r1, %r1, 10; sub.s32 %r2, %r2, 1; setp.ne.s32 %p1, %r2, 0; @%p1 bra again; }
    mov.u32 %r2, 2;
    { again: add.s32 %r1, %r1, 1; sub.s32 %r2, %r2, 1; setp.ne.s32 %p1, %r2, 0; @%p1 bra again; bra outside; }
    add.s32 %r1, %r1, 1000;
    outside: add.s32 %r1, %r1, 0;"""
    assert first(body) == 32


def test_labels_out_of_order_and_behind_each_other() -> None:
    body = """mov.u32 %r1, 1; bra.uni third;
    first: second: add.s32 %r1, %r1, 30; bra end;
    third: add.s32 %r1, %r1, 500; bra first;
    end:"""
    assert first(body) == 531


def test_inline_assembly_with_scopes_and_labels() -> None:
    kernel = harness.cuda(
        r"""__global__ void k(int* out, int n) {
        int i = threadIdx.x, x;
        asm volatile("{ .reg .pred p; .reg .b32 t; mov.b32 t, %1; mov.b32 %0, 0;\n"
                     "more: add.s32 %0, %0, t; sub.s32 t, t, 1; setp.gt.s32 p, t, 0; @p bra more; }" : "=r"(x) : "r"(n));
        int y;
        asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, 5; @p bra more; mov.b32 %0, 70; bra done;\n more: mov.b32 %0, %2; done: }"
                     : "=r"(y) : "r"(i), "r"(x));
        out[i] = y; }"""
    )
    out = np.zeros(32, np.int32)
    harness.run(kernel, 1, 32, out, 4)
    assert out.tolist() == [10] * 5 + [70] * 27


def test_guarded_instructions_and_comments() -> None:
    body = """mov.u32 %r1, 1; // a comment
    /* one over
       two lines */ setp.lt.u32 %p1, %r0, 3; setp.ge.u32 %p2, %r0, 30;
    @%p1 mov.u32 %r1, 2; @!%p1 add.s32 %r1, %r1, 4; @%p2 mov.u32 /* inside */ %r1, 9;"""
    assert stored(body) == [2] * 3 + [5] * 27 + [9] * 2


# -- operands ---------------------------------------------------------------------------------------------------------------
def test_operand_lists_with_and_without_blanks() -> None:
    body = """mov.b64 %rd2, {%r0,%r0}; mov.b64 { %r1 , %r2 }, %rd2; mov.b64 {%r3,_}, %rd2; add.s32 %r1,%r1,%r2;
    mov.b32 %r4, {%h1, %h2}; add.s32\t%r1,\t%r1, %r4;"""
    values = stored(".reg .b16 %h<4>; mov.b16 %h1, 3; mov.b16 %h2, 1;" + body)
    assert values == [2 * t + 0x10003 for t in range(32)]


def test_statements_over_several_lines() -> None:
    assert first("mov.u32\n%r1,\n  7\n;\nadd.s32 %r1,\n%r1, 1;") == 8


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("0x1F", 31), ("-5", -5), ("017", 15), ("0b101", 5), ("31U", 31), ("0xFFFFFFFF", -1), ("4294967295", -1),
        ("-2147483648", -(2**31)), ("WARP_SZ", 32),
    ],
)  # fmt: skip
def test_integer_literals(literal: str, value: int) -> None:
    assert first(f"mov.u32 %r1, {literal};") == value


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("mov.f32 %f1, 0f3F800000;", 0x3F800000), ("mov.f32 %f1, 0fFF800000;", 0xFF800000),
        ("mov.f32 %f1, 0f7F800001;", 0x7F800001), ("mov.f32 %f1, 0F00000001;", 1), ("mov.f32 %f1, 0d3FF8000000000000;", 0x3FC00000),
        ("mov.f32 %f1, 1.5;", 0x3FC00000), ("mov.b32 %f1, 1;", 1), ("add.f32 %f1, 0f3F800000, 0fBF800000;", 0),
    ],
)  # fmt: skip
def test_float_literals(text: str, bits: int) -> None:
    assert first(f"{text} mov.b32 %r1, %f1;") & 0xFFFFFFFF == bits


def test_addresses() -> None:
    """[symbol], [symbol+4], [register-4], [register+-4], [symbol + register is no PTX]."""
    module = ".global .align 4 .u32 words[4] = {10, 20, 30, 40};"
    body = """mov.u64 %rd3, words; add.s64 %rd4, %rd3, 8; ld.global.u32 %r1, [words]; ld.global.u32 %r2, [words+4];
    ld.global.u32 %r3, [%rd4-4]; ld.global.u32 %r4, [%rd4+-8]; ld.global.u32 %r5, [%rd4+0x4]; ld.global.u32 %r6, [ %rd4 ];
    mad.lo.s32 %r1, %r1, 1000000, %r2; mad.lo.s32 %r1, %r3, 7, %r1; mad.lo.s32 %r1, %r4, 100, %r1; add.s32 %r1, %r1, %r5;
    add.s32 %r1, %r1, %r6;"""
    assert first(body, module) == 10_000_000 + 20 + 140 + 1000 + 40 + 30


def test_shape_of_what_is_parsed() -> None:
    text = harness.ptx(
        HEAD + "setp.lt.s32 %p1|%p2, %r1, -3; ld.global.v2.u32 {%r1, %r2}, [%rd1+8]; @!%p1 bra E; E: ret;"
    ).ptx
    module = parse(text)
    entry = module.functions["k"]
    assert (module.version, module.target, entry.entry, [p.name for p in entry.params]) == (
        "8.0",
        "sm_80",
        True,
        ["out"],
    )
    code = [i for block in entry.blocks for i in block.instructions]
    compare, load, branch, leave = code[-4:]
    assert compare.operands == (Pair(Reg("%p1", "pred"), Reg("%p2", "pred")), Reg("%r1", "b32"), Imm(-3))
    assert compare.parts == ("setp", "lt", "s32")
    assert load.operands == (Vec((Reg("%r1", "b32"), Reg("%r2", "b32"))), Mem(Reg("%rd1", "b64"), 8))
    assert branch.guard == Reg("%p1", "pred", negated=True)
    assert leave.opcode == "ret"
    assert entry.registers["%f8"] == "f32"


# -- declarations -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        (".global .align 4 .u32 x[4] = {1, 2};", [1, 2, 0, 0]),
        (".global .align 4 .b8 x[16] = {1, 2, 3, 4, 0xFF};", [0x04030201, 0xFF, 0, 0]),
        (".global .align 4 .u32 x[2][2] = {{1, 2}, {3, 4}};", [1, 2, 3, 4]),
        (".const .align 4 .f32 x[4] = {0f3F800000, 2.0, 0d3FE0000000000000, -1.0};", [0x3F800000, 0x40000000, 0x3F000000, 0xBF800000]),
        (".global .align 4 .u32 x[4];", [0, 0, 0, 0]),
        (".visible .global .align 4 .s16 x[8] = {-1, 1, -2, 2};", [0x0001FFFF, 0x0002FFFE, 0, 0]),
        (".global .align 4 .u32 x[] = {5, 6, 7, 8};", [5, 6, 7, 8]),
    ],
)  # fmt: skip
def test_initial_values(declaration: str, words: list[int]) -> None:
    space = "const" if ".const" in declaration else "global"
    body = f"and.b32 %r2, %r0, 3; mul.wide.u32 %rd2, %r2, 4; mov.u64 %rd3, x; add.s64 %rd3, %rd3, %rd2; ld.{space}.u32 %r1, [%rd3];"
    assert [v & 0xFFFFFFFF for v in stored(body, declaration)] == words * 8


def test_parameters_of_every_kind() -> None:
    text = ".param .u64 .ptr .global .align 8 a, .param .align 16 .b8 s[80], .param .u8 c, .param .f64 d, .param .b32 e"
    kernel = harness.ptx("ret;", text)
    assert [(p.name, p.type, p.size, p.align) for p in kernel.params] == [
        ("a", "u64", 8, 8), ("s", "b8", 80, 16), ("c", "u8", 1, 1), ("d", "f64", 8, 8), ("e", "b32", 4, 4),
    ]  # fmt: skip


def test_directives_that_change_nothing() -> None:
    text = (
        ".version 8.0\n.target sm_80, debug\n.address_size 64\n.file 1 \"a b//c.cu\"\n.visible .entry k(.param .u64 out)\n"
        ".maxntid 128, 2, 1\n.minnctapersm 2\n{\n.pragma \"nounroll\";\n.loc 1 3 9\n" + HEAD +
        ".loc 1 12 4, function_name $L__info, inlined_at 1 3 9\nmov.u32 %r1, 4; st.global.u32 [%rd1], %r1; ret;\n}\n"
        ".section .debug_info\n{\n.b32 17\n.b8 3\n}\n"
    )  # fmt: skip
    out = np.zeros(32, np.int32)
    harness.run(harness.whole_ptx(text), 1, 32, out)
    assert (out == 4).all()
    entry = parse(text).functions["k"]
    assert entry.max_threads == 256
    moved = next(i for b in entry.blocks for i in b.instructions if i.opcode == "mov.u32" and i.operands[1] == Imm(4))
    assert (moved.file, moved.line) == ("a b//c.cu", 12)


# -- damage -----------------------------------------------------------------------------------------------------------------
SOURCE = """__device__ float table[4] = {1, 2, 3};
__device__ __noinline__ float f(float x, int n) { float s = 0; for (int i = 0; i < n; i++) s += x * i; return s; }
struct P { int n; float4 v; };
__global__ void k(float* o, const float4* a, P p) {
    __shared__ float s[64]; float mine[8]; int i = threadIdx.x; float4 v = a[i];
    s[i] = v.x; __syncthreads();
    for (int j = 0; j < 8; j++) mine[j] = v.y * j;
    if (i < p.n) { if (i % 3) v.x = f(v.x, i); else v.x = table[i & 3] + mine[i & 7] + s[63 - i] * p.v.y; }
    o[i] = v.x + __shfl_xor_sync(~0u, v.x, 3) + expf(v.z); }"""


def _generate(text: str, name: str) -> None:
    runtime.generate(text, name, "k", Geometry((64, 1, 1), True), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not PTX"),
        ("hello", "truncated|not PTX"),
        (".version 8.0\n.target sm_80\n", "no kernel k"),
        (".version 8.0\n.visible .entry k() { ret;", "truncated"),
        (".version 8.0\n.visible .entry k() { add.s32 %r1, %r1, 1; ret; }", "%r1 is not declared"),
        (".version 8.0\n.visible .entry k() { bra nowhere; }", "unknown label.*nowhere"),
        (".version 8.0\n.visible .entry k() { .reg .b32 %r1; mov.u32 %r1, 0xZZ; ret; }", "0xZZ"),
        (".version 8.0\n.visible .entry k() { .reg .b99 %r1; mov.u32 %r1, 1; ret; }", "damaged|cannot be read|should have"),
        (".version 8.0\n.visible .entry k() { .reg .b32 %r1; add.s32 %r1, %r1; ret; }", "2 operands.*knows add with 3"),
        (".version 8.0\n.visible .entry k() { .reg .b32 %r1; add.s32 %r1, %r1, 1, 2; ret; }", "4 operands.*knows add with 3"),
        (".version 8.0\n.visible .entry k() { .reg .b32 %r1; mov.u32 %r1, missing; ret; }", "missing.*not defined"),
        (".version 8.0\n.global .texref t;\n.visible .entry k() { ret; }", "texture"),
        (".version 8.0\n.visible .entry k() { .reg .b32 %r<9>; .reg .b64 %q; ld.global.v4.b32 {%r1, %r2}, [%q]; ret; }", "4 elements to 2"),
    ],
)  # fmt: skip
def test_text_that_is_damaged(text: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        _generate(text, f"damaged {text}")


def test_ptx_cut_off_anywhere() -> None:
    text = harness.cuda(SOURCE).ptx.rstrip()
    end = text.rindex("}")
    for n in sorted(random.sample(range(len(text)), 60)):
        if n <= end:
            with pytest.raises(EmulatorError):
                _generate(text[:n], f"cut at {n}")


def test_any_damage_is_an_error_or_another_kernel() -> None:
    """A character changed, taken out or put in, a line lost, words exchanged: never another kind of exception."""
    text = harness.cuda(SOURCE).ptx
    for n in range(80):
        at = random.randrange(len(text))
        lines, words = text.split("\n"), re.findall(r"\S+", text)
        changed = random.choice(
            [
                text[:at] + random.choice(";{}[],.%$az09 \n-+:@!|()") + text[at + 1 :],
                text[:at] + text[at + random.randint(1, 5) :],
                "\n".join(lines[: (line := random.randrange(len(lines)))] + lines[line + 1 :]),
                text.replace(random.choice(words), random.choice(words), 1),
            ]
        )
        with contextlib.suppress(EmulatorError):
            _generate(changed, f"damage {n} {hash(changed)}")


def test_a_newer_ptx_isa_fails_at_the_instruction_it_brought() -> None:
    text = harness.ptx(HEAD + "ret;").ptx.replace(".version 8.0", ".version 99.5")
    harness.whole_ptx(text)(1, 32, np.zeros(32, np.int32))
    with pytest.raises(EmulatorError, match="teleport"):
        harness.whole_ptx(text.replace("ret;", "teleport.b32 %r1, %r2; ret;"))(1, 32, np.zeros(32, np.int32))
