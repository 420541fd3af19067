"""Whole small CUDA C programs of the kinds people write, against NumPy: integers exact, floats within their bounds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cudaops.emulator import sanitize
from tests.emulator import harness

EPS32 = 2.0**-24  # half an ulp, relative
EPS64 = 2.0**-53


@pytest.fixture(autouse=True, params=["plain", "sanitizer"])
def checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every program also runs under the sanitizer, which must find nothing."""
    if request.param == "plain":
        yield
        return
    with sanitize():
        yield


def gamma(k: int, eps: float = EPS32) -> float:
    """The relative error of k roundings."""
    return k * eps / (1 - k * eps)


def test_saxpy() -> None:
    kernel = harness.cuda(
        """__global__ void k(float* y, const float* x, float a, int n) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = a * x[i] + y[i]; }"""
    )
    for n in (1, 31, 1000, 4097):
        x, y = np.random.standard_normal((2, n)).astype(np.float32)
        expected = (np.float64(np.float32(0.7)) * x + y).astype(np.float32)  # the fma rounds once
        harness.run(kernel, 3, 128, y, x, 0.7, n)
        np.testing.assert_array_equal(y, expected)


def test_reduction_through_shared_memory_and_shuffles() -> None:
    kernel = harness.cuda(
        """template <typename T> __device__ void sum(T* out, const T* a, int n) {
            __shared__ T part[32]; int t = threadIdx.x; T x = 0;
            for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) x += a[i];
            for (int o = 16; o; o >>= 1) x += __shfl_down_sync(~0u, x, o);
            if (t % 32 == 0) part[t / 32] = x;
            __syncthreads();
            if (t < 32) { x = t < blockDim.x / 32 ? part[t] : 0; for (int o = 16; o; o >>= 1) x += __shfl_down_sync(~0u, x, o);
                if (t == 0) out[blockIdx.x] = x; } }
        __global__ void k(float* f, const float* a, int* g, const int* b, int n) {
            if (blockIdx.y) sum<int>(g, b, n); else sum<float>(f, a, n); }"""
    )
    n = 10_001
    a, b = np.random.standard_normal(n).astype(np.float32), np.random.randint(-(2**31), 2**31, n).astype(np.int32)
    f, g = harness.poisoned(4, np.float32), harness.poisoned(4, np.int32)
    kernel((4, 2), 256, f, a, g, b, n)
    assert abs(f.astype(np.float64).sum() - a.astype(np.float64).sum()) <= gamma(60) * np.abs(a).sum()
    assert int(g.astype(np.int64).sum()) & 0xFFFFFFFF == int(b.astype(np.int64).sum()) & 0xFFFFFFFF


def test_inclusive_scan() -> None:
    kernel = harness.cuda(
        """__global__ void k(int* out, const int* a, int n) {
        extern __shared__ int s[]; int t = threadIdx.x, i = blockIdx.x * blockDim.x + t; int* from = s; int* to = s + blockDim.x;
        from[t] = i < n ? a[i] : 0; __syncthreads();
        for (int d = 1; d < blockDim.x; d *= 2) {
            to[t] = from[t] + (t >= d ? from[t - d] : 0); __syncthreads();
            int* swap = from; from = to; to = swap; }
        if (i < n) out[i] = from[t]; }"""
    )
    a = np.random.randint(-1000, 1000, 700).astype(np.int32)
    for block in (32, 100, 256):
        out = np.zeros(700, np.int32)
        harness.run(kernel, -(-700 // block), block, out, a, 700, smem=8 * block)
        expected = np.concatenate([np.cumsum(a[n : n + block]) for n in range(0, 700, block)])
        np.testing.assert_array_equal(out, expected)


def test_softmax_of_rows() -> None:
    kernel = harness.cuda(
        """__global__ void k(float* out, const float* a, int n) {
        __shared__ float s[64]; int t = threadIdx.x; a += blockIdx.x * n; out += blockIdx.x * n; float m = -3.4e38f;
        for (int i = t; i < n; i += 64) m = fmaxf(m, a[i]);
        s[t] = m; __syncthreads();
        for (int d = 32; d; d /= 2) { if (t < d) s[t] = fmaxf(s[t], s[t + d]); __syncthreads(); }
        m = s[0]; __syncthreads(); float x = 0;
        for (int i = t; i < n; i += 64) x += expf(a[i] - m);
        s[t] = x; __syncthreads();
        for (int d = 32; d; d /= 2) { if (t < d) s[t] += s[t + d]; __syncthreads(); }
        for (int i = t; i < n; i += 64) out[i] = expf(a[i] - m) / s[0]; }"""
    )
    for n in (1, 63, 200):
        a = (10 * np.random.standard_normal((5, n))).astype(np.float32)
        out = harness.poisoned((5, n), np.float32)
        kernel(5, 64, out, a, n)
        e = np.exp(a.astype(np.float64) - a.max(1, keepdims=True))
        expected = e / e.sum(1, keepdims=True)
        # expf is good to 2 ulp, its argument to half an ulp of at most 80; then the sum and the quotient.
        assert (np.abs(out - expected) <= (gamma(2 * (4 + 80) + n // 64 + 8)) * expected + 1e-45).all()


def test_layer_norm() -> None:
    kernel = harness.cuda(
        """__global__ void k(float* out, const float* a, const float* w, const float* b, int n, float eps) {
        __shared__ float s[2][8]; int t = threadIdx.x; a += blockIdx.x * n; out += blockIdx.x * n; float x = 0, y = 0;
        for (int i = t; i < n; i += blockDim.x) { x += a[i]; y += a[i] * a[i]; }
        for (int o = 16; o; o /= 2) { x += __shfl_xor_sync(~0u, x, o); y += __shfl_xor_sync(~0u, y, o); }
        if (t % 32 == 0) { s[0][t / 32] = x; s[1][t / 32] = y; } __syncthreads();
        x = y = 0; for (int i = 0; i < blockDim.x / 32; i++) { x += s[0][i]; y += s[1][i]; }
        float mean = x / n, r = rsqrtf(y / n - mean * mean + eps);
        for (int i = t; i < n; i += blockDim.x) out[i] = (a[i] - mean) * r * w[i] + b[i]; }"""
    )
    n = 300
    a, w, b = np.random.standard_normal((3, 4, n)).astype(np.float32)
    out = harness.poisoned((4, n), np.float32)
    kernel(4, 128, out, a, w[0].copy(), b[0].copy(), n, 1e-5)
    x = a.astype(np.float64)
    mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * w[0] + b[0]
    second = (x**2).mean(1, keepdims=True)
    bound = (
        gamma(n)
        * (np.abs(x).mean(1, keepdims=True) + np.abs(x - mean) * second / variance + np.abs(x))
        / np.sqrt(variance)
    )
    assert (np.abs(out - expected) <= bound * np.abs(w[0]) + gamma(8) * (np.abs(expected) + np.abs(b[0]))).all()


def test_transpose_with_padded_tiles() -> None:
    kernel = harness.cuda(
        """__global__ void k(double* out, const double* a, int rows, int columns) {
        __shared__ double tile[16][17]; int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
        for (int j = 0; j < 16; j += 4) if (x < columns && y + j < rows) tile[threadIdx.y + j][threadIdx.x] = a[(y + j) * columns + x];
        __syncthreads();
        x = blockIdx.y * 16 + threadIdx.x; y = blockIdx.x * 16 + threadIdx.y;
        for (int j = 0; j < 16; j += 4) if (x < rows && y + j < columns) out[(y + j) * rows + x] = tile[threadIdx.x][threadIdx.y + j]; }"""
    )
    for rows, columns in ((16, 16), (37, 50), (1, 90)):
        a = np.random.standard_normal((rows, columns))
        out = harness.poisoned((columns, rows), np.float64)
        kernel((-(-columns // 16), -(-rows // 16)), (16, 4), out, a, rows, columns)
        harness.assert_guards(out)
        np.testing.assert_array_equal(out, a.T)


def test_bitonic_sort() -> None:
    kernel = harness.cuda(
        """__global__ void k(int* data, int n) {
        extern __shared__ int s[]; int t = threadIdx.x; s[t] = t < n ? data[t] : 0x7fffffff; __syncthreads();
        for (int size = 2; size <= blockDim.x; size *= 2)
            for (int step = size / 2; step; step /= 2) {
                int other = t ^ step;
                if (other > t) { bool up = (t & size) == 0; int a = s[t], b = s[other]; if ((a > b) == up) { s[t] = b; s[other] = a; } }
                __syncthreads(); }
        if (t < n) data[t] = s[t]; }"""
    )
    for block, n in ((64, 64), (256, 200), (512, 301)):
        data = np.random.randint(-(2**31), 2**31 - 1, n).astype(np.int32)
        expected = np.sort(data)
        harness.run(kernel, 1, block, data, n, smem=4 * block)
        np.testing.assert_array_equal(data, expected)


def test_stream_compaction_with_ballots() -> None:
    kernel = harness.cuda(
        """__global__ void k(int* out, int* count, const int* a, int n) {
        __shared__ int base[9]; int t = threadIdx.x, warp = t / 32, lane = t % 32; bool keep = t < n && a[t] % 3 == 0;
        unsigned votes = __ballot_sync(~0u, keep); if (lane == 0) base[warp + 1] = __popc(votes); __syncthreads();
        if (t == 0) { base[0] = 0; for (int i = 1; i < 9; i++) base[i] += base[i - 1]; *count = base[8]; } __syncthreads();
        if (keep) out[base[warp] + __popc(votes & ((1u << lane) - 1))] = a[t]; }"""
    )
    a = np.random.randint(0, 1000, 250).astype(np.int32)
    out, count = np.full(256, -1, np.int32), np.zeros(1, np.int32)
    harness.run(kernel, 1, 256, out, count, a, 250)
    kept = a[a % 3 == 0]
    assert count[0] == kept.size
    np.testing.assert_array_equal(out[: kept.size], kept)
    assert (out[kept.size :] == -1).all()


def test_n_body() -> None:
    kernel = harness.cuda(
        """__global__ void k(float4* force, const float4* body, int n) {
        __shared__ float4 s[32]; int i = blockIdx.x * 32 + threadIdx.x; float4 me = body[i]; float x = 0, y = 0, z = 0;
        for (int tile = 0; tile < n; tile += 32) {
            s[threadIdx.x] = body[tile + threadIdx.x]; __syncthreads();
            #pragma unroll 4
            for (int j = 0; j < 32; j++) {
                float dx = s[j].x - me.x, dy = s[j].y - me.y, dz = s[j].z - me.z;
                float r = rsqrtf(dx * dx + dy * dy + dz * dz + 0.01f), f = s[j].w * r * r * r;
                x += dx * f; y += dy * f; z += dz * f; }
            __syncthreads(); }
        force[i] = make_float4(x, y, z, me.w); }"""
    )
    body = np.random.standard_normal((96, 4)).astype(np.float32)
    force = harness.poisoned((96, 4), np.float32)
    kernel(3, 32, force, body, 96)
    p, m = body[:, :3].astype(np.float64), body[:, 3].astype(np.float64)
    d = p[None] - p[:, None]
    terms = d * (m / (np.square(d).sum(2) + 0.01) ** 1.5)[:, :, None]
    # 96 sums; in a term three differences, their squares, the root (three half ulps, cubed) and four products.
    assert (np.abs(force[:, :3] - terms.sum(1)) <= gamma(96 + 40) * np.abs(terms).sum(1)).all()
    np.testing.assert_array_equal(force[:, 3], body[:, 3])


def test_mandelbrot() -> None:
    """Divergent loops; without fused operations NumPy's float32 takes every point the same way."""
    kernel = harness.cuda(
        """__global__ void k(int* out, int width, int height, int limit) {
        int px = blockIdx.x * blockDim.x + threadIdx.x, py = blockIdx.y * blockDim.y + threadIdx.y;
        if (px >= width || py >= height) return;
        float cx = px * 0.05f - 2.0f, cy = py * 0.0625f - 1.25f, x = 0, y = 0; int n = 0;
        while (x * x + y * y <= 4.0f && n < limit) { float t = x * x - y * y + cx; y = 2.0f * x * y + cy; x = t; n++; }
        out[py * width + px] = n; }""",
        options=("-fmad=false",),
    )
    width, height, limit = 61, 41, 100
    out = harness.poisoned((height, width), np.int32)
    kernel((8, 6), (8, 8), out, width, height, limit)
    f = np.float32
    cx, cy = np.meshgrid(np.arange(width).astype(f) * f(0.05) - f(2), np.arange(height).astype(f) * f(0.0625) - f(1.25))
    x, y, n = np.zeros_like(cx), np.zeros_like(cx), np.zeros(cx.shape, np.int32)
    for _ in range(limit):
        go = x * x + y * y <= 4
        x, y = np.where(go, x * x - y * y + cx, x), np.where(go, f(2) * x * y + cy, y)
        n += go
    np.testing.assert_array_equal(out, n)


def test_matrix_vector_product_in_double() -> None:
    kernel = harness.cuda(
        """__global__ void k(double* y, const double* a, const double* x, int rows, int columns) {
        int row = blockIdx.x * blockDim.y + threadIdx.y; if (row >= rows) return;
        double s = 0; for (int j = threadIdx.x; j < columns; j += 32) s = fma(a[(long long)row * columns + j], x[j], s);
        for (int o = 16; o; o /= 2) s += __shfl_xor_sync(~0u, s, o);
        if (threadIdx.x == 0) y[row] = s; }"""
    )
    a, x = np.random.standard_normal((37, 150)), np.random.standard_normal(150)
    y = harness.poisoned(37, np.float64)
    kernel(10, (32, 4), y, a, x, 37, 150)
    exact = a.astype(np.longdouble) @ x.astype(np.longdouble)
    assert (np.abs(y - exact) <= gamma(12, EPS64) * (np.abs(a) @ np.abs(x))).all()


def test_stencil_in_three_dimensions() -> None:
    kernel = harness.cuda(
        """__global__ void k(float* out, const float* a, int nx, int ny, int nz) {
        int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, z = blockIdx.z * blockDim.z + threadIdx.z;
        if (x >= nx || y >= ny || z >= nz) return;
        int i = (z * ny + y) * nx + x;
        auto at = [&](int dx, int dy, int dz) { int u = x + dx, v = y + dy, w = z + dz;
            return u < 0 || v < 0 || w < 0 || u >= nx || v >= ny || w >= nz ? 0.0f : a[(w * ny + v) * nx + u]; };
        out[i] = a[i] * 6.0f - at(1, 0, 0) - at(-1, 0, 0) - at(0, 1, 0) - at(0, -1, 0) - at(0, 0, 1) - at(0, 0, -1); }"""
    )
    nx, ny, nz = 13, 10, 7
    a = np.random.randint(-1000, 1000, (nz, ny, nx)).astype(np.float32)  # sums are exact
    for block in ((4, 4, 4), (8, 2, 3), (32, 1, 2)):
        out = harness.poisoned((nz, ny, nx), np.float32)
        kernel(tuple(-(-n // b) for n, b in zip((nx, ny, nz), block, strict=True)), block, out, a, nx, ny, nz)
        padded = np.pad(a, 1)
        around = sum(np.roll(padded, s, axis)[1:-1, 1:-1, 1:-1] for axis in range(3) for s in (1, -1))
        np.testing.assert_array_equal(out, 6 * a - around)


def test_random_numbers() -> None:
    """xorshift in 64 bits, a linear congruence in 32, and Philox's wide products."""
    kernel = harness.cuda(
        """__global__ void k(u64* out, u32* small, u32* philox, int turns) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; u64 s = 88172645463325252ull + i * 0x9E3779B97F4A7C15ull; u32 l = i;
        for (int n = 0; n < turns; n++) { s ^= s << 13; s ^= s >> 7; s ^= s << 17; l = l * 1664525u + 1013904223u; }
        out[i] = s * 2685821657736338717ull; small[i] = l % 1000;
        u32 c0 = i, c1 = 1, c2 = 2, c3 = 3, k0 = 0xA4093822u, k1 = 0x299F31D0u;
        for (int n = 0; n < 10; n++) {
            u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
            c0 = h1 ^ c1 ^ k0; c1 = l1; c2 = h0 ^ c3 ^ k1; c3 = l0; k0 += 0x9E3779B9u; k1 += 0xBB67AE85u; }
        philox[i] = c0 ^ c1 ^ c2 ^ c3; }"""
    )
    n, turns = 96, 17
    out, small, philox = np.zeros(n, np.uint64), np.zeros(n, np.uint32), np.zeros(n, np.uint32)
    harness.run(kernel, 3, 32, out, small, philox, turns)
    w64, w32 = 2**64 - 1, 2**32 - 1
    for i in range(n):
        s, l = (88172645463325252 + i * 0x9E3779B97F4A7C15) & w64, i  # noqa: E741
        for _ in range(turns):
            s ^= s << 13 & w64
            s ^= s >> 7
            s ^= s << 17 & w64
            l = (l * 1664525 + 1013904223) & w32  # noqa: E741
        c0, c1, c2, c3, k0, k1 = i, 1, 2, 3, 0xA4093822, 0x299F31D0
        for _ in range(10):
            p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
            c0, c1, c2, c3 = q >> 32 ^ c1 ^ k0, q & w32, p >> 32 ^ c3 ^ k1, p & w32
            k0, k1 = (k0 + 0x9E3779B9) & w32, (k1 + 0xBB67AE85) & w32
        assert (int(out[i]), int(small[i]), int(philox[i])) == (
            s * 2685821657736338717 & w64,
            l % 1000,
            c0 ^ c1 ^ c2 ^ c3,
        )


def test_convolution_with_dynamic_shared_memory() -> None:
    kernel = harness.cuda(
        """__constant__ float taps[5] = {0.0625f, 0.25f, 0.375f, 0.25f, 0.0625f};
        __global__ void k(float* out, const float* a, int n) {
        extern __shared__ float s[]; int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
        for (int j = t; j < blockDim.x + 4; j += blockDim.x) { int g = blockIdx.x * blockDim.x + j - 2; s[j] = g >= 0 && g < n ? a[g] : 0; }
        __syncthreads();
        float x = 0; for (int d = 0; d < 5; d++) x += taps[d] * s[t + d];
        if (i < n) out[i] = x; }"""
    )
    a = np.random.standard_normal(333).astype(np.float32)
    out = harness.poisoned(333, np.float32)
    kernel(-(-333 // 96), 96, out, a, 333, smem=4 * 100)
    taps = np.array([0.0625, 0.25, 0.375, 0.25, 0.0625])
    exact, size = (np.convolve(x.astype(np.float64), taps, "same") for x in (a, np.abs(a)))
    assert (np.abs(out - exact) <= gamma(5) * size).all()


def test_structs_by_value_and_in_memory() -> None:
    kernel = harness.cuda(
        """struct Inner { short a; double b; }; struct Item { char tag; int count; Inner in; float4 v; };
        struct Parameters { unsigned char first; int n; double scale; Inner in[2]; const Item* items; };
        __global__ void k(double* out, Parameters p) {
        int i = threadIdx.x; if (i >= p.n) return; Item t = p.items[i];
        out[i] = t.tag + t.count * p.scale + t.in.a * p.in[i & 1].b + t.in.b + t.v.w - p.first + p.in[1].a; }""",
        options=("-fmad=false",),
    )
    item = np.dtype({"names": ["tag", "count", "a", "b", "v"], "formats": ["i1", "i4", "i2", "f8", "4f4"],
                     "offsets": [0, 4, 8, 16, 32], "itemsize": 48})  # fmt: skip
    items = np.zeros(40, item)
    items["tag"], items["count"], items["a"] = np.random.randint(-100, 100, (3, 40))
    items["b"], items["v"] = np.random.standard_normal(40), np.random.standard_normal((40, 4))
    given = np.dtype({"names": ["first", "n", "scale", "a0", "b0", "a1", "b1", "items"],
                      "formats": ["u1", "i4", "f8", "i2", "f8", "i2", "f8", "u8"],
                      "offsets": [0, 4, 8, 16, 24, 32, 40, 48], "itemsize": 56})  # fmt: skip
    raw = items.view(np.uint8)
    p = np.array([(200, 37, 0.5, 1, 2.25, -7, -0.75, raw.ctypes.data)], given)
    out = harness.poisoned(40, np.float64)
    kernel(1, 64, out, p.tobytes(), extra=(raw,))
    b = np.where(np.arange(40) & 1, -0.75, 2.25)
    expected = items["tag"] + items["count"] * 0.5 + items["a"] * b + items["b"] + items["v"][:, 3] - 200 - 7
    np.testing.assert_allclose(out[:37], expected[:37], rtol=0, atol=gamma(8, EPS64) * 1000)
    assert np.isnan(out[37:]).all()


def test_game_of_life_on_bytes() -> None:
    kernel = harness.cuda(
        """__global__ void k(u8* out, const u8* a, int w, int h) {
        int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y; if (x >= w || y >= h) return;
        int n = 0;
        for (int dy = -1; dy <= 1; dy++) for (int dx = -1; dx <= 1; dx++)
            if (dx || dy) n += a[(y + dy + h) % h * w + (x + dx + w) % w];
        out[y * w + x] = n == 3 || (n == 2 && a[y * w + x]); }"""
    )
    a = np.random.randint(0, 2, (29, 45)).astype(np.uint8)
    for _ in range(3):
        out = harness.poisoned(a.shape, np.uint8)
        kernel((3, 8), (16, 4), out, a, 45, 29)
        n = sum(np.roll(a, (dy, dx), (0, 1)) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dx or dy)
        np.testing.assert_array_equal(out, (n == 3) | ((n == 2) & (a == 1)))
        a = np.asarray(out).copy()


def test_crc32_by_a_table_that_the_block_makes() -> None:
    kernel = harness.cuda(
        """__global__ void k(u32* out, const u8* text, const int* starts, int n) {
        __shared__ u32 table[256]; int t = threadIdx.x;
        for (u32 i = t; i < 256; i += blockDim.x) { u32 c = i; for (int b = 0; b < 8; b++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1; table[i] = c; }
        __syncthreads(); if (t >= n) return;
        u32 c = ~0u; for (int i = starts[t]; i < starts[t + 1]; i++) c = table[(c ^ text[i]) & 255] ^ (c >> 8);
        out[t] = ~c; }"""
    )
    lengths = np.random.randint(0, 60, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    text = np.random.randint(0, 256, max(int(starts[-1]), 1)).astype(np.uint8)
    out = np.zeros(50, np.uint32)
    harness.run(kernel, 1, 64, out, text, starts, 50)
    assert out.tolist() == [zlib.crc32(text[starts[n] : starts[n + 1]].tobytes()) for n in range(50)]


def test_gaussian_elimination_in_one_block() -> None:
    """Barriers in loops whose turns depend on the outer loop's counter."""
    kernel = harness.cuda(
        """__global__ void k(double* a, int n) {
        extern __shared__ double m[]; int t = threadIdx.x;
        for (int i = t; i < n * (n + 1); i += blockDim.x) m[i] = a[i];
        __syncthreads();
        for (int p = 0; p < n; p++) {
            for (int r = p + 1; r < n; r++) {
                double f = m[r * (n + 1) + p] / m[p * (n + 1) + p]; __syncthreads();
                for (int c = p + t; c <= n; c += blockDim.x) m[r * (n + 1) + c] -= f * m[p * (n + 1) + c];
                __syncthreads(); } }
        if (t == 0) for (int r = n - 1; r >= 0; r--) {
            double x = m[r * (n + 1) + n]; for (int c = r + 1; c < n; c++) x -= m[r * (n + 1) + c] * a[c]; a[r] = x / m[r * (n + 1) + r]; } }"""
    )
    n = 12
    a = np.random.standard_normal((n, n)) + n * np.eye(n)  # diagonally dominant: no pivots needed
    x = np.random.standard_normal(n)
    system = np.concatenate([a, (a @ x)[:, None]], 1)
    harness.run(kernel, 1, 32, system, n, smem=8 * n * (n + 1))
    assert np.abs(system.ravel()[:n] - x).max() <= 100 * n * EPS64 * np.linalg.cond(a) * np.abs(x).max()


def test_binary_search_and_pointer_jumping() -> None:
    kernel = harness.cuda(
        """__global__ void k(int* place, const int* sorted, const int* wanted, int n, int* parent, int m) {
        int t = threadIdx.x, low = 0, high = n;
        while (low < high) { int mid = (low + high) / 2; if (sorted[mid] < wanted[t]) low = mid + 1; else high = mid; }
        place[t] = low;
        if (t < m) { int p = t; while (parent[p] != p) p = parent[p]; place[t + 64] = p; } }"""
    )
    ordered = np.sort(np.random.randint(0, 500, 203)).astype(np.int32)
    wanted = np.random.randint(-5, 510, 64).astype(np.int32)
    parent = np.array([np.random.randint(0, n + 1) for n in range(50)], np.int32)
    place = np.zeros(128, np.int32)
    harness.run(kernel, 1, 64, place, ordered, wanted, 203, parent, 50)
    np.testing.assert_array_equal(place[:64], np.searchsorted(ordered, wanted))
    roots = []
    for n in range(50):
        while parent[n] != n:
            n = parent[n]
        roots.append(n)
    assert place[64:114].tolist() == roots


def test_histogram_with_shared_atomics() -> None:
    kernel = harness.cuda(
        """__global__ void k(int* out, const u8* a, int n) {
        __shared__ int s[256]; for (int i = threadIdx.x; i < 256; i += blockDim.x) s[i] = 0; __syncthreads();
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&s[a[i]], 1);
        __syncthreads(); for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&out[i], s[i]); }"""
    )
    a = np.random.randint(0, 256, 5003).astype(np.uint8) // np.random.randint(1, 4, 5003).astype(np.uint8)
    out = np.zeros(256, np.int32)
    harness.run(kernel, 6, 96, out, a, a.size, threads=2)
    np.testing.assert_array_equal(out, np.bincount(a, minlength=256))


def test_integer_matrix_product_in_tiles() -> None:
    kernel = harness.cuda(
        """__global__ void k(i64* c, const i64* a, const i64* b, int m, int n, int depth) {
        __shared__ i64 s[8][8], t[8][8]; int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 8 + y, column = blockIdx.x * 8 + x;
        i64 sum = 0;
        for (int k0 = 0; k0 < depth; k0 += 8) {
            s[y][x] = row < m && k0 + x < depth ? a[row * depth + k0 + x] : 0; t[y][x] = column < n && k0 + y < depth ? b[(k0 + y) * n + column] : 0;
            __syncthreads(); for (int j = 0; j < 8; j++) sum += s[y][j] * t[j][x]; __syncthreads(); }
        if (row < m && column < n) c[row * n + column] = sum; }"""
    )
    m, n, depth = 19, 26, 21
    a, b = np.random.randint(-(2**62), 2**62, (m, depth)), np.random.randint(-(2**62), 2**62, (depth, n))
    c = harness.poisoned((m, n), np.int64)
    kernel((4, 3), (8, 8), c, a, b, m, n, depth)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(c, a @ b)  # NumPy's integers wrap as well


def test_interpreter_of_a_small_machine() -> None:
    """A switch over opcodes that differ between lanes, with jumps, a fall-through and an early return."""
    kernel = harness.cuda(
        """__global__ void k(int* out, const int* code, int n) {
        int t = threadIdx.x, acc = t + 1, other = 1; u32* memory = (u32*)out + 128 + 4 * t; const int* p = code + (t % 5) * n;
        for (int pc = 0; pc < n; pc++) {
            int x = p[pc] >> 4;
            switch (p[pc] & 15) {
            case 0: acc = (u32)acc + x; break;
            case 1: acc = (u32)acc * x; break;
            case 2: { int swap = acc; acc = other; other = swap; break; }
            case 3: acc ^= other; break;
            case 4: acc = (u32)acc << (x & 31);  // and then
            case 5: acc = (u32)acc >> (x & 15); break;
            case 6: other = (u32)other + acc; break;
            case 7: acc = acc > x ? acc : x; break;
            case 8: if (acc & 1) pc += x & 3; break;
            case 9: acc = __popc(acc); break;
            case 10: memory[x & 3] = acc; break;
            case 11: acc = memory[x & 3]; break;
            case 12: acc = x ? acc / x : 0; break;
            case 13: if (acc == x) { out[64 + t] = -1; return; } break;
            case 14: acc = ~acc; break;
            default: acc = __brev(acc);
            } }
        out[t] = acc; out[64 + t] = other; }"""
    )
    n, w32 = 60, 2**32 - 1
    code = np.random.randint(0, 200 * 16, (5, n)).astype(np.int32)
    out = np.zeros(128 + 256, np.int32)
    harness.run(kernel, 1, 64, out, code, n)
    expected = np.zeros(128 + 256, np.int64)
    for t in range(64):
        acc, other, memory, pc = t + 1, 1, [0] * 4, 0  # as unsigned words
        while pc < n:
            op, x = int(code[t % 5, pc]) & 15, int(code[t % 5, pc]) >> 4
            pc += 1
            number = acc - ((acc >> 31) << 32)
            match op:
                case 0 | 1:
                    acc = acc + x if op == 0 else acc * x
                case 2:
                    acc, other = other, acc
                case 3:
                    acc ^= other
                case 4 | 5:
                    acc = ((acc << (x & 31) & w32) if op == 4 else acc) >> (x & 15)
                case 6:
                    other = other + acc & w32
                case 7:
                    acc = max(number, x)
                case 8:
                    pc += (acc & 1) * (x & 3)
                case 9:
                    acc = acc.bit_count()
                case 10:
                    memory[x & 3] = acc
                case 11:
                    acc = memory[x & 3]
                case 12:
                    acc = abs(number) // x * (-1 if number < 0 else 1) if x else 0
                case 13:
                    if number == x:
                        expected[64 + t] = -1
                        break
                case 14:
                    acc = ~acc
                case 15:
                    acc = int(f"{acc:032b}"[::-1], 2)
            acc &= w32
        else:
            expected[t], expected[64 + t] = acc, other
        expected[128 + 4 * t : 132 + 4 * t] = memory
    np.testing.assert_array_equal(out.view(np.uint32), expected & w32)


def test_blocks_that_leave_early_and_loops_that_end_for_a_whole_block() -> None:
    """Labels spread over a row until nothing changes; blocks without anything to do leave before the first barrier."""
    kernel = harness.cuda(
        """__global__ void k(int* label, int* turns, const u8* filled, const int* active, int n) {
        extern __shared__ int s[]; __shared__ int changed[2]; int t = threadIdx.x, i = blockIdx.x * n + t;
        if (!active[blockIdx.x]) return;
        bool mine = t < n && filled[i]; s[t] = mine ? t : -1; if (t < 2) changed[t] = 0; __syncthreads();
        int turn = 0;
        for (;; turn++) {
            int left = t && mine ? s[t - 1] : -1, right = t + 1 < n && mine ? s[t + 1] : -1, most = max(s[t], max(left, right));
            __syncthreads();
            if (most != s[t]) { s[t] = most; atomicOr(&changed[turn & 1], 1); }
            if (t == 0) changed[~turn & 1] = 0;
            __syncthreads();
            if (!changed[turn & 1]) break;
        }
        if (t < n) label[i] = s[t];
        if (t == 0) turns[blockIdx.x] = turn; }"""
    )
    blocks, n = 6, 77
    filled = (np.random.rand(blocks, n) < 0.8).astype(np.uint8)
    active = np.array([1, 0, 1, 1, 0, 1], np.int32)
    label, turns = np.full((blocks, n), -7, np.int32), np.full(blocks, -7, np.int32)
    harness.run(kernel, blocks, 96, label, turns, filled, active, n, smem=4 * 96)
    for b in range(blocks):
        expected, longest, last = np.full(n, -1), 0, -1
        for i in reversed(range(n)):
            if filled[b, i]:
                last = last if i + 1 < n and filled[b, i + 1] else i
                expected[i] = last
                longest = max(longest, last - i)
        assert label[b].tolist() == (expected.tolist() if active[b] else [-7] * n)
        assert turns[b] == (longest if active[b] else -7)


def test_quickselect_by_votes_of_the_block() -> None:
    """The k-th smallest by bisection: every turn counts, and ends, by what all threads of the block vote."""
    kernel = harness.cuda(
        """__global__ void k(int* found, int* turns, const int* a, int n, int rank) {
        int t = threadIdx.x; bool have = t < n; int x = have ? a[blockIdx.x * n + t] : 0; i64 low = -(1ll << 31), high = (1ll << 31) - 1;
        int turn = 0;
        while (low < high) {
            i64 middle = (low + high) >> 1;
            int below = __syncthreads_count(have && x <= middle);
            if (below > rank) high = middle; else low = middle + 1;
            turn++;
            if (__syncthreads_and(!have || x < low || x > high || x == low)) {
                // none is strictly between: the answer is low or the least one above it
                if (__syncthreads_or(have && x == low) && __syncthreads_count(have && x <= low) > rank) high = low;
            }
        }
        if (t == 0) { found[blockIdx.x] = (int)low; turns[blockIdx.x] = turn; } }"""
    )
    n = 90
    a = np.random.randint(-1000, 1000, (4, n)).astype(np.int32)
    found, turns = np.zeros(4, np.int32), np.zeros(4, np.int32)
    for rank in (0, 41, n - 1):
        harness.run(kernel, 4, 100, found, turns, a, n, rank)
        np.testing.assert_array_equal(found, np.sort(a, 1)[:, rank])
        assert (turns <= 33).all()


def test_packed_halves() -> None:
    """y = a x + y on pairs, then the sum of squares of a row by shuffled pairs; all of it exact in half precision."""
    kernel = harness.cuda(
        """#include <cuda_fp16.h>
        __global__ void k(__half2* y, const __half2* x, float* norm, __half2* most, int pairs) {
        int t = threadIdx.x; y += blockIdx.x * pairs; x += blockIdx.x * pairs;
        __half2 a = __floats2half2_rn(0.5f, -2.0f), top = __float2half2_rn(-100.0f); float sum = 0;
        for (int i = t; i < pairs; i += 32) {
            __half2 v = __hfma2(a, x[i], y[i]); y[i] = v; top = __hmax2(top, __habs2(v));
            float2 f = __half22float2(__hmul2(v, v)); sum += f.x + f.y; }
        for (int o = 16; o; o /= 2) { sum += __shfl_xor_sync(~0u, sum, o); top = __hmax2(top, __shfl_xor_sync(~0u, top, o)); }
        if (t == 0) { norm[blockIdx.x] = sum; most[blockIdx.x] = top; } }"""
    )
    rows, pairs = 3, 75
    x, y = (np.random.randint(-20, 21, (2, rows, pairs, 2)) / 4).astype(np.float16)
    norm, most = harness.poisoned(rows, np.float32), harness.poisoned((rows, 2), np.float16)
    expected = x * np.array([0.5, -2], np.float16) + y
    harness.run(kernel, rows, 32, y, x, norm, most, pairs)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(norm, np.square(expected).astype(np.float32).sum((1, 2)))
    np.testing.assert_array_equal(most, np.abs(expected).max(1))


# -- math functions: bounds in ulp from the CUDA C Programming Guide (Python's own gamma is good to 5) ----------------------
F32 = [
    ("expf(x)", math.exp, 2, -80, 80), ("exp2f(x)", lambda x: 2.0**x, 2, -100, 100), ("logf(x)", math.log, 1, 1e-30, 1e30),
    ("log2f(x)", math.log2, 1, 1e-30, 1e30), ("log10f(x)", math.log10, 2, 1e-30, 1e30), ("log1pf(x)", math.log1p, 1, -0.9, 100),
    ("expm1f(x)", math.expm1, 1, -10, 80), ("sinf(x)", math.sin, 2, -1e5, 1e5), ("cosf(x)", math.cos, 2, -1e9, 1e9),
    ("tanf(x)", math.tan, 4, -100, 100), ("asinf(x)", math.asin, 2, -1, 1), ("acosf(x)", math.acos, 2, -1, 1),
    ("atanf(x)", math.atan, 2, -100, 100), ("sinhf(x)", math.sinh, 3, -80, 80), ("coshf(x)", math.cosh, 2, -80, 80),
    ("tanhf(x)", math.tanh, 2, -10, 10), ("cbrtf(x)", lambda x: math.copysign(abs(x) ** (1 / 3), x), 1, -1e20, 1e20),
    ("erff(x)", math.erf, 2, -4, 4), ("erfcf(x)", math.erfc, 4, -4, 9), ("tgammaf(x)", math.gamma, 5, 0.1, 30),
    ("rsqrtf(x)", lambda x: 1 / math.sqrt(x), 2, 1e-30, 1e30), ("sqrtf(x)", math.sqrt, 0, 0, 1e30),
    ("powf(x, 2.7f)", lambda x: x ** float(np.float32(2.7)), 4, 1e-5, 1e5), ("hypotf(x, 3.0f)", lambda x: math.hypot(x, 3), 3, -1e10, 1e10),
    ("fmodf(x, 0.7f)", lambda x: math.fmod(x, float(np.float32(0.7))), 0, -1e4, 1e4), ("atan2f(x, 0.3f)", lambda x: math.atan2(x, float(np.float32(0.3))), 3, -5, 5),
    ("floorf(x) + rintf(x)", lambda x: math.floor(x) + round(x), 0, -1e4, 1e4), ("x / 3.7f", lambda x: x / float(np.float32(3.7)), 0, -1e30, 1e30),
]  # fmt: skip
F64 = [
    ("exp(x)", math.exp, 1, -600, 600), ("log(x)", math.log, 1, 1e-300, 1e300), ("log2(x)", math.log2, 1, 1e-300, 1e300),
    ("sin(x)", math.sin, 2, -1e6, 1e6), ("cos(x)", math.cos, 2, -1e12, 1e12), ("tan(x)", math.tan, 2, -100, 100),
    ("asin(x)", math.asin, 2, -1, 1), ("atan(x)", math.atan, 2, -100, 100), ("sinh(x)", math.sinh, 2, -300, 300),
    ("tanh(x)", math.tanh, 1, -10, 10), ("erf(x)", math.erf, 2, -5, 5), ("erfc(x)", math.erfc, 5, -5, 20),
    ("tgamma(x)", math.gamma, 10 + 5, 0.1, 100), ("expm1(x)", math.expm1, 1, -10, 300),
    ("log1p(x)", math.log1p, 1, -0.9, 1e10), ("pow(x, 1.3)", lambda x: x**1.3, 2, 1e-100, 1e100), ("sqrt(x)", math.sqrt, 0, 0, 1e300),
    ("rsqrt(x)", lambda x: 1 / math.sqrt(x), 1, 1e-300, 1e300), ("hypot(x, 2.5)", lambda x: math.hypot(x, 2.5), 2, -1e100, 1e100),
    ("fmod(x, 0.7)", lambda x: math.fmod(x, 0.7), 0, -1e6, 1e6), ("x / 3.7", lambda x: x / 3.7, 0, -1e300, 1e300),
    ("trunc(x) + rint(x)", lambda x: math.trunc(x) + round(x), 0, -1e6, 1e6), ("ldexp(x, 5) + fdim(x, 1.0)", lambda x: x * 32 + max(x - 1, 0), 0, -5, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "dtype"), [(F32, np.float32), (F64, np.float64)], ids=["float", "double"])
def test_math_functions(functions: list[tuple[str, Callable[[float], float], int, float, float]], dtype: type) -> None:
    ctype = "float" if dtype is np.float32 else "double"
    cases = "".join(f"case {n}: y = {text}; break;\n" for n, (text, *_) in enumerate(functions))
    kernel = harness.cuda(
        f"__global__ void k({ctype}* out, const {ctype}* a) {{ int i = blockIdx.x * 64 + threadIdx.x; {ctype} x = a[i], y = 0;"
        f"switch (blockIdx.x) {{ {cases} }} out[i] = y; }}"
    )
    a = np.stack([_spread(low, high, dtype) for *_, low, high in functions])
    out = harness.poisoned(a.shape, dtype)
    kernel(len(functions), 64, out, a)
    wrong = []
    for n, (text, exact, ulps, _, _) in enumerate(functions):
        for x, y in zip(a[n], out[n], strict=True):
            wanted = exact(float(x))
            ulp = float(np.spacing(dtype(abs(wanted))))
            # Half an ulp for rounding; Python's own double is good to one.
            allowed = (ulps + 0.5) * ulp if dtype is np.float32 or ulps == 0 else (ulps + 1.5) * ulp
            if abs(float(y) - wanted) > allowed:
                wrong.append(f"{text} of {x!r} is {y!r}, not {wanted!r}: {abs(float(y) - wanted) / ulp:.1f} ulp")
    assert not wrong, "\n".join(wrong)


def _spread(low: float, high: float, dtype: type) -> np.ndarray:
    """64 numbers, half of them by size where the range spans several."""
    some = np.random.uniform(low, high, 64)
    if high > 1000 and low <= 0:
        some[::2] = np.sign(some[::2]) * np.exp(np.random.uniform(-10, math.log(high), 32))
    elif high > 1000:
        some[::2] = np.exp(np.random.uniform(math.log(low), math.log(high), 32))
    return np.clip(some, low, high).astype(dtype)
