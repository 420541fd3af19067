"""atom and red: every operation and type, many lanes at one place, blocks on two threads, compare-and-swap loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulator import harness

U32, S32, U64, S64, F32, F64 = np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64
KINDS = {"b32": U32, "u32": U32, "s32": S32, "b64": U64, "u64": U64, "s64": S64, "f32": F32, "f64": F64}
CASES = [
    *[(op, kind) for op in ("and", "or", "xor", "exch") for kind in ("b32", "b64")],
    *[("add", kind) for kind in ("u32", "s32", "u64", "f32", "f64")],
    *[(op, kind) for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64")],
    ("inc", "u32"), ("dec", "u32"),
]  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One operation on Python integers (floats) as the PTX ISA says."""

    op: str
    kind: str

    def __call__(self, old: int, b: int) -> int:
        bits = 8 * np.dtype(KINDS[self.kind]).itemsize
        match self.op:
            case "and":
                return old & b
            case "or":
                return old | b
            case "xor":
                return old ^ b
            case "exch":
                return b
            case "min":
                return min(old, b)
            case "max":
                return max(old, b)
            case "inc":
                return 0 if old >= b else old + 1
            case "dec":
                return b if old == 0 or old > b else old - 1
        if self.kind[0] == "f":
            return old + b
        total = (old + b) & ((1 << bits) - 1)
        return total - (1 << bits) if self.kind[0] == "s" and total >> (bits - 1) else total


def values(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    dtype = KINDS[kind]
    if kind[0] == "f":  # sums are exact, so that the order does not matter
        return rng.integers(-1000, 1000, count).astype(dtype)
    limits = np.iinfo(dtype)
    corner = np.array([limits.min, limits.max, 0, 1, limits.max - 1], dtype)
    mixed = rng.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    return np.where(rng.random(count) < 0.3, rng.choice(corner, count), mixed)


def kernel(op: str, kind: str, space: str, base: str = "atom", hint: str = "") -> harness.Kernel:
    """Each thread applies its value to the word `place[t]`; with `atom`, old values go to `old`."""
    bits = kind[1:]
    size = int(bits) // 8
    register = f"f{bits}" if kind[0] == "f" else f"b{bits}"
    count = 4
    shared = space == "shared"
    target = "%w"
    operation = f"{base}{hint}.{space}.{op}.{kind}"
    act = f"{operation} %old, [{target}], %v;" if base == "atom" else f"{operation} [{target}], %v;"
    copy_in = copy_out = ""
    if shared:
        copy_in = f"""
        setp.ge.u32 %p, %t, {count};
        @%p bra filled;
        ld.global.b{bits} %x, [%words_t];
        st.shared.b{bits} [%s_t], %x;
        filled: bar.sync 0;"""
        copy_out = f"""
        bar.sync 0;
        @%p bra done;
        ld.shared.b{bits} %x, [%s_t];
        st.global.b{bits} [%words_t], %x;
        done:"""
    base_register = "%s" if shared else "%words"
    zero = {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(register, "0")
    return harness.ptx(
        f"""
        .shared .align 8 .b8 sh[{count * size}];
        .reg .pred %p;
        .reg .b32 %t, %k;
        .reg .b{bits} %x;
        .reg .{register} %v, %old;
        .reg .b64 %words, %values, %olds, %places, %o, %w, %s, %s_t, %words_t;
        ld.param.u64 %words, [words];
        ld.param.u64 %values, [values];
        ld.param.u64 %olds, [olds];
        ld.param.u64 %places, [places];
        mov.u32 %t, %tid.x;
        mov.u64 %s, sh;
        mul.wide.u32 %o, %t, {size};
        add.u64 %s_t, %s, %o;
        add.u64 %words_t, %words, %o;
        add.u64 %values, %values, %o;
        add.u64 %olds, %olds, %o;
        mul.wide.u32 %o, %t, 4;
        add.u64 %places, %places, %o;
        {copy_in}
        ld.global.u32 %k, [%places];
        ld.global.{register} %v, [%values];
        mul.wide.u32 %o, %k, {size};
        add.u64 %w, {base_register}, %o;
        mov.{register} %old, {zero};
        {act}
        st.global.{register} [%olds], %old;
        {copy_out}
        ret;""",
        params=".param .u64 words, .param .u64 values, .param .u64 olds, .param .u64 places",
    )


THREADS = 45  # the second warp has lanes that do not exist


def check(op: str, kind: str, space: str, base: str, hint: str = "") -> None:
    rng = np.random.default_rng()
    words, given = values(rng, kind, 4), values(rng, kind, THREADS)
    if op in ("inc", "dec"):
        words, given = rng.integers(0, 9, 4).astype(U32), rng.integers(0, 9, THREADS).astype(U32)
    places = rng.integers(0, 4, THREADS).astype(U32)
    olds = harness.poisoned(THREADS, KINDS[kind])
    after = words.copy()
    harness.run(kernel(op, kind, space, base, hint), 1, THREADS, after, given, olds, places)
    model = Model(op, kind)
    state = [w.item() for w in words]
    expected = np.zeros(THREADS, KINDS[kind])
    for t in range(THREADS):  # lanes of a warp in order, warps in order
        expected[t] = state[places[t]]
        state[places[t]] = model(state[places[t]], given[t].item())
    np.testing.assert_array_equal(after, np.array(state, KINDS[kind]))
    if base == "atom":
        np.testing.assert_array_equal(olds, expected)


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("op", "kind"), CASES)
def test_atom(op: str, kind: str, space: str) -> None:
    check(op, kind, space, "atom")


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("op", "kind"), [c for c in CASES if c[0] != "exch"])
def test_red(op: str, kind: str, space: str) -> None:
    check(op, kind, space, "red")


@pytest.mark.parametrize("base", ["atom", "red"])
@pytest.mark.parametrize("hint", [".relaxed.gpu", ".acquire.cta", ".release.sys", ".acq_rel.cluster"])
def test_orders_and_scopes(hint: str, base: str) -> None:
    check("add", "u32", "global", base, hint)
    check("xor", "b64", "shared", base, hint)


def test_cache_policy_and_the_long_name_of_shared_memory() -> None:
    """The policy is one operand more, which is no value."""
    kernel = harness.ptx(
        """
        .shared .align 4 .b32 sh;
        .reg .b32 %x; .reg .b64 %p, %policy;
        ld.param.u64 %p, [out]; mov.b64 %policy, 77; st.shared::cta.b32 [sh], 1;
        atom.global.add.L2::cache_hint.u32 %x, [%p], 3, %policy; red.global.add.L2::cache_hint.u32 [%p+4], 5, %policy;
        atom.global.cas.L2::cache_hint.b32 %x, [%p+8], 9, 4, %policy;
        atom.shared::cta.add.u32 %x, [sh], 2; red.shared::cta.add.u32 [sh], 2; ld.shared.b32 %x, [sh];
        st.global.b32 [%p+12], %x; ret;"""
    )
    out = np.array([10, 20, 9, 0], U32)
    harness.run(kernel, 1, 1, out)
    assert out.tolist() == [13, 25, 4, 5]


def test_compare_and_swap_takes_one_lane() -> None:
    source = """__global__ void k(u32* a, u64* b, u32* olds, u64* wide) {
        u32 t = threadIdx.x;
        olds[t] = atomicCAS(a, 7u, 100 + t);
        wide[t] = atomicCAS(b + t % 2, 0x700000000ull, 0x100000000ull + t);
    }"""
    a, b = np.array([7], U32), np.array([0x700000000, 0x600000000], U64)
    olds, wide = harness.poisoned(64, U32), harness.poisoned(64, U64)
    harness.run(harness.cuda(source), 1, 64, a, b, olds, wide)
    assert a[0] == 100
    np.testing.assert_array_equal(olds, [7] + [100] * 63)
    assert b.tolist() == [0x100000000, 0x600000000]
    np.testing.assert_array_equal(wide[0::2], [0x700000000] + [0x100000000] * 31)
    np.testing.assert_array_equal(wide[1::2], [0x600000000] * 32)


def test_loop_of_compare_and_swap_makes_progress_in_every_lane() -> None:
    source = """__global__ void k(float* total, u64* product, const float* x) {
        int t = threadIdx.x + blockIdx.x * blockDim.x;
        u32 *at = (u32*)total, old = *at, seen;
        do {
            seen = old;
            old = atomicCAS(at, seen, __float_as_uint(__uint_as_float(seen) + x[t]));
        } while (old != seen);
        u64 o = *product, s;
        do { s = o; o = atomicCAS(product, s, s * 3); } while (o != s);
    }"""
    x = np.random.default_rng().integers(0, 100, 320).astype(F32)
    total, product = np.zeros(1, F32), np.ones(1, U64)
    harness.run(harness.cuda(source), 5, 64, total, product, x, threads=2)
    assert total[0] == x.sum()
    assert int(product[0]) == pow(3, 320, 1 << 64)


def test_lock_of_a_block() -> None:
    """One thread of each block takes a lock and gives it back."""
    source = """__global__ void k(int* lock, int* counter) {
        if (threadIdx.x == 0) {
            while (atomicCAS(lock, 0, 1) != 0) ;
            __threadfence();
            *(volatile int*)counter += 1;
            __threadfence();
            atomicExch(lock, 0);
        }
    }"""
    lock, counter = np.zeros(1, S32), np.zeros(1, S32)
    harness.run(harness.cuda(source), 300, 64, lock, counter, threads=2)
    assert (lock[0], counter[0]) == (0, 300)


def test_blocks_on_two_threads_lose_nothing() -> None:
    source = """__global__ void k(u32* count, float* sum, double* wide, u64* bits, int n) {
        for (int i = 0; i < n; i++) {
            atomicAdd(count + (threadIdx.x & 3), 1u);
            atomicAdd(sum, 1.f);
            atomicAdd(wide, 0.5);
        }
        atomicOr(bits + threadIdx.x / 64, 1ull << (threadIdx.x % 64));
    }"""
    compiled = harness.cuda(source)
    for _ in range(2):  # the second launch knows how long a block takes, and uses both threads
        count, total, wide, bits = np.zeros(4, U32), np.zeros(1, F32), np.zeros(1, F64), np.zeros(2, U64)
        harness.run(compiled, 64, 128, count, total, wide, bits, 20, threads=2)
        np.testing.assert_array_equal(count, 64 * 32 * 20)
        assert total[0] == wide[0] * 2 == 64 * 128 * 20
        np.testing.assert_array_equal(bits, U64(0xFFFFFFFFFFFFFFFF))


def test_add_f32_flushes_subnormals_on_global_memory_only() -> None:
    source = """__global__ void k(float* o, const float* x) {
        __shared__ float s[4];
        int t = threadIdx.x;
        s[t] = o[t];
        atomicAdd(o + t, x[t]);
        atomicAdd(s + t, x[t]);
        o[4 + t] = s[t];
    }"""
    tiny = np.float32(1e-40)
    o = np.array([tiny, -tiny, 1.5e-38, 1.0, 0, 0, 0, 0], F32)
    x = np.array([tiny, -0.0, -1.4e-38, 2 * tiny], F32)
    shared = o[:4] + x
    harness.run(harness.cuda(source), 1, 4, o, x)
    np.testing.assert_array_equal(o[4:].view(U32), shared.view(U32))
    np.testing.assert_array_equal(o[:4].view(U32), np.array([0.0, -0.0, 0.0, 1.0], F32).view(U32))


def test_some_lanes_only() -> None:
    source = """__global__ void k(int* o, const int* x, int* old) {
        int t = threadIdx.x;
        old[t] = -5;
        if (x[t] > 3) old[t] = atomicAdd(o, x[t]);
        else if (x[t] == 2) atomicSub(o + 1, 1);
    }"""
    x = np.random.default_rng().integers(0, 7, 50).astype(S32)
    o, old = np.zeros(2, S32), harness.poisoned(50, S32)
    harness.run(harness.cuda(source), 1, 50, o, x, old)
    assert o.tolist() == [x[x > 3].sum(), -(x == 2).sum()]
    expected, total = np.full(50, -5), 0
    for t in np.flatnonzero(x > 3):
        expected[t], total = total, total + x[t]
    np.testing.assert_array_equal(old, expected)


@pytest.mark.parametrize("base", ["atom", "red"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
def test_half_add(kind: str, base: str) -> None:
    """Sums of small integers are exact; so are those of subnormals."""
    bits = 32 if kind.endswith("x2") else 16
    one, two, top = (0x3C00, 0x4000, 0x7BFF) if kind.startswith("f16") else (0x3F80, 0x4000, 0x7F7F)
    compiled = harness.ptx(
        f"""
        .reg .b{bits} %v, %old;
        .reg .b64 %a;
        ld.param.u64 %a, [out];
        mov.b{bits} %v, {two | one << 16 if bits == 32 else two};
        {base}.global.add.noftz.{kind} {"%old, " if base == "atom" else ""}[%a], %v;
        mov.b{bits} %v, {3 | 0x8001 << 16 if bits == 32 else 3};
        {base}.global.add.noftz.{kind} {"%old, " if base == "atom" else ""}[%a+4], %v;
        ret;"""
    )
    text = compiled.ptx.replace(".target sm_80", ".target sm_90")
    o = np.array([one, one, 0, 0x8001, top], np.uint16)  # 1, 1; 0, -smallest; the guard of the second word
    harness.run(harness.whole_ptx(text), 1, 40, o)
    as_float = o.view(np.float16) if kind.startswith("f16") else (o.astype(U32) << 16).view(F32)
    assert as_float[0] == 81
    assert as_float[1] == (41 if bits == 32 else 1)
    assert o[2] == 40 * 3  # subnormals are multiples of the smallest one
    assert o[3] == (0x8000 + 41 if bits == 32 else 0x8001)
    assert o[4] == top


def test_half_add_rounds_once_and_knows_infinity() -> None:
    source = """#include <cuda_fp16.h>
    __global__ void k(__half* o, const __half* x) { atomicAdd(o + threadIdx.x, x[threadIdx.x]); }"""
    rng = np.random.default_rng()
    a, b = (rng.integers(0, 1 << 16, 256).astype(np.uint16).view(np.float16) for _ in range(2))
    o = a.copy()
    harness.run(harness.cuda(source), 1, 256, o, b)
    with np.errstate(all="ignore"):
        expected = (a.astype(F64) + b.astype(F64)).astype(np.float16)
    np.testing.assert_array_equal(np.isnan(o), np.isnan(expected))
    np.testing.assert_array_equal(o[~np.isnan(o)], expected[~np.isnan(o)])
    assert set(o[np.isnan(o)].view(np.uint16).tolist()) <= {0x7FFF}


def test_compare_and_swap_of_16_bits() -> None:
    source = """__global__ void k(unsigned short* o) {
        o[1 + threadIdx.x] = atomicCAS(o, (unsigned short)7, (unsigned short)9);
    }"""
    o = np.array([7, *[0] * 33], np.uint16)
    harness.run(harness.cuda(source), 1, 33, o)
    assert o.tolist() == [9, 7, *[9] * 32]
