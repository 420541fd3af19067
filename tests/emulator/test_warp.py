"""shfl in every mode, by its pseudo-code in the PTX ISA; and instructions that only order what others do."""

from __future__ import annotations

import numpy as np
import pytest

import cudaops
from tests.emulator import harness

MODES = ("up", "down", "bfly", "idx")
# clamp | segment mask << 8, as __shfl_*_sync gives them for widths 32, 16, 8, 2, and odd ones
DOWN_AND_IDX = [(32 - width) << 8 | 31 for width in (32, 16, 8, 2)] + [0x0F, 0x1C07, 0x1803, 0x00, 0x151F]
UP = [(32 - width) << 8 for width in (32, 16, 8, 2)] + [0x05, 0x1C02]


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """(source lane, predicate)"""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    bound = (lane & segment) | (clamp & ~segment)
    low = lane & segment
    if mode == "up":
        j, good = lane - b, lane - b >= bound
    elif mode == "down":
        j, good = lane + b, lane + b <= bound
    elif mode == "bfly":
        j, good = lane ^ b, lane ^ b <= bound
    else:
        j = low | (b & ~segment & 31)
        good = j <= bound
    return (j if good else lane), good


def kernel(mode: str, operands: list[tuple[str, str]]) -> harness.Kernel:
    """One shuffle for each (b, c), given as numbers or as registers %b %c that are loaded by every lane."""
    lines = [
        ".reg .pred %p; .reg .b32 %t, %x, %y, %q, %b, %c; .reg .b64 %out, %in, %o, %at;",
        "ld.param.u64 %out, [out]; ld.param.u64 %in, [in]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 12; add.s64 %at, %in, %o;",
        "ld.global.b32 %x, [%at]; ld.global.b32 %b, [%at+4]; ld.global.b32 %c, [%at+8]; mul.wide.u32 %o, %t, 8; add.s64 %out, %out, %o;",
    ]
    for b, c in operands:
        lines.append(f"shfl.sync.{mode}.b32 %y|%p, %x, {b}, {c}, -1; selp.u32 %q, 1, 0, %p;")
        lines.append("st.global.v2.b32 [%out], {%y, %q}; add.s64 %out, %out, 512;")
    return harness.ptx("\n".join([*lines, "ret;"]), ".param .u64 out, .param .u64 in")


@pytest.mark.parametrize("mode", MODES)
def test_shfl_by_constants(mode: str) -> None:
    pairs = [(b, c) for b in (0, 1, 2, 5, 8, 16, 31, 33) for c in (UP if mode == "up" else DOWN_AND_IDX)]
    data = np.random.randint(0, 2**31, (64, 3)).astype(np.uint32)
    out = np.zeros((len(pairs), 64, 2), np.uint32)
    harness.run(kernel(mode, [(str(b), str(c)) for b, c in pairs]), 1, 64, out, data)
    for n, (b, c) in enumerate(pairs):
        _check(mode, out[n], data[:, 0], [b] * 64, [c] * 64)


@pytest.mark.parametrize("mode", MODES)
def test_shfl_by_each_lanes_own_operands(mode: str) -> None:
    masks = UP if mode == "up" else DOWN_AND_IDX
    data = np.random.randint(0, 2**31, (64, 3)).astype(np.uint32)
    out = np.zeros((3, 64, 2), np.uint32)
    shuffle = kernel(mode, [("%b", "%c"), ("%b", str(masks[1])), ("3", "%c")])
    for _ in range(4):
        data[:, 1] = np.random.randint(0, 70, 64)
        data[:, 2] = np.random.choice(masks, 64)
        harness.run(shuffle, 1, 64, out, data)
        b, c = data[:, 1].tolist(), data[:, 2].tolist()
        _check(mode, out[0], data[:, 0], b, c)
        _check(mode, out[1], data[:, 0], b, [masks[1]] * 64)
        _check(mode, out[2], data[:, 0], [3] * 64, c)


def _check(mode: str, out: np.ndarray, data: np.ndarray, b: list[int], c: list[int]) -> None:
    for t in range(64):
        lane, good = shuffled(mode, t % 32, b[t], c[t])
        assert out[t].tolist() == [data[t // 32 * 32 + lane], good], f"{mode}, thread {t}, b {b[t]}, c {c[t]:#x}"


def test_shfl_of_floats_and_without_a_predicate() -> None:
    code = harness.cuda(
        """__global__ void k(float* out, const float* a, double* wide) {
        int i = threadIdx.x; float x = a[i];
        for (int o = 16; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
        out[i] = x; wide[i] = __shfl_down_sync(~0u, (double)a[i] * 3, 1, 8); }"""
    )
    a = np.random.randint(-100, 100, 96).astype(np.float32)
    out, wide = np.zeros(96, np.float32), np.zeros(96)
    harness.run(code, 1, 96, out, a, wide)
    assert np.array_equal(out, np.repeat(a.reshape(3, 32).sum(1), 32))
    i = np.arange(96)
    assert np.array_equal(wide, 3.0 * a[np.where(i % 8 == 7, i, i + 1) % 96])


def test_shfl_in_divergent_code_among_the_lanes_there() -> None:
    code = harness.cuda(
        """__global__ void k(int* out, const int* a) {
        int i = threadIdx.x, x = a[i];
        if (i & 1) { x += __shfl_xor_sync(0xAAAAAAAA, x, 2); } else { for (int j = 0; j < 3; j++) x -= j; }
        out[i] = x; }"""
    )
    a = np.random.randint(0, 1000, 32).astype(np.int32)
    out = np.zeros(32, np.int32)
    harness.run(code, 1, 32, out, a)
    i = np.arange(32)
    assert np.array_equal(out, np.where(i & 1, a + a[i ^ 2], a - 3))


ORDERING = [
    "bar.warp.sync -1", "membar.cta", "membar.gl", "membar.sys", "fence.acq_rel.cta", "fence.acq_rel.gpu", "fence.sc.sys",
    "fence.acq_rel.cluster", "fence.sc.cluster", "fence.acquire.gpu", "fence.release.gpu", "nanosleep.u32 100",
]  # fmt: skip


def test_fences_and_sleep_change_nothing() -> None:
    lines = [
        ".reg .pred %p; .reg .b32 %t, %x; .reg .b64 %out, %in, %o;",
        "ld.param.u64 %out, [out]; ld.param.u64 %in, [in]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.s64 %out, %out, %o;",
        "add.s64 %in, %in, %o; setp.lt.u32 %p, %t, 7;",
    ]
    for n, text in enumerate(ORDERING):
        lines.append(f"ld.global.b32 %x, [%in]; {text}; @%p {text}; st.global.b32 [%out+{256 * n}], %x;")
    data = np.random.randint(0, 1000, 64).astype(np.int32)
    out = np.zeros((len(ORDERING), 64), np.int32)
    harness.run(harness.ptx("\n".join([*lines, "ret;"]), ".param .u64 out, .param .u64 in"), 1, 64, out, data)
    assert (out == data).all()


OPCODES = [*(f"shfl.sync.{mode}.b32" for mode in MODES), *(text.split()[0] for text in ORDERING)]


def test_groups_of_lanes_vote_with_masks_of_their_own() -> None:
    """As tiled and labeled partitions do."""
    kernel = harness.cuda("""
    __global__ void k(const int *x, int *out) {
        int t = threadIdx.x;
        unsigned m = __match_any_sync(~0u, x[t] / 8);
        out[8 * t] = __ballot_sync(m, x[t] & 1);
        out[8 * t + 1] = __any_sync(m, x[t] % 8 == 5);
        out[8 * t + 2] = __all_sync(m, x[t] % 8 < 6);
        out[8 * t + 3] = __reduce_add_sync(m, x[t]);
        out[8 * t + 4] = __reduce_min_sync(m, -x[t]);
        out[8 * t + 5] = __reduce_max_sync(m, unsigned(x[t]));
        out[8 * t + 6] = __reduce_or_sync(m, 1u << t % 32) == m;
        out[8 * t + 7] = __reduce_xor_sync(m, x[t]);
    }""")
    x = np.random.default_rng(3).integers(0, 40, 70).astype(np.int32)
    out = harness.poisoned((70, 8), np.int32)
    with cudaops.sanitize():
        harness.run(kernel, 1, 70, x, out)
    for t in range(70):
        lanes = [u for u in range(t // 32 * 32, min(t // 32 * 32 + 32, 70)) if x[u] // 8 == x[t] // 8]
        y = x[lanes]
        votes = np.array(sum((int(x[u]) & 1) << u % 32 for u in lanes), np.uint32).view(np.int32)
        wanted = [votes, (y % 8 == 5).any(), (y % 8 < 6).all(), y.sum(), -y.max(), y.max(), 1, np.bitwise_xor.reduce(y)]
        np.testing.assert_array_equal(out[t], wanted, str(t))
