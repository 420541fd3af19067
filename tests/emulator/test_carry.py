"""Carry chains: add.cc, addc, sub.cc, subc, mad.cc and madc are the digits of wide integers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import harness

CORNERS = (0, 1, -1, 2, -2)


def digits(bits: int, count: int, size: int) -> np.ndarray:
    """[size, count] words, many of them at the edge where carries go on."""
    rng = np.random.default_rng()
    dtype = np.uint32 if bits == 32 else np.uint64
    x = rng.integers(0, (1 << bits) - 1, (size, count), dtype=dtype, endpoint=True)
    edge = np.array([c & ((1 << bits) - 1) for c in CORNERS] + [1 << (bits - 1)], dtype)
    return np.where(rng.random(x.shape) < 0.6, rng.choice(edge, x.shape), x)


def number(row: np.ndarray, bits: int) -> int:
    return sum(int(word) << (bits * n) for n, word in enumerate(row))


def chain(body: str, inputs: dict[str, int], outputs: int, bits: int) -> harness.Kernel:
    """`body` on %a0 %a1 ... of each input; results in %d0 %d1 ..."""
    text, names = [], []
    for name, count in inputs.items():
        text.append(f"ld.param.u64 %p, [{name}]; mul.wide.u32 %o, %t, {count * bits // 8}; add.u64 %p, %p, %o;")
        text += [f"ld.global.b{bits} %{name}{n}, [%p+{n * bits // 8}];" for n in range(count)]
        names += [f"%{name}{n}" for n in range(count)]
    store = [f"st.global.b{bits} [%p+{n * bits // 8}], %d{n};" for n in range(outputs)]
    return harness.ptx(
        f"""
        .reg .b{bits} {", ".join(names + [f"%d{n}" for n in range(outputs)])};
        .reg .b32 %t;
        .reg .b64 %p, %o;
        mov.u32 %t, %tid.x;
        {chr(10).join(text)}
        {body}
        ld.param.u64 %p, [out]; mul.wide.u32 %o, %t, {outputs * bits // 8}; add.u64 %p, %p, %o;
        {chr(10).join(store)}
        ret;""",
        params=", ".join(f".param .u64 {name}" for name in ("out", *inputs)),
    )


THREADS = 500


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("op", ["add", "sub"])
def test_sums_and_differences_of_four_words(op: str, sign: str, bits: int) -> None:
    t = f"{sign}{bits}"
    body = f"""
        {op}.cc.{t} %d0, %a0, %b0;
        {op}c.cc.{t} %d1, %a1, %b1;
        {op}c.cc.{t} %d2, %a2, %b2;
        {op}c.cc.{t} %d3, %a3, %b3;
        {op}c.{t} %d4, 0, 0;"""
    a, b = digits(bits, 4, THREADS), digits(bits, 4, THREADS)
    out = harness.poisoned((THREADS, 5), a.dtype)
    harness.run(chain(body, {"a": 4, "b": 4}, 5, bits), 1, THREADS, out, a, b)
    for x, y, z in zip(a, b, out, strict=True):
        u, v = number(x, bits), number(y, bits)
        assert number(z, bits) == (u + v if op == "add" else u - v) % (1 << (5 * bits))


@pytest.mark.parametrize("bits", [32, 64])
def test_product_and_sum_by_mad(bits: int) -> None:
    """(a1 a0) * b + (c2 c1 c0): low words in one chain, high words in the next."""
    body = f"""
        mad.lo.cc.u{bits} %d0, %a0, %b0, %c0;
        madc.lo.cc.u{bits} %d1, %a1, %b0, %c1;
        addc.u{bits} %d2, %c2, 0;
        mad.hi.cc.u{bits} %d1, %a0, %b0, %d1;
        madc.hi.u{bits} %d2, %a1, %b0, %d2;"""
    a, b, c = digits(bits, 2, THREADS), digits(bits, 1, THREADS), digits(bits, 3, THREADS)
    out = harness.poisoned((THREADS, 3), a.dtype)
    harness.run(chain(body, {"a": 2, "b": 1, "c": 3}, 3, bits), 1, THREADS, out, a, b, c)
    for x, y, w, z in zip(a, b, c, out, strict=True):
        expected = number(x, bits) * number(y, bits) + number(w, bits)
        assert number(z, bits) == expected % (1 << (3 * bits))


@pytest.mark.parametrize("bits", [32, 64])
def test_high_word_with_carry_of_signed_operands(bits: int) -> None:
    body = f"add.cc.u{bits} %d0, %a0, %b0; madc.hi.s{bits} %d1, %a1, %b1, %a0;"
    a, b = digits(bits, 2, THREADS), digits(bits, 2, THREADS)
    out = harness.poisoned((THREADS, 2), a.dtype)
    harness.run(chain(body, {"a": 2, "b": 2}, 2, bits), 1, THREADS, out, a, b)
    signed = a.view(f"i{bits // 8}"), b.view(f"i{bits // 8}")
    for t in range(THREADS):
        carry = (int(a[t, 0]) + int(b[t, 0])) >> bits
        high = int(signed[0][t, 1]) * int(signed[1][t, 1]) >> bits
        assert int(out[t, 1]) == (high + int(a[t, 0]) + carry) % (1 << bits)


def test_uniform_chain_and_carry_kept_over_other_instructions() -> None:
    kernel = harness.ptx(
        """
        .reg .b32 %x, %y, %z, %t;
        .reg .b64 %p;
        ld.param.u64 %p, [out];
        ld.global.b32 %x, [%p];
        add.cc.u32 %x, %x, 1;
        add.u32 %z, %x, 5;
        mul.lo.u32 %z, %z, 3;
        ld.global.b32 %y, [%p+4];
        addc.u32 %y, %y, 10;
        st.global.b32 [%p], %x;
        st.global.b32 [%p+4], %y;
        st.global.b32 [%p+8], %z;
        ret;"""
    )
    for first, carry in ((0xFFFFFFFF, 1), (5, 0)):
        out = np.array([first, 7, 0], np.uint32)
        harness.run(kernel, 1, 1, out)
        assert out.tolist() == [(first + 1) & 0xFFFFFFFF, 17 + carry, (((first + 1) & 0xFFFFFFFF) + 5) * 3 & 0xFFFFFFFF]


def test_cuda_c_with_128_bit_integers() -> None:
    source = """__global__ void k(u64* o, const u64* a, const u64* b) {
        int t = threadIdx.x;
        unsigned __int128 x = ((unsigned __int128)a[2 * t + 1] << 64) | a[2 * t];
        unsigned __int128 y = ((unsigned __int128)b[2 * t + 1] << 64) | b[2 * t];
        unsigned __int128 z = x * y + (x - y);
        o[2 * t] = (u64)z;
        o[2 * t + 1] = (u64)(z >> 64);
    }"""
    a, b = digits(64, 2, 200), digits(64, 2, 200)
    out = harness.poisoned((200, 2), np.uint64)
    harness.run(harness.cuda(source, options=("--device-int128",)), 1, 200, out, a, b)
    for x, y, z in zip(a, b, out, strict=True):
        u, v = number(x, 64), number(y, 64)
        assert number(z, 64) == (u * v + u - v) % (1 << 128)
