"""Device functions, pointers to them, switch tables, printf, assert and trap."""

from __future__ import annotations

import numpy as np
import pytest

from cudaops.emulator import inline
from cudaops.errors import EmulatorError
from tests.emulator import harness


def test_device_functions_pass_scalars_structs_and_pointers() -> None:
    kernel = harness.cuda(
        """
        struct Pair { float a; int b; double c; };
        __device__ __noinline__ float power(float x, int n) {
            float s = 1;
            for (int i = 0; i < n; i++) s *= x;
            return s;
        }
        __device__ __noinline__ Pair twice(Pair p, float* at) { p.a += *at; p.b *= 2; p.c = -p.c; *at = p.a; return p; }
        __device__ __noinline__ i64 wide(u8 a, short b, i64 c) { return a + b * c; }
        __global__ void k(double* o, const int* n) {
            int i = threadIdx.x;
            float t = 0.5f;
            Pair p = {1.f, i, 3. * i};
            p = twice(p, &t);
            p = twice(p, &t);
            o[i] = p.a + p.b + p.c + t + power(2.f, n[i]) + (double)wide((u8)(i + 250), (short)(-i), 1LL << 33);
        }"""
    )
    n = np.arange(70, dtype=np.int32) % 7
    o = harness.poisoned(70, np.float64)
    harness.run(kernel, 1, 70, o, n)
    expected = []
    for i in range(70):
        # a: 1, then 1.5 (t = 1.5), then 3 (t = 3)
        expected.append(3 + 4 * i + 3.0 * i + 3 + 2.0 ** n[i] + (i + 250) % 256 - i * 2.0**33)
    np.testing.assert_array_equal(o, expected)


def test_early_return_of_some_lanes_in_a_device_function() -> None:
    kernel = harness.cuda(
        """
        __device__ __noinline__ int f(int x, const int* a) {
            if (x < 3) return -x;
            for (int i = 0; i < 10; i++) {
                if (a[i] == x) return 100 + i;
                if (a[i] > x) break;
            }
            return x;
        }
        __device__ __noinline__ void store(int* o, int v) { if (v == 5) return; *o = v; }
        __global__ void k(int* o, const int* a) {
            int i = threadIdx.x;
            store(o + i, f(i, a));
            store(o + i + 40, f(f(i, a) & 15, a) + 1);
        }"""
    )

    def f(x: int) -> int:
        if x < 3:
            return -x
        for i in range(10):
            if a[i] == x:
                return 100 + i
            if a[i] > x:
                break
        return x

    a = np.array([1, 3, 4, 9, 2, 11, 30, 31, 8, 32], np.int32)
    o = np.full(80, -7, np.int32)
    harness.run(kernel, 1, 40, o, a)
    values = [f(i) for i in range(40)] + [f(f(i) & 15) + 1 for i in range(40)]
    np.testing.assert_array_equal(o, [-7 if v == 5 else v for v in values])


def test_predicated_return_of_a_function_in_ptx() -> None:
    kernel = harness.whole_ptx(
        f""".version 8.0
        .target {harness.ARCH}
        .address_size 64
        .func (.param .b32 r) f(.param .b32 a) {{
            .reg .pred %p;
            .reg .b32 %x;
            ld.param.b32 %x, [a];
            st.param.b32 [r], %x;
            setp.lt.s32 %p, %x, 10;
            @%p ret;
            add.s32 %x, %x, 1000;
            st.param.b32 [r], %x;
            ret;
        }}
        .visible .entry k(.param .u64 out) {{
            .reg .b32 %t;
            .reg .b64 %a, %i;
            mov.u32 %t, %tid.x;
            {{
                .param .b32 p;
                .param .b32 q;
                st.param.b32 [p], %t;
                call (q), f, (p);
                ld.param.b32 %t, [q];
            }}
            ld.param.u64 %a, [out];
            mov.u32 %i32, %tid.x;
            mul.wide.u32 %i, %i32, 4;
            add.u64 %a, %a, %i;
            st.global.b32 [%a], %t;
            ret;
        }}""".replace(".reg .b32 %t;", ".reg .b32 %t, %i32;")
    )
    o = harness.poisoned(40, np.int32)
    harness.run(kernel, 1, 40, o)
    np.testing.assert_array_equal(o, [i if i < 10 else i + 1000 for i in range(40)])


POINTERS = """
    __device__ __noinline__ float add(float x, int n) { return x + n; }
    __device__ __noinline__ float scale(float x, int n) { for (int i = 0; i < n; i++) x *= 2; return x; }
    __device__ __noinline__ float negate(float x, int n) { return n > 2 ? -x : x; }
    __device__ __noinline__ void other(int* p) { *p = 3; }
    typedef float (*F)(float, int);
    __device__ F table[3] = {add, scale, negate};
    typedef void (*G)(int*);
    __device__ G unused = other;
    __global__ void k(float* o, const int* which, int n) {
        int i = threadIdx.x;
        o[i] = table[which[i]](o[i], n);
    }"""


def test_function_pointers_differ_between_lanes() -> None:
    kernel = harness.cuda(POINTERS)
    rng = np.random.default_rng()
    which = rng.integers(0, 3, 64).astype(np.int32)
    x = rng.standard_normal(64).astype(np.float32)
    o = x.copy()
    harness.run(kernel, 1, 64, o, which, 3)
    np.testing.assert_array_equal(o, np.choose(which, [x + np.float32(3), x * 8, -x]))


def test_call_of_no_function_is_an_error() -> None:
    source = """
        typedef int (*F)(int);
        __device__ __noinline__ int f(int x) { return x; }
        __device__ F keep = f;
        __global__ void k(int* o, u64 address) {
            o[0] = ((F)address)(1); // BAD
        }"""
    with pytest.raises(EmulatorError, match=r"^k: k\.cu:6: ") as error:
        harness.run(harness.cuda(source), 1, 1, np.zeros(1, np.int32), 0x1234)
    assert "a call through a pointer, which points to none of the functions" in str(error.value)


@pytest.mark.parametrize("cycle", [("f",), ("f", "g"), ("f", "g", "h")])
def test_recursion_is_an_error_that_names_the_cycle(cycle: tuple[str, ...]) -> None:
    heads = "".join(f"__device__ int {name}(int n);\n" for name in cycle)
    bodies = "".join(
        f"__device__ __noinline__ int {name}(int n) {{ if (n < 2) return 1; "
        f"return n * {cycle[(i + 1) % len(cycle)]}(n - 1) + {cycle[(i + 1) % len(cycle)]}(n / 2); }}\n"
        for i, name in enumerate(cycle)
    )
    source = f"{heads}{bodies}__global__ void k(int* o, int n) {{ o[0] = f(n); }}"
    with pytest.raises(EmulatorError, match="recursion") as error:
        harness.run(harness.cuda(source), 1, 1, np.zeros(1, np.int32), 5)
    assert "use a loop" in str(error.value)
    for name in cycle:
        assert name in str(error.value).split("recursion")[1]


def chain(depth: int) -> str:
    """f0 calls f1 ... each in PTX, so that no compiler shortens it."""
    functions = "".join(
        f".func (.param .b32 r) f{n}(.param .b32 a) {{ .reg .b32 %x; ld.param.b32 %x, [a]; "
        + (
            f"{{ .param .b32 p; .param .b32 q; st.param.b32 [p], %x; call (q), f{n + 1}, (p); ld.param.b32 %x, [q]; }} "
            if n + 1 < depth
            else ""
        )
        + "add.s32 %x, %x, 1; st.param.b32 [r], %x; ret; }\n"
        for n in reversed(range(depth))
    )
    return (
        f".version 8.0\n.target {harness.ARCH}\n.address_size 64\n{functions}"
        ".visible .entry k(.param .u64 out) { .reg .b32 %x; .reg .b64 %a; mov.b32 %x, 100; "
        "{ .param .b32 p; .param .b32 q; st.param.b32 [p], %x; call (q), f0, (p); ld.param.b32 %x, [q]; } "
        "ld.param.u64 %a, [out]; st.global.b32 [%a], %x; ret; }"
    )


def test_deepest_chain_of_calls() -> None:
    o = np.zeros(1, np.int32)
    harness.run(harness.whole_ptx(chain(inline.DEEPEST - 1)), 1, 1, o)
    assert o[0] == 100 + inline.DEEPEST - 1


def test_too_deep_a_chain_is_an_error() -> None:
    with pytest.raises(EmulatorError, match=f"calls nest more than {inline.DEEPEST} deep"):
        harness.run(harness.whole_ptx(chain(inline.DEEPEST + 1)), 1, 1, np.zeros(1, np.int32))


def test_function_without_a_body_is_an_error() -> None:
    kernel = harness.ptx(
        ".reg .b32 %x; .loc 1 7 0\n"
        "{ .param .b32 p; .param .b32 q; st.param.b32 [p], 2; call (q), elsewhere, (p); ld.param.b32 %x, [q]; } ret;",
        module=".extern .func (.param .b32 r) elsewhere (.param .b32 a);",
    )
    with pytest.raises(EmulatorError, match=r"^test\.cu:7: call of elsewhere, which has no body"):
        harness.run(kernel, 1, 1, np.zeros(1, np.int32))


SWITCH = """
    __global__ void k(int* o, const int* which, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        int x = i;
        switch (which[i]) {
            case 0: x = x * 3 + o[0]; break;
            case 1: for (int j = 0; j < i % 5; j++) x ^= x << j; break;
            case 2: x = -x;
            case 3: x += 7; break;
            case 4: return;
            case 5: x = __popc(x); break;
            case 6: x = x * x; break;
            case 7: x = x / 3; break;
            case 8: x = x % 3; break;
            case 9: x = ~x; break;
            default: x = 12345;
        }
        o[i + 1] = x;
    }"""


def test_switch() -> None:
    rng = np.random.default_rng()
    which = rng.integers(-2, 13, 200).astype(np.int32)
    o = np.full(201, 17, np.int32)
    expected = o.copy()
    for i, w in enumerate(which):
        x = i
        if w == 1:
            for j in range(i % 5):
                x = int(np.int64(x ^ (x << j)).astype(np.int32))
        elif w == 4:
            continue
        else:
            cases = {0: x * 3 + 17, 2: 7 - x, 3: x + 7, 5: x.bit_count(), 6: x * x, 7: x // 3, 8: x % 3, 9: ~x}
            x = cases.get(int(w), 12345)
        expected[i + 1] = x
    harness.run(harness.cuda(SWITCH), 4, 64, o, which, 200)
    np.testing.assert_array_equal(o, expected)


def test_branch_table() -> None:
    """brx.idx; what lies past the table is undefined and is not tested."""
    kernel = harness.ptx(
        """
        .reg .b32 %t, %k, %x;
        .reg .b64 %a, %i;
        mov.u32 %t, %tid.x;
        and.b32 %k, %t, 3;
        targets: .branchtargets one, two, three, one;
        brx.idx %k, targets;
        one: add.s32 %x, %t, 100; bra.uni end;
        two: mul.lo.s32 %x, %t, -2; bra.uni end;
        three: mov.b32 %x, 7;
        end:
        ld.param.u64 %a, [out];
        mul.wide.u32 %i, %t, 4;
        add.u64 %a, %a, %i;
        st.global.b32 [%a], %x;
        ret;"""
    )
    o = harness.poisoned(50, np.int32)
    harness.run(kernel, 1, 50, o)
    np.testing.assert_array_equal(o, [[t + 100, -2 * t, 7, t + 100][t % 4] for t in range(50)])


# -- printf -----------------------------------------------------------------------------------------------------------
PRINTF = 'extern "C" __device__ int printf(const char*, ...);\n'


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (r'"plain\n"', "plain\n"),
        (r'"%d %i %5d|%-5d|%05d|%+d\n", -3, 4, 5, 6, 7, 8', "-3 4     5|6    |00007|+8\n"),
        (r'"%u %x %X %o %#x\n", 4000000000u, 255, 255, 8, 16', "4000000000 ff FF 10 0x10\n"),
        (r'"%u\n", -1', "4294967295\n"),
        (r'"%lld %llu %ld %llx\n", -5LL, ~0ull, 7L, 1ull << 40', "-5 18446744073709551615 7 10000000000\n"),
        (r'"%d %lld %d %f %d\n", 1, 2LL, 3, 4.5, 5', "1 2 3 4.500000 5\n"),
        (r'"%f %.2f %8.3f|%-8.1f|%e %g %G\n", 1.5f, 2.0, 3.25, 4.0, 12345.678, 0.0001, 1e-10',
         "1.500000 2.00    3.250|4.0     |1.234568e+04 0.0001 1E-10\n"),
        (r'"%f %f %F\n", 1.0 / 0.0, -1.0 / 0.0, 1.0 / 0.0', "inf -inf INF\n"),
        (r'"%c%c%%%s|%5s|%-5s|%.2s\n", 65, 66, "text", "ab", "cd", "efg"', "AB%text|   ab|cd   |ef\n"),
        (r'"%hd %hhd %hu %hhu\n", 70000, 300, 70000, 300', "4464 44 4464 44\n"),
        (r'"%*d|%-*d|%.*f\n", 5, 1, 4, 2, 1, 3.14159', "    1|2   |3.1\n"),
        (r'"%.3d|% d|%+.1e\n", 5, 6, 7.25', "005| 6|+7.2e+00\n"),
        (r'"%zu\n", sizeof(double)', "8\n"),
        (r'"%a %A|%9a|%-9a|%+a\n", 1.0, -1.5, 2.0, 0.5, 0.15625', "0x1p+0 -0X1.8P+0|   0x1p+1|0x1p-1   |+0x1.4p-3\n"),
        (r'"%x\n", -1', "ffffffff\n"),
    ],
)  # fmt: skip
def test_printf_formats(call: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    harness.run(harness.cuda(f"{PRINTF}__global__ void k() {{ printf({call}); }}"), 1, 1)
    assert capsys.readouterr().out == expected


def test_printf_of_what_no_line_can_want(capsys: pytest.CaptureFixture[str]) -> None:
    """%n, which writes nothing on a GPU; and widths that are no widths."""
    text = r"""__global__ void k(char* x) { printf("a%nb%d %*d %.*f\n", x, 5, 2000000000, 6, 2000000000, 1.0); }"""
    harness.run(harness.cuda(PRINTF + text), 1, 1, np.zeros(8, np.int8))
    printed = capsys.readouterr().out
    assert printed.split()[:2] == ["ab5", "6"]
    assert len(printed) < 10000


def test_printf_by_blocks_and_lanes_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = harness.cuda(
        PRINTF
        + r"""__global__ void k(const double* x) {
            if (threadIdx.x % 3 == 1) printf("block %d thread %d x %g\n", blockIdx.x, threadIdx.x, x[threadIdx.x]);
        }"""
    )
    x = np.random.default_rng().standard_normal(40)
    harness.run(kernel, 7, 40, x, threads=2)
    lines = [f"block {b} thread {t} x {x[t]:g}" for b in range(7) for t in range(40) if t % 3 == 1]
    assert capsys.readouterr().out.splitlines() == lines


def test_printf_more_than_the_log_holds_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = harness.cuda(
        PRINTF + r"""__global__ void k() { printf("%d\n", (int)(blockIdx.x * 256 + threadIdx.x)); }"""
    )
    harness.run(kernel, 32, 256)
    lines = capsys.readouterr().out.splitlines()
    assert 1000 < len(lines) < 8192
    assert lines[-1] == f"[{8192 - len(lines) + 1} more lines of printf: the log of a launch holds 1048576 bytes]"


def test_printf_result_is_the_number_of_arguments_or_less() -> None:
    """CUDA: printf returns the number of arguments parsed; 0 and -1 are the special cases."""
    kernel = harness.cuda(PRINTF + r'__global__ void k(int* o) { o[0] = printf(""); }')
    o = np.full(1, 99, np.int32)
    harness.run(kernel, 1, 1, o)
    assert o[0] == 0


# -- assert, trap -----------------------------------------------------------------------------------------------------
ASSERT = '#define ASSERT(x) ((x) ? (void)0 : __assertfail(#x, __FILE__, __LINE__, "k", (size_t)1))\n'


def test_assert_that_holds_does_nothing_and_one_that_fails_raises_at_its_line() -> None:
    kernel = harness.cuda(
        ASSERT + "__global__ void k(int* o, int n) {\n int t = threadIdx.x;\n ASSERT(t < n);\n o[t] = t; }"
    )
    o = harness.poisoned(64, np.int32)
    harness.run(kernel, 1, 64, o, 64)
    np.testing.assert_array_equal(o, np.arange(64))
    with pytest.raises(EmulatorError, match=r"^k: k\.cu:4: block \(0, 0, 0\), warp 1: an assertion failed"):
        harness.run(kernel, 1, 64, o, 63)


def test_trap_raises_with_block_and_line() -> None:
    kernel = harness.cuda(
        '__global__ void k(int* o, int bad) {\n if (blockIdx.x == bad)\n asm volatile("trap;");\n o[blockIdx.x] = 1; }'
    )
    o = np.zeros(5, np.int32)
    harness.run(kernel, 5, 32, o, 7)
    np.testing.assert_array_equal(o, 1)
    with pytest.raises(EmulatorError, match=r"^k: k\.cu:3: block \(3, 0, 0\), warp 0: the kernel executed trap$"):
        harness.run(kernel, 5, 32, o, 3)


def test_a_launch_after_a_trap_is_as_if_nothing_had_been() -> None:
    kernel = harness.cuda('__global__ void k(int* o, int bad) { if (bad) asm volatile("trap;"); o[threadIdx.x] = 2; }')
    o = np.zeros(64, np.int32)
    with pytest.raises(EmulatorError):
        harness.run(kernel, 1, 64, o, 1)
    np.testing.assert_array_equal(o, 0)
    harness.run(kernel, 1, 64, o, 0)
    np.testing.assert_array_equal(o, 2)
