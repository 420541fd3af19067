"""Control flow: lanes part, wait, meet again, leave early, and reach barriers together or raise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudaops
from cudaops.errors import EmulatorError
from tests.emulator import flow_programs, harness


@dataclass(frozen=True)
class Flow:
    """A kernel's body, int f(int i, const int* a, int n) for thread i, and the same in Python."""

    name: str
    body: str
    model: Callable[[int, list[int], int], int]


def _loops_on_both_sides(i: int, a: list[int], n: int) -> int:
    if a[i] > 5:
        return sum(a[j] * j for j in range(a[i]))
    return -sum(a[j] for j in range(10 - a[i]))


def _nested_if(i: int, a: list[int], n: int) -> int:
    s = 0
    if a[i] & 1:
        for j in range(a[i]):
            s += a[j] if a[j] & 2 else (j * 3 if a[j] & 4 else -j)
    elif a[i] & 2:
        s = a[a[i]] + 100
    return s


def _while(i: int, a: list[int], n: int) -> int:
    x, steps = a[i] + i + 1, 0
    while x != 1:
        x = 3 * x + 1 if x & 1 else x // 2
        steps += 1
    return steps


def _break_continue(i: int, a: list[int], n: int) -> int:
    s = 0
    for j in range(n):
        if a[(i + j) % n] & 1:
            continue
        if a[j] == a[i]:
            break
        s = s * 3 + j
    return s


def _return_in_loop(i: int, a: list[int], n: int) -> int:
    for j in range(n):
        if a[j] * a[i] == 12:
            return 1000 + j
    return a[i]


def _leave_two_loops(i: int, a: list[int], n: int) -> int:
    s = 0
    for j in range(8):
        for k in range(8):
            s += a[j] ^ k
            if s > 20 + a[i] * 3:
                return s * 64 + j * 8 + k
    return -s


def _uniform_loop_inside(i: int, a: list[int], n: int) -> int:
    s = 0
    if a[i] > 3:
        for j in range(n // 4):
            s += a[j] * (j + a[i])
        s *= 2
    return s


def _counter_after_divergence(i: int, a: list[int], n: int) -> int:
    j = 0
    while j < n:
        if a[j] == a[i] and j >= i % 4:
            break
        j += 1
    return j


def _switch(i: int, a: list[int], n: int) -> int:
    x = a[i] * 1000
    if x == 1000:
        return i + 3
    if x == 3000:
        return sum(a[j] for j in range(i % 8))
    if x in (5000, 7000):
        return -i
    return x


def _switch_falls_through(i: int, a: list[int], n: int) -> int:
    s = 0
    for j in range(i % 5 + 1):
        v = a[j]
        if v == 2:
            s += 5
        if v in (2, 6):
            s = s * 7 + a[(j + 1) % n]
        elif v == 9:
            s -= 11
        else:
            s ^= v
    return s


def _short_circuit(i: int, a: list[int], n: int) -> int:
    s = 0
    for j in range(n):
        if (a[j] > 2 and a[(j + i) % n] > 2) or (a[i] == 1 and j % 3 == 0):
            s += j
        elif not (a[j] == 0 or a[(j * i) % n] == 0):
            s -= 1
    return s


def _greatest_divisor(i: int, a: list[int], n: int) -> int:
    x, y = a[i] * 12 + 6, i + 4
    while y:
        x, y = y, x % y
    return x


def _flags(i: int, a: list[int], n: int) -> int:
    seen = odd = False
    for j in range(a[i] + 1):
        if a[j] > 6:
            seen = True
        if a[j] & 1:
            odd = not odd
    return seen * 2 + odd


def _triangle(i: int, a: list[int], n: int) -> int:
    s = 0
    for j in range(a[i]):
        k = j
        while True:
            s += a[k] + j
            k += 1 + (i & 1)
            if k >= a[i] + 2:
                break
    return s


FLOWS = [
    Flow(
        "loops on both sides of an if",
        "int s = 0; if (a[i] > 5) { for (int j = 0; j < a[i]; j++) s += a[j] * j; }"
        "else { for (int j = 0; j < 10 - a[i]; j++) s -= a[j]; } return s;",
        _loops_on_both_sides,
    ),
    Flow(
        "nested ifs",
        "int s = 0; if (a[i] & 1) { for (int j = 0; j < a[i]; j++) { if (a[j] & 2) s += a[j]; else if (a[j] & 4) s += j * 3;"
        "else s -= j; } } else if (a[i] & 2) { s = a[a[i]] + 100; } return s;",
        _nested_if,
    ),
    Flow(
        "a trip count of each lane's own",
        "int x = a[i] + i + 1, steps = 0; while (x != 1) { if (x & 1) x = 3 * x + 1; else x /= 2; steps++; } return steps;",
        _while,
    ),
    Flow(
        "break and continue",
        "int s = 0; for (int j = 0; j < n; j++) { if (a[(i + j) % n] & 1) continue; if (a[j] == a[i]) break; s = s * 3 + j; }"
        "return s;",
        _break_continue,
    ),
    Flow(
        "return inside a loop",
        "for (int j = 0; j < n; j++) if (a[j] * a[i] == 12) return 1000 + j; return a[i];",
        _return_in_loop,
    ),
    Flow(
        "goto out of two loops",
        "int s = 0, j = 0, k = 0; for (j = 0; j < 8; j++) for (k = 0; k < 8; k++) { s += a[j] ^ k;"
        "if (s > 20 + a[i] * 3) goto out; } return -s; out: return s * 64 + j * 8 + k;",
        _leave_two_loops,
    ),
    Flow(
        "a uniform loop in a masked region",
        "int s = 0; if (a[i] > 3) { for (int j = 0; j < n / 4; j++) s += a[j] * (j + a[i]); s *= 2; } return s;",
        _uniform_loop_inside,
    ),
    Flow(
        "a counter read after lanes left at different times",
        "int j = 0; for (; j < n; j++) if (a[j] == a[i] && j >= i % 4) break; return j;",
        _counter_after_divergence,
    ),
    Flow(
        "a sparse switch",
        "int s = 0; switch (a[i] * 1000) { case 1000: return i + 3; case 3000: for (int j = 0; j < i % 8; j++) s += a[j];"
        "return s; case 5000: case 7000: return -i; default: return a[i] * 1000; }",
        _switch,
    ),
    Flow(
        "a switch that falls through",
        "int s = 0; for (int j = 0; j <= i % 5; j++) switch (a[j]) { case 2: s += 5; case 6: s = s * 7 + a[(j + 1) % n];"
        "break; case 9: s -= 11; break; default: s ^= a[j]; } return s;",
        _switch_falls_through,
    ),
    Flow(
        "short-circuit conditions",
        "int s = 0; for (int j = 0; j < n; j++) { if ((a[j] > 2 && a[(j + i) % n] > 2) || (a[i] == 1 && j % 3 == 0)) s += j;"
        "else if (!(a[j] == 0 || a[(j * i) % n] == 0)) s -= 1; } return s;",
        _short_circuit,
    ),
    Flow(
        "values exchanged in a loop",
        "int x = a[i] * 12 + 6, y = i + 4; while (y) { int t = x % y; x = y; y = t; } return x;",
        _greatest_divisor,
    ),
    Flow(
        "predicates kept in a loop",
        "bool seen = false, odd = false; for (int j = 0; j <= a[i]; j++) { if (a[j] > 6) seen = true; if (a[j] & 1) odd = !odd; }"
        "return seen * 2 + odd;",
        _flags,
    ),
    Flow(
        "a do loop in a loop, both divergent",
        "int s = 0; for (int j = 0; j < a[i]; j++) { int k = j; do { s += a[k] + j; k += 1 + (i & 1); } while (k < a[i] + 2); }"
        "return s;",
        _triangle,
    ),
]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_divergent_flow_is_what_each_thread_alone_does(flow: Flow, seed: int) -> None:
    kernel = harness.cuda(
        f"__device__ __forceinline__ int g(int i, const int* a, int n)"
        f"{{ {flow.body} }}\n"
        "__global__ void k(int* out, const int* a, int n, int limit) { int i = blockIdx.x * blockDim.x + threadIdx.x;"
        "if (i >= limit) return; out[i] = g(i, a, n); }"
    )
    limit = 70  # the last of the 80 threads leave early
    a = np.random.randint(0, 10, 96).astype(np.int32)
    out = np.full(96, -77, np.int32)
    harness.run(kernel, 2, 40, out, a, 64, limit)
    model = [flow.model(i, [int(x) for x in a], 64) for i in range(limit)]
    assert out[:limit].tolist() == [((x + 2**31) % 2**32) - 2**31 for x in model]
    assert (out[limit:] == -77).all()


def test_an_irreducible_loop_through_goto() -> None:
    kernel = harness.cuda(
        """__global__ void k(int* out, const int* a) {
        int i = threadIdx.x, x = a[i], s = 0;
        if (x & 1) goto middle;
        top: s = s * 5 + x; x -= 3; out[i + 64] = s;
        middle: s ^= x; x -= 2; out[i + 128] = x;
        if (x > 0) { if (s & 4) goto top; goto middle; }
        out[i] = s; }"""
    )
    a = np.random.randint(0, 40, 64).astype(np.int32)
    out = np.zeros(192, np.int32)
    harness.run(kernel, 1, 64, out, a)
    expected = []
    for x in map(int, a):
        s, top = 0, not x & 1
        while True:
            if top:
                s, x = s * 5 + x, x - 3
            s, x = s ^ x, x - 2
            if x <= 0:
                break
            top = bool(s & 4)
        expected.append(((s + 2**31) % 2**32) - 2**31)
    assert out[:64].tolist() == expected


def _check_graph(seed: int, size: int, forward: float, one_temporary: bool) -> None:
    source = random.Random(seed)
    nodes = flow_programs.random_graph(source, size, forward)
    for _ in range(2):
        words = np.array([source.getrandbits(32) for _ in range(80)], dtype=np.uint32)
        flow_programs.check(nodes, 40, 2, source.getrandbits(32), words, one_temporary)


GRAPHS = given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(2, 14), forward=st.sampled_from((0.2, 0.4, 0.7, 0.9)),
    one_temporary=st.booleans(),
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@GRAPHS
def test_any_flow_graph_takes_every_thread_its_own_way(
    seed: int, size: int, forward: float, one_temporary: bool
) -> None:
    _check_graph(seed, size, forward, one_temporary)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@GRAPHS
def test_many_flow_graphs(seed: int, size: int, forward: float, one_temporary: bool) -> None:
    _check_graph(seed, size, forward, one_temporary)


# Graphs that once went wrong: (seed, blocks, share of forward jumps).
@pytest.mark.parametrize("graph", [(112, 8, 0.3), (1, 5, 0.7), (7, 10, 0.5)])
def test_flow_graphs_that_went_wrong(graph: tuple[int, int, float]) -> None:
    for one_temporary in (False, True):
        _check_graph(*graph, one_temporary)


# -- geometry -----------------------------------------------------------------------------------------------------------
# No multiple of 32, below a warp, x that divides 32 or not, rows that fill warps or not, planes.
BLOCKS = [
    (1,), (31,), (33,), (100,), (256,), (1024,), (7, 3), (16, 16), (8, 4, 2), (32, 2, 2), (64, 1, 2), (3, 40), (1, 1, 64),
    (2, 1, 33), (4, 2, 5), (5, 5, 3), (16, 3, 2), (96, 2), (8, 8, 8), (1, 32, 2), (2, 8, 3),
]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_thread_and_block_indices(block: tuple[int, ...]) -> None:
    kernel = _indices()
    x, y, z = harness.dim3(block)
    grid = (3, 2, 2)
    threads = x * y * z
    out = harness.poisoned((12, threads, 8), np.int32)
    kernel(grid, block, out)
    harness.assert_guards(out)
    assert np.array_equal(np.asarray(out), _expected_indices((x, y, z), grid))


def _indices() -> harness.Kernel:
    return harness.cuda(
        """__global__ void k(int* out) {
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int* o = out + (b * (blockDim.x * blockDim.y * blockDim.z) + t) * 8;
        unsigned lane, warp; asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm("mov.u32 %0, %%warpid;" : "=r"(warp));
        o[0] = threadIdx.x; o[1] = threadIdx.y; o[2] = threadIdx.z; o[3] = blockIdx.x; o[4] = blockIdx.y; o[5] = blockIdx.z;
        o[6] = lane + 100 * warp; o[7] = blockDim.x + gridDim.x * 10 + gridDim.y * 1000; }"""
    )


def _expected_indices(block: tuple[int, int, int], grid: tuple[int, int, int]) -> np.ndarray:
    x, y, z = block
    t = np.arange(x * y * z)
    b = np.arange(grid[0] * grid[1] * grid[2])[:, None]
    rows = [
        t % x, t // x % y, t // (x * y), b % grid[0], b // grid[0] % grid[1], b // (grid[0] * grid[1]),
        t % 32 + 100 * (t // 32), np.array(x + grid[0] * 10 + grid[1] * 1000),
    ]  # fmt: skip
    return np.stack([np.broadcast_to(row, (b.size, t.size)) for row in rows], axis=2).astype(np.int32)


def test_a_grid_beyond_65536_blocks() -> None:
    kernel = harness.cuda(
        "__global__ void k(unsigned char* out, int n) { long long i = blockIdx.x; if (i * 32768 % 7 == 3) out[i] = 1; }"
    )
    blocks = 70_000
    out = np.zeros(blocks, np.uint8)
    harness.run(kernel, blocks, 1, out, blocks)
    assert np.array_equal(out, (np.arange(blocks, dtype=np.int64) * 32768 % 7 == 3).astype(np.uint8))


# -- leaving early, and barriers ------------------------------------------------------------------------------------------
def test_blocks_and_threads_that_leave_early_are_not_waited_for() -> None:
    kernel = harness.cuda(
        """__global__ void k(int* out, int n) {
        __shared__ int s[96]; int i = threadIdx.x;
        if (blockIdx.x == 1) return;
        if (i >= n) return;
        s[i] = i * 3; __syncthreads();
        out[blockIdx.x * 96 + i] = s[n - 1 - i]; }"""
    )
    for n in (0, 1, 31, 32, 33, 50, 64, 90):
        out = np.full(288, -1, np.int32)
        harness.run(kernel, 3, 90, out, n)
        expected = np.full((3, 96), -1, np.int32)
        expected[[0, 2], :n] = (n - 1 - np.arange(n)) * 3
        assert np.array_equal(out.reshape(3, 96), expected), n


@pytest.mark.parametrize("block", [32, 64, 96, 256, 50])
def test_barriers_in_uniform_loops(block: int) -> None:
    kernel = harness.cuda(
        """extern __shared__ int s[];
        __global__ void k(int* out, const int* a, int rounds) {
        int i = threadIdx.x, n = blockDim.x; int mine = a[i];
        for (int r = 0; r < rounds; r++) {
            s[i] = mine; __syncthreads();
            mine += s[(i + r + 1) % n] * (r + 1); __syncthreads();
        }
        out[i] = mine; }"""
    )
    a = np.random.randint(-1000, 1000, block).astype(np.int32)
    for rounds in (0, 1, 5):
        out = np.zeros(block, np.int32)
        harness.run(kernel, 1, block, out, a, rounds, smem=4 * block)
        mine = a.astype(np.int64)
        for r in range(rounds):
            mine = mine + np.roll(mine, -(r + 1)) * (r + 1)
        assert np.array_equal(out, mine.astype(np.int32))


def test_registers_of_every_kind_live_across_barriers() -> None:
    """Predicates, 16 to 64 bits, floats, uniform, affine and varying values."""
    kernel = harness.cuda(
        """__global__ void k(double* out, const double* a, const short* h, int n, float f) {
        __shared__ double s[64]; int i = threadIdx.x;
        bool odd = h[i] & 1; double d = a[i]; long long w = (long long)h[i] << 33; short small = h[i]; float g = f * h[i];
        int affine = i * 4 + n; bool many = n > 2;
        for (int r = 0; r < n; r++) {
            s[i] = d; __syncthreads(); double other = s[63 - i]; __syncthreads();
            d = odd ? d + other : d - other; w += r + affine; small = small * 3 + 1; g = g * 0.5f + r; odd = !odd;
            affine += 4;
        }
        out[i] = d + (double)w * 1e-9 + small + g + affine * 1e-3 + (many ? 0.25 : 0.0); }""",
        options=("-fmad=false",),
    )
    n, f = 3, 0.75
    a, h = np.random.standard_normal(64), np.random.randint(-500, 500, 64).astype(np.int16)
    out = np.zeros(64)
    harness.run(kernel, 1, 64, out, a, h, n, f)
    odd, d, w, small = h & 1 == 1, a.copy(), h.astype(np.int64) << 33, h.copy()
    g, affine = np.float32(f) * h.astype(np.float32), np.arange(64) * 4 + n
    for r in range(n):
        other = d[::-1].copy()
        d = np.where(odd, d + other, d - other)
        w, small, g = (
            w + r + affine,
            (small.astype(np.int32) * 3 + 1).astype(np.int16),
            g * np.float32(0.5) + np.float32(r),
        )
        odd, affine = ~odd, affine + 4
    expected = d + w * 1e-9 + small + g + affine * 1e-3 + 0.25
    assert np.array_equal(out, expected)


def test_a_barrier_in_divergent_code_that_all_reach() -> None:
    """The condition is loaded per lane, so that nothing says it is the same in all of them; it is."""
    kernel = harness.cuda(
        """__global__ void k(int* out, const int* flags) {
        __shared__ int s[64]; int i = threadIdx.x; s[i] = i;
        if (flags[i] > 0) { s[i] = i * i; __syncthreads(); out[i] = s[63 - i]; }
        out[i] += 1; }"""
    )
    i = np.arange(64)
    for flags, expected in ((np.ones(64, np.int32), (63 - i) ** 2 + 1), (np.zeros(64, np.int32), i * 0 + 1)):
        out = np.zeros(64, np.int32)
        harness.run(kernel, 1, 64, out, flags)
        assert np.array_equal(out, expected)


def test_a_barrier_that_some_threads_of_a_warp_miss() -> None:
    """They have ended, and do not count; but that is not to be relied on."""
    kernel = harness.cuda(
        """__global__ void k(int* out) {
        __shared__ int s[32]; int i = threadIdx.x;
        if (i < 16) {
            s[i] = i;
            __syncthreads();
            out[i] = s[15 - i];
        } else out[i] = i; }"""
    )
    out = np.zeros(32, np.int32)
    harness.run(kernel, 1, 32, out)
    np.testing.assert_array_equal(out, [*range(15, -1, -1), *range(16, 32)])
    with cudaops.sanitize(), pytest.raises(cudaops.SanitizerError, match=r"k\.cu:5: block \(0, 0, 0\).*not reached"):
        harness.run(kernel, 1, 32, out)


def test_barriers_of_warps_on_different_sides_count_as_one() -> None:
    """bar.sync 0 is one barrier of the block, wherever in the text a warp reaches it."""
    kernel = harness.cuda(
        """__global__ void k(int* out) {
        __shared__ int s[64]; int i = threadIdx.x;
        if (i < 32) { s[i] = i; __syncthreads(); out[i] = s[63 - i]; }
        else { s[i] = -i; __syncthreads(); out[i] = s[63 - i]; } }"""
    )
    out = np.zeros(64, np.int32)
    harness.run(kernel, 1, 64, out)
    i = np.arange(64)
    assert np.array_equal(out, np.where(i < 32, -(63 - i), 63 - i))


def test_trap_raises_with_its_line() -> None:
    kernel = harness.cuda("__global__ void k(int* out) {\nif (threadIdx.x == 3)\n__trap();\nout[threadIdx.x] = 1; }")
    with pytest.raises(EmulatorError, match=r"k\.cu:3: block \(0, 0, 0\).*trap"):
        harness.run(kernel, 1, 32, np.zeros(32, np.int32))
