"""Barriers of every kind, waiting loops, and launches in which nothing can go on."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import cudaops
from cudaops.errors import EmulatorError
from tests.emulator import harness

BLOCKS = [32, 64, 100, 256]


def ints(n: int) -> np.ndarray:
    return harness.poisoned(n, np.int32)


# -- bar.red ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("limit", [0, 1, 33, 1000])
def test_syncthreads_count_and_or(block: int, limit: int) -> None:
    kernel = harness.cuda("""
    __global__ void k(int *out, int limit) {
        int t = threadIdx.x;
        int count = __syncthreads_count(t < limit), all = __syncthreads_and(t < limit), some = __syncthreads_or(!(t < limit));
        out[t] = count | (all != 0) << 16 | (some != 0) << 17;
    }""")
    out = ints(block)
    harness.run(kernel, 1, block, out, limit)
    count = min(limit, block)
    np.testing.assert_array_equal(out, count | (count == block) << 16 | (count < block) << 17)


def test_count_in_a_loop_that_all_threads_leave_together() -> None:
    kernel = harness.cuda("""
    __global__ void k(const int *steps, int *out) {
        int t = threadIdx.x, left = steps[t], rounds = 0;
        while (__syncthreads_or(left > 0)) { left--; rounds++; }
        out[t] = rounds;
    }""")
    steps = np.random.default_rng().integers(0, 20, 96).astype(np.int32)
    out = ints(96)
    harness.run(kernel, 1, 96, steps, out)
    np.testing.assert_array_equal(out, max(steps))


# -- named barriers -----------------------------------------------------------------------------------------------------
HAND_OVER = """
__global__ void k(const int *in, int *out, int n) {
    __shared__ int buffer[2][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < n; i++) {
        int full = 1 + i % 2, empty = 3 + i % 2;
        if (warp == 0) {
            if (i >= 2) asm volatile("bar.sync %0, 64;" :: "r"(empty) : "memory");
            buffer[i % 2][lane] = in[32 * i + lane];
            asm volatile("bar.arrive %0, 64;" :: "r"(full) : "memory");
        } else {
            asm volatile("bar.sync %0, 64;" :: "r"(full) : "memory");
            out[32 * i + lane] = buffer[i % 2][31 - lane] + 1;
            asm volatile("bar.arrive %0, 64;" :: "r"(empty) : "memory");
        }
    }
}"""


def test_a_warp_makes_what_another_uses() -> None:
    given = np.random.default_rng().integers(0, 1000, (7, 32)).astype(np.int32)
    out = ints(given.size)
    harness.run(harness.cuda(HAND_OVER), 1, 64, given, out, 7)
    np.testing.assert_array_equal(out.reshape(7, 32), given[:, ::-1] + 1)


def test_groups_of_warps_meet_at_barriers_of_their_own() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *out) {
        __shared__ int s[256];
        int t = threadIdx.x, group = t / 64;
        for (int i = 0; i <= group; i++) {          // another number of times in each group
            s[t] = t * 100 + i;
            asm volatile("barrier.sync %0, 64;" :: "r"(group + 1) : "memory");
            out[t] = s[group * 64 + 63 - t % 64];
            asm volatile("barrier.sync %0, 64;" :: "r"(group + 1) : "memory");
        }
    }""")
    out = ints(256)
    harness.run(kernel, 1, 256, out)
    t = np.arange(256)
    np.testing.assert_array_equal(out, (t // 64 * 64 + 63 - t % 64) * 100 + t // 64)


def test_a_named_reduction() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *out, int limit) {
        int t = threadIdx.x, n = -1;
        if (t < 64)
            asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, %2; barrier.red.popc.aligned.u32 %0, 5, 64, p; }"
                         : "=r"(n) : "r"(t), "r"(limit) : "memory");
        out[t] = n;
    }""")
    out = ints(128)
    harness.run(kernel, 1, 128, out, 40)
    np.testing.assert_array_equal(out, [40] * 64 + [-1] * 64)


@pytest.mark.parametrize("base", ["bar", "bar.cta", "barrier", "barrier.cta"])
@pytest.mark.parametrize("aligned", ["", ".aligned"])
def test_every_form(base: str, aligned: str) -> None:
    """One warp gives its predicates and the other only arrives; all threads give theirs to the rest."""
    if aligned and base.startswith("bar."):
        base = base.replace("bar", "barrier")
    aligned = aligned if base.startswith("barrier") else ""
    kernel = harness.ptx(f"""
    .reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %q<9>;
    mov.u32 %r0, %tid.x;
    setp.lt.u32 %p0, %r0, 5;
    mov.u32 %r1, -1;
    setp.ge.u32 %p3, %r0, 32;
    @%p3 bra SECOND;
    {base}.red.popc{aligned}.u32 %r1, 3, 64, %p0;
    bra.uni BOTH;
    SECOND: {base}.arrive{aligned} 3, 64;
    BOTH: {base}.red.and{aligned}.pred %p1, 0, %p0;
    {base}.red.or{aligned}.pred %p2, 0, %p0;
    {base}.sync{aligned} 0;
    {base}.sync{aligned} 1, 64;
    selp.b32 %r2, 256, 0, %p1;
    selp.b32 %r3, 512, 0, %p2;
    add.u32 %r1, %r1, %r2;
    add.u32 %r1, %r1, %r3;
    ld.param.u64 %q0, [out];
    mad.wide.u32 %q1, %r0, 4, %q0;
    st.global.u32 [%q1], %r1;
    ret;""")
    out = ints(64)
    harness.run(kernel, 1, 64, out)
    np.testing.assert_array_equal(out, [5 + 512] * 32 + [-1 + 512] * 32)


def test_threads_that_ended_do_not_count() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *out, int stay) {
        __shared__ int s[128];
        int t = threadIdx.x;
        if (t >= stay) return;
        s[t] = t + 1;
        __syncthreads();
        out[t] = s[stay - 1 - t];
    }""")
    for stay in (1, 32, 33, 64, 100, 128):
        out = ints(128)
        harness.run(kernel, 1, 128, out, stay)
        np.testing.assert_array_equal(out[:stay], np.arange(stay, 0, -1))


@pytest.mark.parametrize("text", ["bar.sync 16;", "barrier.cta.sync 1, 33;", "bar.sync 1, 2048;"])
def test_barriers_that_there_are_not(text: str) -> None:
    with pytest.raises(EmulatorError, match=r"test\.cu:5: .*sync"):
        harness.ptx(f".loc 1 5 0\n{text}\nret;")(1, 64, np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("number", "count"), [(16, 64), (-1, 64), (1, 33), (1, 0), (1, -32), (1, 1056), (1, 65536 + 64)]
)
def test_numbers_and_counts_that_there_are_not_in_registers(number: int, count: int) -> None:
    kernel = harness.cuda("""
    __global__ void k(const int *numbers) {
        asm volatile("bar.sync %0, %1;" :: "r"(numbers[0]), "r"(numbers[1]) : "memory");
    }""")
    harness.run(kernel, 1, 64, np.array([15, 64], np.int32))
    with pytest.raises(EmulatorError, match=r"k\.cu:3: .*bar\.sync has a number of a barrier beyond 15, or a count"):
        harness.run(kernel, 1, 64, np.array([number, count], np.int32))


# -- barriers in divergent code -----------------------------------------------------------------------------------------
def test_lanes_of_a_warp_wait_at_different_places() -> None:
    """Since sm_70 each thread waits for itself; a barrier is complete when all have come to it, wherever that is."""
    kernel = harness.cuda("""
    __global__ void k(int *out) {
        __shared__ int s[64];
        int t = threadIdx.x;
        if (t % 3 == 0) {
            s[t] = t;
            asm volatile("barrier.sync 0;" ::: "memory");
            out[t] = s[63 - t];
        } else {
            s[t] = t + 100;
            asm volatile("barrier.sync 0;" ::: "memory");
            out[t] = s[63 - t] + 1000;
        }
    }""")
    out = ints(64)
    harness.run(kernel, 1, 64, out)
    t = np.arange(64)
    other = 63 - t
    wanted = np.where(other % 3 == 0, other, other + 100) + np.where(t % 3 == 0, 0, 1000)
    np.testing.assert_array_equal(out, wanted)


def test_a_barrier_in_a_loop_that_lanes_leave_one_by_one() -> None:
    kernel = harness.cuda("""
    __global__ void k(const int *steps, int *out) {
        __shared__ int s[64];
        int t = threadIdx.x, sum = 0;
        for (int i = 0; i < steps[t]; i++) {
            s[t] = i;
            asm volatile("barrier.sync 0;" ::: "memory");
            sum += s[t] + 1;
        }
        out[t] = sum;
    }""")
    steps = np.random.default_rng().integers(0, 9, 64).astype(np.int32)
    out = ints(64)
    harness.run(kernel, 1, 64, steps, out)
    np.testing.assert_array_equal(out, steps * (steps + 1) // 2)


def test_a_barrier_under_a_branch_that_whole_warps_take() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *out) {
        __shared__ int s[64];
        int t = threadIdx.x;
        if (t < 64) {
            s[t] = t;
            asm volatile("bar.sync 1, 64;" ::: "memory");
            out[t] = s[63 - t];
        } else out[t] = -t;
    }""")
    out = ints(128)
    with cudaops.sanitize():
        harness.run(kernel, 1, 128, out)
    np.testing.assert_array_equal(out, [*range(63, -1, -1), *range(-64, -128, -1)])


# -- waiting loops ------------------------------------------------------------------------------------------------------
LOCK = """
__global__ void k(int *lock, int *count, int times) {
    for (int i = 0; i < times; i++) {
        while (atomicCAS(lock, 0, 1) != 0) { }
        *(volatile int *)count = *(volatile int *)count + 1;
        __threadfence();
        atomicExch(lock, 0);
    }
}"""
LOCK_INSIDE = """
__global__ void k(int *lock, int *count, int times) {
    for (int i = 0; i < times; i++) {
        bool done = false;
        while (!done) {
            if (atomicCAS(lock, 0, 1) == 0) {
                *(volatile int *)count = *(volatile int *)count + 1;
                __threadfence();
                atomicExch(lock, 0);
                done = true;
            }
        }
    }
}"""


@pytest.mark.parametrize("text", [LOCK, LOCK_INSIDE], ids=["round a loop", "inside the loop"])
@pytest.mark.parametrize("block", [1, 32, 64, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_lock_between_lanes_warps_and_blocks(text: str, block: int, threads: int) -> None:
    lock, count = np.zeros(1, np.int32), np.zeros(1, np.int32)
    harness.run(harness.cuda(text), 3, block, lock, count, 5, threads=threads)
    assert count[0] == 3 * block * 5
    assert lock[0] == 0


def test_a_warp_waits_for_a_flag_of_another() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *out) {
        __shared__ volatile int flag, value;
        int t = threadIdx.x;
        if (t == 0) flag = 0;
        __syncthreads();
        if (t < 32) { while (flag == 0) { } out[t] = value; }           // the first warp, which runs first
        else if (t == 95) { value = 42; __threadfence_block(); flag = 1; }
    }""")
    out = ints(32)
    harness.run(kernel, 1, 96, out)
    np.testing.assert_array_equal(out, 42)


def test_lanes_hand_a_token_round_the_block() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *turn, int *out) {
        int t = threadIdx.x, last = blockDim.x - 1 - t;                 // the last thread goes first
        while (atomicAdd(turn, 0) != last) __nanosleep(100);
        out[last] = t;
        __threadfence();
        atomicAdd(turn, 1);
    }""")
    turn, out = np.zeros(1, np.int32), ints(70)
    harness.run(kernel, 1, 70, turn, out)
    np.testing.assert_array_equal(out, np.arange(69, -1, -1))


def test_blocks_chained_by_flags() -> None:
    """Each block waits for the sum that the block before it publishes."""
    kernel = harness.cuda("""
    __global__ void k(const int *in, volatile int *ready, volatile int *sums, int *out) {
        __shared__ int before;
        int b = blockIdx.x;
        if (threadIdx.x == 0) {
            before = 0;
            if (b > 0) { while (ready[b - 1] == 0) { } before = sums[b - 1]; }
            sums[b] = before + in[b];
            __threadfence();
            ready[b] = 1;
        }
        __syncthreads();
        out[b * blockDim.x + threadIdx.x] = before;
    }""")
    given = np.random.default_rng().integers(0, 100, 50).astype(np.int32)
    for threads in (1, 2):
        ready, sums, out = np.zeros(50, np.int32), np.zeros(50, np.int32), ints(50 * 64)
        harness.run(kernel, 50, 64, given, ready, sums, out, threads=threads)
        np.testing.assert_array_equal(out.reshape(50, 64), np.repeat((np.cumsum(given) - given)[:, None], 64, 1))


LOCKED_SUM = """
__global__ void k(int *out) {
    __shared__ int lock, sum;
    if (threadIdx.x == 0) { lock = 0; sum = 0; }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        while (atomicCAS(&lock, 0, 1) != 0) { }
        FENCE
        sum += threadIdx.x;
        FENCE
        atomicExch(&lock, 0);
    }
    __syncthreads();
    out[threadIdx.x] = sum;
}"""


def test_what_a_lock_guards_is_no_race() -> None:
    out = ints(128)
    with cudaops.sanitize():
        harness.run(harness.cuda(LOCKED_SUM.replace("FENCE", "__threadfence_block();")), 1, 128, out)
    np.testing.assert_array_equal(out, 32 + 64 + 96)


def test_a_lock_without_a_fence_guards_nothing() -> None:
    with cudaops.sanitize(), pytest.raises(cudaops.SanitizerError, match="in a race with"):
        harness.run(harness.cuda(LOCKED_SUM.replace("FENCE", "")), 1, 128, ints(128))


def test_blocks_chained_by_flags_are_no_race() -> None:
    with cudaops.sanitize():
        test_blocks_chained_by_flags()


def test_a_queue_that_warps_draw_from() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *next, int *seen, int n) {
        while (true) {
            int i = atomicAdd(next, 1);
            if (i >= n) break;
            seen[i] += 1;
        }
    }""")
    following, seen = np.zeros(1, np.int32), np.zeros(5000, np.int32)
    harness.run(kernel, 4, 96, following, seen, 5000, threads=2)
    np.testing.assert_array_equal(seen, 1)


# -- collectives of a warp, of which some lanes wait elsewhere ----------------------------------------------------------
MEET = {
    "syncwarp": "__syncwarp(); out[t] = data[t];",
    "shfl": "v = __shfl_sync(~0u, v, 0); out[t] = v + t;",
    "vote": "out[t] = __any_sync(~0u, v == 7) * 7 + t;",
    "match": "out[t] = __popc(__match_any_sync(~0u, v * 0 + 1)) - 32 + data[t];",
    "tiles of 8": "unsigned m = 0xffu << (t & 24); __syncwarp(m); if (t >= 8) __nanosleep(9); __syncwarp(); out[t] = data[t];",
}


@pytest.mark.parametrize("text", MEET.values(), ids=MEET)
@pytest.mark.parametrize("sanitizer", [False, True], ids=["", "sanitizer"])
def test_a_collective_waits_for_the_lane_that_polls(text: str, sanitizer: bool) -> None:
    kernel = harness.cuda(
        """
    __global__ void k(volatile int *flag, volatile int *data, int *out) {
        int t = threadIdx.x % 32, v = 0;
        if (threadIdx.x < 32) {
            if (t == 0) { while ((v = *flag) == 0) { } }
            MEET
        } else {
            data[t] = t + 7;
            __threadfence();
            __syncwarp();
            if (t == 0) *flag = 7;
        }
    }""".replace("MEET", text)
    )
    flag, data, out = np.zeros(1, np.int32), ints(32), ints(32)
    with contextlib.ExitStack() as stack:
        if sanitizer:
            stack.enter_context(cudaops.sanitize())
        harness.run(kernel, 1, 64, flag, data, out)
    np.testing.assert_array_equal(out, np.arange(32) + 7)


@pytest.mark.parametrize("sanitizer", [False, True], ids=["", "sanitizer"])
def test_lanes_meet_at_different_places(sanitizer: bool) -> None:
    """__syncwarp is one barrier, wherever the lanes that its mask names come to it."""
    kernel = harness.cuda("""
    __global__ void k(int *out) {
        __shared__ int s[96];
        int t = threadIdx.x, lane = t % 32;
        if (lane < 16) { s[t] = 1 + t; __syncwarp(); out[t] = s[t + 16]; }
        else { s[t] = 100 + t; __syncwarp(); out[t] = 2 * s[t - 16]; }
        __syncwarp();
        unsigned mask = lane % 2 ? 0xaaaaaaaa : 0x55555555;             // pairs of groups that share two places
        for (int i = 0; i < 3; i++)
            if (lane < 8) { s[t] = out[t]; __syncwarp(mask); out[t] += s[t ^ 8]; __syncwarp(mask); }
            else { s[t] = out[t]; __syncwarp(mask); out[t] += s[t ^ (lane < 16 ? 8 : 0)]; __syncwarp(mask); }
    }""")
    out = ints(96)
    with contextlib.ExitStack() as stack:
        if sanitizer:
            stack.enter_context(cudaops.sanitize())
        harness.run(kernel, 1, 96, out)
    t = np.arange(96)
    wanted = np.where(t % 32 < 16, 100 + t + 16, 2 * (1 + t - 16))
    for _ in range(3):
        wanted = wanted + wanted[np.where(t % 32 < 16, t ^ 8, t)]
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("sanitizer", [False, True], ids=["", "sanitizer"])
def test_a_collective_does_not_wait_for_lanes_that_end(sanitizer: bool) -> None:
    kernel = harness.cuda("""
    __global__ void k(int *lock, volatile int *count, int *out) {
        int t = threadIdx.x;
        while (atomicCAS(lock, 0, 1) != 0) { }
        __threadfence();
        int place = count[0];
        count[0] = place + 1;
        __threadfence();
        atomicExch(lock, 0);
        if (place >= 20) { out[t] = -1; return; }
        __syncwarp();
        out[t] = __popc(__ballot_sync(~0u, true));
    }""")
    out = ints(32)
    with contextlib.ExitStack() as stack:
        if sanitizer:
            stack.enter_context(cudaops.sanitize())
        harness.run(kernel, 1, 32, np.zeros(1, np.int32), np.zeros(1, np.int32), out)
    np.testing.assert_array_equal(np.sort(out), [-1] * 12 + [20] * 20)


def test_a_collective_that_lanes_never_come_to_is_given_up() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *lock, int *out) {
        int t = threadIdx.x;
        while (atomicCAS(lock, 0, 1) != 0) { }
        __threadfence();
        atomicExch(lock, 0);
        if (t < 20)
            out[t] = __ballot_sync(~0u, true);
        else
            out[t] = __popc(__ballot_sync(~0u, true));
    }""")
    out = ints(32)
    harness.run(kernel, 1, 32, np.zeros(1, np.int32), out)
    np.testing.assert_array_equal(out, [*[(1 << 20) - 1] * 20, *[12] * 12])
    with cudaops.sanitize(), pytest.raises(cudaops.SanitizerError, match=r"k\.cu:10: .* as a member of vote"):
        harness.run(kernel, 1, 32, np.zeros(1, np.int32), out)


@pytest.mark.parametrize("sanitizer", [False, True], ids=["", "sanitizer"])
@pytest.mark.parametrize(("n", "wanted"), [(0, 22), (1, 11), (2, 33)])
def test_behind_a_lock_lanes_go_to_one_of_several_barriers(n: int, wanted: int, sanitizer: bool) -> None:
    kernel = harness.cuda("""
    __global__ void k(int *lock, volatile int *count, int *out, int n) {
        int t = threadIdx.x;
        while (atomicCAS(lock, 0, 1) != 0) { }
        __threadfence();
        count[0] = count[0] + 1;
        __threadfence();
        atomicExch(lock, 0);
        if (n == 1) { out[t] = 1; __syncthreads(); out[t] += 10; }
        else if (n == 2) { __syncthreads(); out[t] = 30; __syncthreads(); out[t] += 3; }
        else { out[t] = 2; __syncthreads(); out[t] += 20; }
    }""")
    count, out = np.zeros(1, np.int32), ints(64)
    with contextlib.ExitStack() as stack:
        if sanitizer:
            stack.enter_context(cudaops.sanitize())
        harness.run(kernel, 1, 64, np.zeros(1, np.int32), count, out, n)
    np.testing.assert_array_equal(out, wanted)
    assert count[0] == 64


# -- what counts as waiting ---------------------------------------------------------------------------------------------
def test_a_flag_read_past_the_l1_cache() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *flag, int *out) {
        if (threadIdx.x < 32) {
            int v;
            do asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory"); while (v == 0);
            out[threadIdx.x] = v;
        } else if (threadIdx.x == 32) atomicExch(flag, 9);
    }""")
    out = ints(32)
    harness.run(kernel, 1, 64, np.zeros(1, np.int32), out)
    np.testing.assert_array_equal(out, 9)


def test_numbers_drawn_without_a_store_are_no_deadlock() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *next, const int *x, int *out, int n) {
        int sum = 0, i;
        while ((i = atomicAdd(next, 1)) < n) sum += x[i & 7];
        out[0] = sum;
    }""")
    out, n = ints(1), 3_000_000
    harness.run(kernel, 1, 1, np.zeros(1, np.int32), np.ones(8, np.int32), out, n)
    assert out[0] == n


def test_blocks_that_meet_in_a_loop() -> None:
    """As many blocks as workers, in step; short as it is, each launch takes two threads."""
    kernel = harness.cuda("""
    __global__ void k(unsigned *come, int *a, int *b, int n) {
        int t = blockIdx.x * blockDim.x + threadIdx.x;
        for (int i = 0; i < n; i++) {
            a[t] = t + i;
            for (int side = 0; side < 2; side++) {
                __syncthreads();
                if (threadIdx.x == 0) {
                    __threadfence();
                    unsigned goal = (atomicAdd(come, 1) / gridDim.x + 1) * gridDim.x;
                    while (*(volatile unsigned *)come < goal) { }
                    __threadfence();
                }
                __syncthreads();
                if (side == 0) b[t] = a[(t + 64) % 128];
            }
        }
    }""")
    for _ in range(20):
        a, b = ints(128), ints(128)
        harness.run(kernel, 2, 64, np.zeros(1, np.uint32), a, b, 30, threads=2)
        np.testing.assert_array_equal(b, (np.arange(128) + 64) % 128 + 29)


# -- deadlocks ----------------------------------------------------------------------------------------------------------
DEADLOCKS = {
    "a barrier that only some warps come to": ("""
    __global__ void k(int *x) {
        if (threadIdx.x < 32)
            asm volatile("bar.sync 1, 64;" ::: "memory");
        x[0] = 1;
    }""", r"k\.cu:4: .*warp 0 stopped at bar\.sync at k\.cu:4; warp 1 ended"),
    "two barriers in another order": ("""
    __global__ void k(int *x) {
        if (threadIdx.x < 32) {
            asm volatile("bar.sync 1;" ::: "memory");
            asm volatile("bar.sync 2;" ::: "memory");
        } else {
            asm volatile("bar.sync 2;" ::: "memory");
            asm volatile("bar.sync 1;" ::: "memory");
        }
    }""", r"k\.cu:4: .*warp 0 stopped at bar\.sync at k\.cu:4; warp 1 stopped at bar\.sync at k\.cu:7"),
    "a lock that is never given back": ("""
    __global__ void k(int *x) {
        while (atomicCAS(x, 0, 1) != 0)
            ;
    }""", r"k\.cu:3: .*warps 0-1 looked in vain, again and again, in the loop of atom"),
    "a flag that nobody sets": ("""
    __global__ void k(volatile int *x) {
        if (threadIdx.x == 40)
            while (x[0] == 0)
                ;
        __syncthreads();
    }""", r"warp 0 stopped at bar\.sync at k\.cu:6; warp 1 .*in the loop of ld\.volatile"),
    "a block that waits for a later one": ("""
    __global__ void k(volatile int *x) {
        while (blockIdx.x == 0 && x[0] == 0)
            ;
        x[0] = 1;
    }""", "in the loop of ld.*: let none wait for a later one"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), DEADLOCKS.values(), ids=DEADLOCKS)
@pytest.mark.parametrize("sanitizer", [False, True], ids=["", "sanitizer"])
def test_deadlock(text: str, message: str, sanitizer: bool) -> None:
    kernel = harness.cuda(text)
    if not sanitizer:
        with pytest.raises(EmulatorError, match=f"(?s)deadlock, no warp can go on: .*{message}|{message}"):
            kernel(2 if "later" in message or "blockIdx" in text else 1, 64, np.zeros(4, np.int32))
        return
    with cudaops.sanitize(), pytest.raises(cudaops.SanitizerError, match="deadlock") as caught:
        kernel(2 if "blockIdx" in text else 1, 64, np.zeros(4, np.int32))
    assert [f.check for f in caught.value.findings if "deadlock" in f.message] == ["synccheck"]


def test_two_workers_that_wait_for_blocks_not_begun() -> None:
    kernel = harness.cuda("""
    __global__ void k(int *x) {
        if (threadIdx.x == 0) {
            atomicAdd(x, 1);
            while (atomicAdd(x, 0) < gridDim.x) { }       // every block at once: more than there are workers
        }
    }""")
    with pytest.raises(EmulatorError, match="deadlock"):
        kernel(8, 32, np.zeros(1, np.int32), threads=2)
