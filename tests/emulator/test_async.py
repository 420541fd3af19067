"""What completes later: groups of cp.async, and mbarriers."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import cudaops
from cudaops.errors import EmulatorError
from tests.emulator import harness

HELPERS = """
__device__ unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy4(int *to, const int *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(to)), "l"(from) : "memory");
}
__device__ void copy16(int *to, const int *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(to)), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ void wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
typedef unsigned long long u64b;
__device__ void init(u64b *b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory");
}
__device__ u64b arrive(u64b *b) {
    u64b state;
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(b)) : "memory");
    return state;
}
__device__ bool complete(u64b *b, int parity) {
    int ok;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
                 : "=r"(ok) : "r"(at(b)), "r"(parity) : "memory");
    return ok;
}
"""


def kernel(text: str) -> harness.Kernel:
    return harness.cuda(HELPERS + "#line 1\n" + text)


def ints(n: int) -> np.ndarray:
    return harness.poisoned(n, np.int32)


def numbers(n: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 1 << 30, n).astype(np.int32)


# -- groups of cp.async ---------------------------------------------------------------------------------------------------
def test_wait_group_leaves_the_newest_groups() -> None:
    """What is still on its way has not come: shared memory holds what it held before."""
    k = kernel("""
    __global__ void k(const int *in, int *out) {
        __shared__ int s[4][32];
        int t = threadIdx.x;
        for (int g = 0; g < 4; g++) s[g][t] = -1;
        for (int g = 0; g < 4; g++) { copy4(&s[g][t], in + 32 * g + t); commit(); }
        wait<4>(); for (int g = 0; g < 4; g++) out[32 * g + t] = s[g][t];
        wait<1>(); for (int g = 0; g < 4; g++) out[128 + 32 * g + t] = s[g][t];
        wait<0>(); for (int g = 0; g < 4; g++) out[256 + 32 * g + t] = s[g][t];
    }""")
    given, out = numbers(128), ints(384)
    harness.run(k, 1, 32, given, out)
    np.testing.assert_array_equal(out[:128], -1)
    np.testing.assert_array_equal(out[128:], [*given[:96], *[-1] * 32, *given])


def test_wait_group_does_not_wait_for_what_is_not_committed() -> None:
    k = kernel("""
    __global__ void k(const int *in, int *out) {
        __shared__ int s[64];
        int t = threadIdx.x;
        s[t] = s[32 + t] = -1;
        copy4(&s[t], in + t);
        commit();
        copy4(&s[32 + t], in + 32 + t);
        wait<0>(); out[t] = s[t]; out[32 + t] = s[32 + t];
        wait_all(); out[64 + t] = s[32 + t];
    }""")
    given, out = numbers(64), ints(96)
    harness.run(k, 1, 32, given, out)
    np.testing.assert_array_equal(out, [*given[:32], *[-1] * 32, *given[32:]])


def test_groups_are_of_each_thread() -> None:
    k = kernel("""
    __global__ void k(const int *in, int *out) {
        __shared__ int s[96];
        int t = threadIdx.x;
        s[t] = -1;
        copy4(&s[t], in + t);
        if (t % 2) commit();          // these have one group, the others none
        commit();                     // and now two, of which the newer is empty, or one
        wait<1>();
        out[t] = s[t];
    }""")
    given, out = numbers(96), ints(96)
    harness.run(k, 1, 96, given, out)
    np.testing.assert_array_equal(out, np.where(np.arange(96) % 2, given, -1))


@pytest.mark.parametrize("count", [100, 128, 129, 300])
def test_many_copies_on_their_way(count: int) -> None:
    k = kernel(f"""
    __global__ void k(const int *in, int *out) {{
        extern __shared__ int s[];
        int t = threadIdx.x;
        for (int i = 0; i < {count}; i++) copy16(s + 4 * (32 * i + t), in + 4 * (32 * i + t));
        commit();
        wait<0>();
        for (int i = 0; i < {4 * count}; i++) out[32 * i + t] = s[32 * i + t];
    }}""")
    given, out = numbers(128 * count), ints(128 * count)
    harness.run(k, 1, 32, given, out, smem=512 * count)
    np.testing.assert_array_equal(out, given)


def test_a_pipeline_of_stages() -> None:
    k = kernel("""
    __global__ void k(const int *in, int *out, int n) {
        __shared__ __align__(16) int s[3][256];
        int t = threadIdx.x;
        for (int i = 0; i < 2; i++) { if (i < n) copy16(&s[i][4 * t], in + 256 * i + 4 * t); commit(); }
        int sum = 0;
        for (int i = 0; i < n; i++) {
            wait<1>();
            __syncthreads();
            if (i + 2 < n) copy16(&s[(i + 2) % 3][4 * t], in + 256 * (i + 2) + 4 * t);
            commit();
            for (int j = 0; j < 4; j++) sum = sum * 3 + s[i % 3][(t + 64 * j + 1) % 256];
        }
        out[t] = sum;
    }""")
    given, out = numbers(256 * 11), ints(64)
    with cudaops.sanitize():
        harness.run(k, 1, 64, given, out, 11)
    wanted = np.zeros(64, np.int32)
    for row in given.reshape(11, 256):
        for j in range(4):
            wanted = wanted * np.int32(3) + row[(np.arange(64) + 64 * j + 1) % 256]
    np.testing.assert_array_equal(out, wanted)


# -- mbarrier -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [32, 64, 100])
def test_threads_meet_at_an_mbarrier(block: int) -> None:
    k = kernel("""
    __global__ void k(int *out, int n) {
        __shared__ u64b b;
        __shared__ int s[128];
        int t = threadIdx.x;
        if (t == 0) init(&b, blockDim.x);
        __syncthreads();
        for (int i = 0; i < n; i++) {
            s[t] = t + 1000 * i;
            u64b state = arrive(&b);
            int ok = 0;
            while (!ok)
                asm volatile("{ .reg .pred p; mbarrier.test_wait.acquire.cta.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
                             : "=r"(ok) : "r"(at(&b)), "l"(state) : "memory");
            out[t] = s[blockDim.x - 1 - t];
            arrive(&b);
            while (!complete(&b, 1)) { }
        }
    }""")
    out = ints(block)
    harness.run(k, 1, block, out, 3)
    np.testing.assert_array_equal(out, 2000 + np.arange(block - 1, -1, -1))


def test_a_warp_makes_what_others_use() -> None:
    """Full and empty barriers of two stages, told apart by parity."""
    k = kernel("""
    __global__ void k(const int *in, int *out, int n) {
        __shared__ u64b full[2], empty[2];
        __shared__ int s[2][32];
        int t = threadIdx.x, lane = t % 32, warp = t / 32;
        if (t == 0) for (int i = 0; i < 2; i++) { init(full + i, 32); init(empty + i, 64); }
        __syncthreads();
        for (int i = 0; i < n; i++) {
            int stage = i % 2, parity = i / 2 % 2;
            if (warp == 0) {
                while (!complete(empty + stage, parity ^ 1)) { }
                copy4(&s[stage][lane], in + 32 * i + lane);
                asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at(full + stage)) : "memory");
            } else {
                while (!complete(full + stage, parity)) { }
                out[64 * i + t - 32] = s[stage][31 - lane] * warp;
                arrive(empty + stage);
            }
        }
    }""")
    given, out = numbers(32 * 9) % 1000, ints(64 * 9)
    harness.run(k, 1, 96, given, out, 9)
    mirrored = given.reshape(9, 32)[:, ::-1]
    np.testing.assert_array_equal(out.reshape(9, 2, 32), np.stack([mirrored, mirrored * 2], axis=1))


MBARRIER = """
.reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %q<20>;
.shared .align 8 .b64 bar;
ld.param.u64 %q0, [out];
mov.u32 %r0, bar;
"""


def bits_of(body: str, count: int) -> list[int]:
    """Run by one thread; `STORE n` writes %r9 to out[n]."""
    for n in range(count):
        body = body.replace(f"STORE {n};", f"st.global.u32 [%q0+{4 * n}], %r9;")
    body = body.replace("TEST", "mbarrier.test_wait.parity.shared.b64 %p1, [%r0],").replace(
        "SEE;", "selp.b32 %r9, 1, 0, %p1;"
    )
    out = ints(count)
    harness.run(harness.ptx(MBARRIER + body + "\nret;"), 1, 1, out)
    return out.tolist()


def test_parity_of_phases() -> None:
    """The phase before the first counts as complete."""
    assert bits_of("""
        mbarrier.init.shared.b64 [%r0], 2;
        TEST 1; SEE; STORE 0;  TEST 0; SEE; STORE 1;
        mbarrier.arrive.shared.b64 _, [%r0];
        TEST 0; SEE; STORE 2;
        mbarrier.arrive.shared.b64 _, [%r0];
        TEST 0; SEE; STORE 3;  TEST 1; SEE; STORE 4;
        mbarrier.arrive.shared.b64 _, [%r0], 2;
        TEST 1; SEE; STORE 5;  TEST 0; SEE; STORE 6;
    """, 7) == [1, 0, 0, 1, 0, 1, 0]  # fmt: skip


def test_bytes_come_before_or_after_they_are_announced() -> None:
    for first, second in (("expect_tx", "complete_tx"), ("complete_tx", "expect_tx")):
        assert bits_of(f"""
            mbarrier.init.shared.b64 [%r0], 1;
            mbarrier.{first}.relaxed.cta.shared::cta.b64 [%r0], 256;
            mbarrier.arrive.shared.b64 _, [%r0];
            TEST 0; SEE; STORE 0;
            mbarrier.{second}.relaxed.cta.shared::cta.b64 [%r0], 256;
            TEST 0; SEE; STORE 1;
        """, 2) == [0, int(first == "expect_tx")]  # fmt: skip


def test_arrive_and_expect() -> None:
    assert bits_of("""
        mbarrier.init.shared.b64 [%r0], 1;
        mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r0], 64;
        TEST 0; SEE; STORE 0;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 60;
        TEST 0; SEE; STORE 1;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 4;
        TEST 0; SEE; STORE 2;
    """, 3) == [0, 0, 1]  # fmt: skip


def test_who_drops_out_is_not_expected_again() -> None:
    assert bits_of("""
        mbarrier.init.shared.b64 [%r0], 3;
        mbarrier.arrive_drop.shared.b64 %q1, [%r0];
        mbarrier.pending_count.b64 %r9, %q1; STORE 0;
        mbarrier.arrive.noComplete.shared.b64 %q2, [%r0], 1;
        mbarrier.pending_count.b64 %r9, %q2; STORE 1;
        mbarrier.arrive_drop.noComplete.shared.b64 %q3, [%r0], 0;
        mbarrier.arrive.shared.b64 %q3, [%r0];
        TEST 0; SEE; STORE 2;
        mbarrier.arrive.shared.b64 %q4, [%r0];
        mbarrier.pending_count.b64 %r9, %q4; STORE 3;
        TEST 1; SEE; STORE 4;
        mbarrier.arrive.shared.b64 %q4, [%r0];
        TEST 1; SEE; STORE 5;
        mbarrier.inval.shared.b64 [%r0];
    """, 6) == [3, 2, 1, 2, 0, 1]  # fmt: skip


@pytest.mark.parametrize("form", ["test_wait", "try_wait"])
@pytest.mark.parametrize("where", ["", ".shared", ".shared::cta"])
@pytest.mark.parametrize("order", ["", ".acquire.cta", ".acquire.cluster", ".relaxed.cta"])
def test_forms_of_waiting(form: str, where: str, order: str) -> None:
    address = "%q9" if not where else "%r0"
    hint = ", 1000" if form == "try_wait" else ""
    assert bits_of(f"""
        cvta.shared.u64 %q9, bar;
        mbarrier.init{where}.b64 [{address}], 1;
        mbarrier.arrive{order.replace("acquire", "release")}{where}.b64 %q1, [{address}];
        mbarrier.{form}{order}{where}.b64 %p1, [{address}], %q1{hint}; SEE; STORE 0;
        mbarrier.arrive{where}.b64 %q2, [{address}];
        mbarrier.init{where}.b64 [{address}], 2;
        mbarrier.{form}.parity{order}{where}.b64 %p1, [{address}], 0; SEE; STORE 1;
        mbarrier.expect_tx.relaxed.cluster{where or ".shared::cta"}.b64 [%r0], 0;
        mbarrier.complete_tx.relaxed.cluster{where or ".shared::cta"}.b64 [%r0], 0;
        mbarrier.arrive_drop{order.replace("acquire", "release")}{where}.b64 _, [{address}];
        mbarrier.arrive_drop.expect_tx{order.replace("acquire", "release")}{where}.b64 _, [{address}], 0;
        mbarrier.inval{where}.b64 [{address}];
    """, 2) == [1, 0]  # fmt: skip


def test_cp_async_arrives_for_the_lane() -> None:
    for noinc, complete in (("", 0), (".noinc", 1)):
        assert bits_of(f"""
            mbarrier.init.shared.b64 [%r0], 1;
            cp.async.mbarrier.arrive{noinc}.shared.b64 [%r0];
            cp.async.mbarrier.arrive.shared::cta.b64 [%r0];
            TEST 0; SEE; STORE 0;
        """, 1) == [complete]  # fmt: skip


def test_one_arrival_too_many() -> None:
    k = kernel("""
    __global__ void k(int *x) {
        __shared__ u64b b;
        if (threadIdx.x == 0) init(&b, 1);
        __syncthreads();
        asm volatile("{ .reg .b64 s; mbarrier.arrive.noComplete.shared.b64 s, [%0], 2; }" :: "r"(at(&b)) : "memory");
    }""")
    with pytest.raises(EmulatorError, match=r"k\.cu:6: .*arrives by mbarrier\.arrive.* expects nobody any more"):
        k(1, 32, np.zeros(1, np.int32))


def test_an_mbarrier_that_nobody_arrives_at_is_a_deadlock() -> None:
    k = kernel("""
    __global__ void k(int *x) {
        __shared__ u64b b;
        if (threadIdx.x == 0) init(&b, 64);
        __syncthreads();
        if (threadIdx.x != 13) arrive(&b);
        while (!complete(&b, 0)) { }
    }""")
    with pytest.raises(EmulatorError, match=r"deadlock, no warp can go on: warps 0-1 .*mbarrier\.test_wait"):
        k(1, 64, np.zeros(1, np.int32))


def test_what_comes_with_clusters_says_so() -> None:
    for text in (
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r0];",
        "cp.async.bulk.commit_group;",
        "mapa.shared::cluster.u32 %r1, %r0, 0;",
        "barrier.cluster.arrive;",
        "fence.proxy.async;",
    ):
        with pytest.raises(EmulatorError, match=r"test\.cu:7: PTX instruction `" + text.split(" ")[0].rstrip(";")):
            harness.ptx(MBARRIER + ".loc 1 7 0\n" + text + "\nret;")(1, 32, np.zeros(1, np.int32))


BEFORE_IT_IS_SET_UP = """
__global__ void k(int *out) {
    __shared__ __align__(8) unsigned long long barrier;
    unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) INIT
    SYNC
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" :: "r"(at) : "memory");
    __syncthreads();
    out[threadIdx.x] = 1;
}"""
INIT = 'asm volatile("mbarrier.init.shared.b64 [%0], 64;" :: "r"(at) : "memory");'


@pytest.mark.parametrize(
    ("init", "sync", "message"),
    [
        (INIT, "__syncthreads();", ""),
        (INIT, "", r"k\.cu:7: .* in a race with thread \(0, 0, 0\), mbarrier\.init"),
        (";", "__syncthreads();", r"k\.cu:7: .* which nothing has written"),
    ],
    ids=["as it should be", "no barrier after it", "not at all"],
)
def test_arriving_at_an_mbarrier_before_it_is_set_up(init: str, sync: str, message: str) -> None:
    kernel = harness.cuda(BEFORE_IT_IS_SET_UP.replace("INIT", init).replace("SYNC", sync))
    wanted = pytest.raises(cudaops.SanitizerError, match=message) if message else contextlib.nullcontext()
    with cudaops.sanitize(), wanted:
        harness.run(kernel, 1, 64, np.zeros(64, np.int32))
