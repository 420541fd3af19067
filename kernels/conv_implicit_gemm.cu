// conv_implicit_gemm: 2-d convolution and its two gradients as matrix products, C[m][n] = sum over k of A[m][k] B[k][n].
// B is never stored: its elements are gathered from the image while a tile is filled (implicit im2col).
//
//   MODE           m             n              k              A        B        C
//   FORWARD        out channel   image, y, x    channel, r, s  weight   input    output
//   INPUT_GRAD     in channel    image, y, x    channel, r, s  weight   grad     grad of input
//   WEIGHT_GRAD    out channel   channel, r, s  image, y, x    grad     input    grad of weight
//
// Entry:    conv_implicit_gemm(ELEMENT* c_out, const ELEMENT* a_in, const ELEMENT* b_in, const ELEMENT* bias,
//                              ConvGeometry g)
// Shapes:   per group: a [m][k] and b by their strides in g, any strides; c [m][n] by its strides; bias [groups * m],
//           or, where g.has_bias is 0, anything: it is not read
// Types:    ELEMENT = float, double, int, long long (integers wrap)
// Defines:  ELEMENT; MODE as above; BM BN BK the block's tile, TM x TN outputs a thread, KU steps of the sum unrolled;
//           INDEX = int where every offset fits 31 bits, else long long;
//           FILL_ALONG_K 1: a warp's lanes gather B along k, not along n; TAP_OUTER 1: k runs (r, s, channel);
//           WIDE_FILTER 1: more than 15 filter rows or columns; ACTIVATION (epilogue.cuh)
// Launch:   grid (tiles_m * tiles_n * groups * phases, splits), block 32 * (BM / TM) * (BN / (32 * TN));
//           phases: of a strided input gradient, stride_y * stride_x, else 1
// Shared:   dynamic: A's tile, B's tile, the table of columns, the table of taps (conv_plan.py, _smem_bytes)
// Needs:    c does not overlap a or b. With splits > 1, c is a workspace [splits][...], summed by conv_split_sum
// Sum:      one accumulator an output, over k ascending within a split: repeatable
// Host:     cudaops/ops/conv_plan.py
//
// A warp spans a row of the tile, so its B loads and C stores run along the image and its A operand is a broadcast.
#include "arithmetic.cuh"
#include "conv_geometry.cuh"
#include "epilogue.cuh"
#include "pack.cuh"

namespace {

using T = Compute<ELEMENT>::type;

constexpr int WARPS_N = BN / (32 * TN), WARPS_M = BM / TM, WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
constexpr int W = PACK_WIDTH<T>;
constexpr int B_PITCH = FILL_ALONG_K ? BN + 1 : BN;  // along k the stores go down a column: keep them off one bank
constexpr int A_ROWS_APART = THREADS / BK, A_FILLS = (BM + A_ROWS_APART - 1) / A_ROWS_APART;
static_assert(BM % TM == 0 && BN % (32 * TN) == 0, "warps must tile the block");
static_assert(THREADS % BK == 0 && (BM % A_ROWS_APART == 0 || BM < A_ROWS_APART), "threads must tile A's rows");
static_assert(BK % KU == 0 && KU % W == 0, "the unrolled part must hold whole packs of A");
static_assert(FILL_ALONG_K ? BN % A_ROWS_APART == 0 : BK % WARPS == 0, "threads must tile B's rows");
static_assert(MODE != WEIGHT_GRAD || FILL_ALONG_K, "the weight gradient's sum runs along the image");

constexpr bool TAP_TABLE = MODE != WEIGHT_GRAD && !WIDE_FILTER;
constexpr int B_COLUMNS = BN / 32, B_ROWS = BK / WARPS;  // of a lane, filling along n
constexpr int B_FILLS = FILL_ALONG_K ? BN / A_ROWS_APART : B_ROWS * B_COLUMNS;

#if MODE == WEIGHT_GRAD
using ColumnKey = TapKey;
using SumKey = PixelKey;
#else
using ColumnKey = PixelKey;
using SumKey = TapKey;
#endif

struct Shared {
    T* a;  // [BM][BK]
    T* b;  // [BK][B_PITCH]
    Index* tap_b;  // [taps]
    Index* tap_a;
    TapKey* tap_key;
    Index* column_offset;  // [BN]
    ColumnKey* column_key;
};

__device__ __forceinline__ Shared carve(int taps) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared shared;
    shared.a = reinterpret_cast<T*>(memory);
    shared.b = shared.a + BM * BK;
    shared.column_offset = reinterpret_cast<Index*>(shared.b + BK * B_PITCH);
    shared.tap_b = shared.column_offset + (FILL_ALONG_K ? BN : 0);
    shared.tap_a = shared.tap_b + taps;
    shared.column_key = reinterpret_cast<ColumnKey*>(shared.tap_a + taps);
    shared.tap_key = reinterpret_cast<TapKey*>(shared.column_key + (FILL_ALONG_K ? BN : 0));
    return shared;
}

__device__ __forceinline__ bool counts(ColumnKey column, SumKey sum, const ConvGeometry& g) {
#if MODE == WEIGHT_GRAD
    return inside(sum, column, g);
#else
    return inside(column, sum, g);
#endif
}

// One step of the sum, k: where A and B elements lie for it, and its half of the test whether B's is inside the image.
struct Step {
    Index a_offset, b_offset;
    SumKey key;
};

__device__ __forceinline__ Step step_at(Index k, const Problem& p, const ConvGeometry& g, const Shared& shared) {
    const Index inner = min(k, p.k - 1);
    Step step;
#if MODE == WEIGHT_GRAD
    Index image;
    int y, x;
    split_pixel(inner, p, image, y, x);
    const Pixel pixel = pixel_at(inner, p, g);
    step.a_offset = image * g.a_k[0] + y * g.a_k[1] + x * g.a_k[2];
    step.b_offset = pixel.offset;
    step.key = k < p.k ? pixel.key : no_pixel();
#else
    const int whole = static_cast<int>(divide(inner, p.by_taps));
    const int rest = static_cast<int>(inner - static_cast<Index>(whole) * p.by_taps.divisor);
    const int channel = TAP_OUTER ? rest : whole, t = TAP_OUTER ? whole : rest;
    Tap tap;
    if constexpr (TAP_TABLE) {
        tap.b_offset = shared.tap_b[t];
        tap.a_offset = shared.tap_a[t];
        tap.key = shared.tap_key[t];
    } else {
        tap = tap_at(t, p, g);
    }
    step.a_offset = channel * g.a_k[0] + tap.a_offset;
    step.b_offset = channel * g.b_channel + tap.b_offset;
    step.key = k < p.k ? tap.key : no_tap();
#endif
    return step;
}

struct Column {
    Index offset;
    ColumnKey key;
};

__device__ __forceinline__ Column column_at(Index n, const Problem& p, const ConvGeometry& g) {
    const Index inner = min(n, p.n - 1);
    Column column;
#if MODE == WEIGHT_GRAD
    const int taps = p.y.taps * p.x.taps;
    const int channel = static_cast<int>(inner / taps);
    const Tap tap = tap_at(static_cast<int>(inner - static_cast<Index>(channel) * taps), p, g);
    column.offset = channel * g.b_channel + tap.b_offset;
    column.key = n < p.n ? tap.key : no_tap();
#else
    const Pixel pixel = pixel_at(inner, p, g);
    column.offset = pixel.offset;
    column.key = n < p.n ? pixel.key : no_pixel();
#endif
    return column;
}

// Where column n of C lies.
__device__ __forceinline__ Index c_offset_at(Index n, const Problem& p, const ConvGeometry& g) {
    const Index inner = min(n, p.n - 1);
#if MODE == WEIGHT_GRAD
    const int taps = p.y.taps * p.x.taps;
    const Index outer = inner / taps;
    const int t = static_cast<int>(inner - outer * taps);
    const int y = t / p.x.taps, x = t - y * p.x.taps;
#else
    Index outer;
    int y, x;
    split_pixel(inner, p, outer, y, x);
    y = p.y.first_pixel + y * p.y.pixel_apart;
    x = p.x.first_pixel + x * p.x.pixel_apart;
#endif
    return outer * g.c_n[0] + y * g.c_n[1] + x * g.c_n[2];
}

// A load never leaves the group's elements, so it needs no branch; what it gives counts only where the key says so.
__device__ __forceinline__ T gather(const T* b, Index offset, const ConvGeometry& g) {
    return b[min(max(offset, static_cast<Index>(0)), g.b_last)];
}

// A's part of the tile. `a_offset()`: where A lies for this lane's step of the sum; asked for only where it is needed.
template <typename Offset>
__device__ __forceinline__ void load_a(
    T (&r)[A_FILLS], const T* a, Index k0, Index k_size, int m0, Offset a_offset, const ConvGeometry& g) {
    const int k = threadIdx.x % BK, row0 = m0 + threadIdx.x / BK;
    if (g.a_linear && k0 + BK <= k_size) {
        const T* column = a + k0 + k;
#pragma unroll
        for (int i = 0; i < A_FILLS; ++i) r[i] = column[min(row0 + i * A_ROWS_APART, g.m - 1) * g.a_row];
    } else {
        const T* column = a + a_offset();
#pragma unroll
        for (int i = 0; i < A_FILLS; ++i) {
            const T value = column[min(row0 + i * A_ROWS_APART, g.m - 1) * g.a_row];
            r[i] = k0 + k < k_size ? value : T(0);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_implicit_gemm(
    ELEMENT* __restrict__ c_out, const ELEMENT* __restrict__ a_in, const ELEMENT* __restrict__ b_in,
    const ELEMENT* __restrict__ bias, const ConvGeometry g) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp / WARPS_N, warp_n = warp % WARPS_N;
    int block = blockIdx.x / g.tiles_m;
    const int m0 = (blockIdx.x - block * g.tiles_m) * BM;
    const Index n0 = static_cast<Index>(block % g.tiles_n) * BN;
    block /= g.tiles_n;
    const int phase = block / g.groups, group = block - phase * g.groups;
    const Problem p = problem_of(phase, g);
    if (n0 >= p.n) return;

    const T* a = reinterpret_cast<const T*>(a_in) + group * g.a_group;
    const T* b = reinterpret_cast<const T*>(b_in) + group * g.b_group;
    const int taps = TAP_TABLE ? p.y.taps * p.x.taps : 0;
    const Shared shared = carve(taps);
    for (int t = threadIdx.x; t < taps; t += THREADS) {
        const Tap tap = tap_at(t, p, g);
        shared.tap_b[t] = tap.b_offset;
        shared.tap_a[t] = tap.a_offset;
        shared.tap_key[t] = tap.key;
    }
#if FILL_ALONG_K
    for (int n = threadIdx.x; n < BN; n += THREADS) {
        const Column column = column_at(n0 + n, p, g);
        shared.column_offset[n] = column.offset;
        shared.column_key[n] = column.key;
    }
#else
    Column columns[B_COLUMNS];
#pragma unroll
    for (int j = 0; j < B_COLUMNS; ++j) columns[j] = column_at(n0 + j * 32 + lane, p, g);
    // Within an image, and where pixels are linear, a row of the tile is a stretch of memory from here.
    const Index tile_offset = pixel_at(n0, p, g).offset;
    const bool straight = p.pixels_linear && divide(n0, p.by_image) == divide(min(n0 + BN, p.n) - 1, p.by_image);
#endif
    __syncthreads();

    T acc[TM][TN] = {};
    T a_next[A_FILLS], b_next[B_FILLS];
    const int splits = gridDim.y;
    const Index k_per_split = ((p.k + BK - 1) / BK + splits - 1) / splits * BK;
    const Index k_first = blockIdx.y * k_per_split, k_end = min(k_first + k_per_split, p.k);

    // The first turn only loads, so that loading and multiplying are written, and compiled, once.
#pragma unroll 1
    for (Index k0 = k_first - BK; k0 < k_end; k0 += BK) {
        const Index next = k0 + BK;
        if (next < k_end) {
#if FILL_ALONG_K
            const Step step = step_at(next + threadIdx.x % BK, p, g, shared);
            load_a(a_next, a, next, p.k, m0, [&] { return step.a_offset; }, g);
#pragma unroll
            for (int i = 0; i < B_FILLS; ++i) {
                const int n = threadIdx.x / BK + i * A_ROWS_APART;
                const T value = gather(b, step.b_offset + shared.column_offset[n], g);
                b_next[i] = counts(shared.column_key[n], step.key, g) ? value : T(0);
            }
#else
            const auto a_offset = [&] { return step_at(next + threadIdx.x % BK, p, g, shared).a_offset; };
            load_a(a_next, a, next, p.k, m0, a_offset, g);
#pragma unroll
            for (int i = 0; i < B_ROWS; ++i) {
                const Step step = step_at(next + warp + i * WARPS, p, g, shared);
                T value[B_COLUMNS];
                const Index start = step.b_offset + tile_offset;
                if (straight && start >= 0 && start + (BN - 1) <= g.b_last) {
#pragma unroll
                    for (int j = 0; j < B_COLUMNS; ++j) value[j] = (b + start)[j * 32 + lane];
                } else {
#pragma unroll
                    for (int j = 0; j < B_COLUMNS; ++j) value[j] = gather(b, step.b_offset + columns[j].offset, g);
                    asm volatile("");  // or the two paths' loads are merged into one, of addresses of any kind
                }
#pragma unroll
                for (int j = 0; j < B_COLUMNS; ++j)
                    b_next[i * B_COLUMNS + j] = counts(columns[j].key, step.key, g) ? value[j] : T(0);
            }
#endif
        }
        if (k0 >= k_first) {
            const T* a_tile = shared.a + warp_m * TM * BK;
            const T* b_tile = shared.b + warp_n * 32 * TN + lane;
#pragma unroll 1
            for (int k = 0; k < BK; k += KU) {
#pragma unroll
                for (int u = 0; u < KU; u += W) {
                    T b_row[W][TN];
#pragma unroll
                    for (int e = 0; e < W; ++e)
#pragma unroll
                        for (int j = 0; j < TN; ++j) b_row[e][j] = b_tile[(k + u + e) * B_PITCH + j * 32];
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        const Pack<T, W> a_row = load_pack<W>(a_tile + i * BK + k + u);
#pragma unroll
                        for (int e = 0; e < W; ++e)
#pragma unroll
                            for (int j = 0; j < TN; ++j)
                                acc[i][j] = multiply_add(a_row.value[e], b_row[e][j], acc[i][j]);
                    }
                }
            }
            __syncthreads();
        }
        if (next < k_end) {
            if (BM >= A_ROWS_APART || threadIdx.x < BM * BK) {
#pragma unroll
                for (int i = 0; i < A_FILLS; ++i)
                    shared.a[(threadIdx.x / BK + i * A_ROWS_APART) * BK + threadIdx.x % BK] = a_next[i];
            }
#if FILL_ALONG_K
#pragma unroll
            for (int i = 0; i < B_FILLS; ++i)
                shared.b[threadIdx.x % BK * B_PITCH + threadIdx.x / BK + i * A_ROWS_APART] = b_next[i];
#else
#pragma unroll
            for (int i = 0; i < B_FILLS; ++i)
                shared.b[(warp + i / B_COLUMNS * WARPS) * B_PITCH + i % B_COLUMNS * 32 + lane] = b_next[i];
#endif
            __syncthreads();
        }
    }

    const int row0 = m0 + warp_m * TM;
    T* c = reinterpret_cast<T*>(c_out) + blockIdx.y * static_cast<long long>(g.split_stride) + group * g.c_group +
           static_cast<long long>(row0) * g.c_row;
    T* c_column[TN];
    bool stored[TN];
#pragma unroll
    for (int j = 0; j < TN; ++j) {
        const Index n = n0 + (warp_n * TN + j) * 32 + lane;
        stored[j] = n < p.n;
        c_column[j] = c + c_offset_at(n, p, g);
    }
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        if (row0 + i >= g.m) break;
        const T row_bias = g.has_bias ? static_cast<T>(bias[group * g.m + row0 + i]) : T(0);
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            if (g.has_bias) acc[i][j] += row_bias;
            if (stored[j]) *c_column[j] = activate<static_cast<Activation>(ACTIVATION), ELEMENT>(acc[i][j]);
            c_column[j] += g.c_row;
        }
    }
}
