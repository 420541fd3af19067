// matmul_skinny: c = a b, finished, batched, where a has at most ROWS rows: b streams by once, for all of them.
//
// Entry:    matmul_skinny(ELEMENT* c, const ELEMENT* input, const ELEMENT* other, const ELEMENT* bias,
//                         const ELEMENT* residual,
//                         INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX c_n, INDEX bias_stride,
//                         INDEX r_m, INDEX r_n,
//                         long long a_batch0, long long a_batch1, long long a_batch2,
//                         long long b_batch0, long long b_batch1, long long b_batch2,
//                         long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
//                         INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K,
//                         SCALAR alpha, SCALAR beta)
// Shapes:   as matmul_simt's, M <= ROWS
// Types:    ELEMENT = float, double, __half, __nv_bfloat16, float2, double2, signed char, unsigned char, short, int,
//           long long, COMPUTED as matmul_simt's
// Defines:  ELEMENT SCALAR INDEX A_CONJ B_CONJ BIAS ACTIVATION RESIDUAL SCALED SWAP as matmul_simt's;
//           ROWS of a that are computed; WARPS of a block, K_WARPS of them share k;
//           K_LANES 1: lanes run along k, and K_WARPS warps make COLUMNS of c (ROWS * COLUMNS <= 32);
//           K_LANES 0: lanes run along n, COLUMNS = WIDTH each, and all warps share k;
//           WIDTH elements a load moves along the lanes: 1, or 16 bytes' worth, then aligned and a divisor of K or N;
//           UNIT 1: at stride 1 there, in a too where lanes run along k
// Launch:   grid ceil(N / (WARPS / K_WARPS * COLUMNS * (K_LANES + 32 * (1 - K_LANES)))) * batches, on x, y taking over
//           beyond 2^31 - 1; block 32 * WARPS
// Shared:   static, sizeof(COMPUTED) * WARPS * 32 * (K_LANES * (K_WARPS > 1) + (1 - K_LANES) * ROWS * COLUMNS)
// Needs:    c does not overlap a, b or bias
// Sum:      a thread adds its share of k, ascending; then, where lanes share k, pairs of them (16, 8, 4, 2, 1 apart);
//           then, where warps do, these in order. Repeatable
// Host:     cudaops/ops/matmul_plan.py, plan_matmul; cudaops/ops/linear.py, plan_linear
#include "epilogue.cuh"
#include "pack.cuh"

using T = Compute<ELEMENT>::type;
using S = Stored<ELEMENT>::type;
using Finishing = Finish<ELEMENT, INDEX, (BiasAxis)BIAS, (Activation)ACTIVATION, RESIDUAL, SCALED>;

constexpr int LANES = 32, THREADS = LANES * WARPS;
constexpr int BLOCK_COLUMNS = WARPS / K_WARPS * COLUMNS * (K_LANES ? 1 : LANES);
static_assert(UNIT || WIDTH == 1, "a wide load needs neighbours");
static_assert(WARPS % K_WARPS == 0, "warps that share k must divide the block's");
#if K_LANES
static_assert(ROWS * COLUMNS <= LANES, "a lane finishes one output");
#else
static_assert(K_WARPS == WARPS && COLUMNS == WIDTH, "lanes along n: all warps share k, and a lane has what it loads");
#endif

// What the block works on: its batch's matrices, and where in them.
struct Work {
    S* c;
    const S* a;
    const S* b;
    INDEX a_m, a_k, b_k, b_n, c_m, c_n, M, N, K;
    Finishing finish;

    // One output, finished.
    __device__ __forceinline__ void put(INDEX m, INDEX n, T x) const {
        T add = 0;
        if (BIAS) add = finish.bias_at(BIAS == 2 ? m : n);
        c[(long long)m * c_m + (long long)n * c_n] = finish(x, add, m, n);
    }
    static __device__ __forceinline__ T left(S x) { return conjugated<A_CONJ>(computed<ELEMENT>(x)); }
    static __device__ __forceinline__ T right(S x) { return conjugated<B_CONJ>(computed<ELEMENT>(x)); }

    // Rows and columns beyond the end are those at the end again: read, computed, and not put.
    __device__ __forceinline__ const S* a_row(int m) const { return a + (long long)(m < M ? m : M - 1) * a_m; }
};

#if K_LANES

template <typename V>
__device__ __forceinline__ V from_lane(V x, int distance) { return __shfl_xor_sync(0xffffffffu, x, distance); }
template <typename R>
__device__ __forceinline__ Complex<R> from_lane(Complex<R> x, int distance) {
    return {from_lane(x.re, distance), from_lane(x.im, distance)};
}

// COLUMNS of c, by K_WARPS warps. Lanes take neighbouring packs of k, so each column of b streams by.
struct Streams {
    const S* a[ROWS];
    const S* b[COLUMNS];

    __device__ __forceinline__ void step(T (&acc)[ROWS][COLUMNS], long long a_at, long long b_at) const {
        Pack<S, WIDTH> a_pack[ROWS], b_pack[COLUMNS];
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) b_pack[n] = load_pack<WIDTH>(b[n] + b_at);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) a_pack[m] = load_pack<WIDTH>(a[m] + a_at);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e)
#pragma unroll
            for (int m = 0; m < ROWS; ++m)
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n)
                    acc[m][n] =
                        multiply_add(Work::left(a_pack[m].value[e]), Work::right(b_pack[n].value[e]), acc[m][n]);
    }
};

__device__ __forceinline__ void multiply(const Work& w, INDEX n_block) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int group = warp / K_WARPS, k_warp = warp % K_WARPS;
    const INDEX n0 = n_block + group * COLUMNS;
    Streams streams;
#pragma unroll
    for (int m = 0; m < ROWS; ++m) streams.a[m] = w.a_row(m);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) streams.b[n] = w.b + (long long)(n0 + n < w.N ? n0 + n : w.N - 1) * w.b_n;

    T acc[ROWS][COLUMNS] = {};
    constexpr int STEP = LANES * WIDTH;
    const int k_lane = lane * WIDTH;
    const long long a_lane = UNIT ? k_lane : (long long)k_lane * w.a_k, a_step = UNIT ? STEP : STEP * (long long)w.a_k;
    const long long b_lane = UNIT ? k_lane : (long long)k_lane * w.b_k, b_step = UNIT ? STEP : STEP * (long long)w.b_k;
    const INDEX whole = w.K / STEP;  // steps in which every lane has something
    INDEX i = k_warp;
#pragma unroll 2
    for (; i < whole; i += K_WARPS) streams.step(acc, i * a_step + a_lane, i * b_step + b_lane);
    if (i == whole && whole * STEP + k_lane < w.K) streams.step(acc, i * a_step + a_lane, i * b_step + b_lane);

    T mine = 0;  // lane m * COLUMNS + n finishes [m][n]
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2)
                acc[m][n] += from_lane(acc[m][n], distance);
            if (lane == m * COLUMNS + n) mine = acc[m][n];
        }
#if K_WARPS > 1
    __shared__ T partial[WARPS][LANES];
    partial[warp][lane] = mine;
    __syncthreads();
    if (k_warp > 0) return;
#pragma unroll
    for (int next = 1; next < K_WARPS; ++next) mine += partial[warp + next][lane];
#endif
    const int m = lane / COLUMNS, n = lane % COLUMNS;
    if (lane < ROWS * COLUMNS && m < w.M && n0 + n < w.N) w.put(m, n0 + n, mine);
}

#else

// A lane's WIDTH columns of c, over every WARPS-th k. An element of a is the same for the whole warp.
template <bool Interior>
__device__ __forceinline__ void add_up(T (&acc)[ROWS][WIDTH], const Work& w, INDEX n_block, int lane, int warp) {
    const S* a[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) a[m] = w.a_row(m);
    const S* b = w.b + (long long)n_block * (UNIT ? 1 : w.b_n);
    b += UNIT ? lane * WIDTH : lane * (long long)w.b_n;
#pragma unroll 4
    for (INDEX k = warp; k < w.K; k += WARPS) {
        Pack<S, WIDTH> b_pack = {};
        if (Interior || n_block + lane * WIDTH < w.N) b_pack = load_pack<WIDTH>(b + (long long)k * w.b_k);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const T a_one = Work::left(a[m][(long long)k * w.a_k]);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) acc[m][e] = multiply_add(a_one, Work::right(b_pack.value[e]), acc[m][e]);
        }
    }
}

__device__ __forceinline__ void multiply(const Work& w, INDEX n_block) {
    __shared__ T partial[WARPS][ROWS][BLOCK_COLUMNS];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    T acc[ROWS][WIDTH] = {};
    if (w.N - n_block >= BLOCK_COLUMNS) {
        add_up<true>(acc, w, n_block, lane, warp);
    } else {
        add_up<false>(acc, w, n_block, lane, warp);
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) partial[warp][m][lane * WIDTH + e] = acc[m][e];
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < ROWS * BLOCK_COLUMNS; at += THREADS) {
        const int m = at / BLOCK_COLUMNS, n = at % BLOCK_COLUMNS;
        T sum = partial[0][m][n];
#pragma unroll
        for (int other = 1; other < WARPS; ++other) sum += partial[other][m][n];
        if (m < w.M && n_block + n < w.N) w.put(m, n_block + n, sum);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul_skinny(ELEMENT* __restrict__ c, const ELEMENT* __restrict__ input, const ELEMENT* __restrict__ other,
              const ELEMENT* __restrict__ bias, const ELEMENT* __restrict__ residual,
              INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX c_n, INDEX bias_stride, INDEX r_m, INDEX r_n,
              long long a_batch0, long long a_batch1, long long a_batch2,
              long long b_batch0, long long b_batch1, long long b_batch2,
              long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
              INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K, SCALAR alpha, SCALAR beta) {
    const INDEX tiles = (N + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    const INDEX block = (INDEX)blockIdx.y * (INDEX)gridDim.x + (INDEX)blockIdx.x;
    const INDEX batch = block / tiles;
    if (batch >= batches) return;  // the last row of a two-dimensional grid may be short
    const INDEX i01 = batch / batch2, i2 = batch - i01 * batch2, i0 = i01 / batch1, i1 = i01 - i0 * batch1;
    const Work work = {
        (S*)c + batch * c_batch,
        (const S*)(SWAP ? other : input) + (i0 * a_batch0 + i1 * a_batch1 + i2 * a_batch2),
        (const S*)(SWAP ? input : other) + (i0 * b_batch0 + i1 * b_batch1 + i2 * b_batch2),
        a_m, a_k, b_k, b_n, c_m, c_n, M, N, K,
        {(T)alpha, (T)beta, (const S*)bias, bias_stride,
         (const S*)residual + (i0 * r_batch0 + i1 * r_batch1 + i2 * r_batch2), r_m, r_n},
    };
    multiply(work, (block - batch * tiles) * BLOCK_COLUMNS);
}
