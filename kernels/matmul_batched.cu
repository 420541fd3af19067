// matmul_batched: c = a b, finished, for many small matrices: several a block, TILE x TILE outputs a thread.
//
// Entry:    matmul_batched(ELEMENT* c, const ELEMENT* input, const ELEMENT* other, const ELEMENT* bias,
//                          const ELEMENT* residual,
//                          INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX c_n, INDEX bias_stride,
//                          INDEX r_m, INDEX r_n,
//                          long long a_batch0, long long a_batch1, long long a_batch2,
//                          long long b_batch0, long long b_batch1, long long b_batch2,
//                          long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
//                          INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K,
//                          SCALAR alpha, SCALAR beta)
// Shapes:   as matmul_simt's, M <= TILE * THREADS_M, N <= TILE * THREADS_N
// Types:    ELEMENT = float, double, __half, __nv_bfloat16, float2, double2, signed char, unsigned char, short, int,
//           long long, COMPUTED as matmul_simt's
// Defines:  ELEMENT SCALAR INDEX A_CONJ B_CONJ BIAS ACTIVATION RESIDUAL SCALED SWAP as matmul_simt's;
//           TILE outputs of a thread each way, and elements of k at once; THREADS_M THREADS_N threads of a matrix;
//           MATRICES of a block;
//           A_K_FAST B_K_FAST 1: k is the dimension whose elements are neighbours, 0: m or n;
//           A_WIDTH B_WIDTH elements a load moves along it: TILE, then aligned and a divisor of the operand's size, or 1
// Launch:   grid ceil(batches / MATRICES), on x, y taking over beyond 2^31 - 1; block MATRICES * THREADS_M * THREADS_N
// Shared:   none
// Needs:    c does not overlap what is read
// Sum:      one accumulator an output, k ascending, one fused multiply-add each: the same bits as matmul_simt's
// Host:     cudaops/ops/matmul_plan.py, plan_matmul; cudaops/ops/linear.py, plan_linear
//
// Operands come straight from memory: they are read once from there, and the few threads that share an element find it
// in the first cache.
#include "epilogue.cuh"

using T = Compute<ELEMENT>::type;
using S = Stored<ELEMENT>::type;
using Finishing = Finish<ELEMENT, INDEX, (BiasAxis)BIAS, (Activation)ACTIVATION, RESIDUAL, SCALED>;

constexpr int THREADS = MATRICES * THREADS_M * THREADS_N;

// TILE of the outer dimension x TILE of k, as [k][outer]; what is outside is zero, and not read.
template <bool KFast, int Width, bool Conj>
__device__ __forceinline__ void load(
    T (&tile)[TILE][TILE], const S* from, INDEX outer_stride, INDEX k_stride, INDEX outer_left, INDEX k_left) {
    const INDEX slow_stride = KFast ? outer_stride : k_stride, fast_stride = KFast ? k_stride : outer_stride;
    const INDEX slow_left = KFast ? outer_left : k_left, fast_left = KFast ? k_left : outer_left;
#pragma unroll
    for (int slow = 0; slow < TILE; ++slow)
#pragma unroll
        for (int fast = 0; fast < TILE; fast += Width) {
            Pack<S, Width> x = {};
            if (slow < slow_left && fast < fast_left)
                x = load_pack<Width>(from + (long long)slow * slow_stride + (long long)fast * (Width > 1 ? 1 : fast_stride));
#pragma unroll
            for (int e = 0; e < Width; ++e)
                tile[KFast ? fast + e : slow][KFast ? slow : fast + e] = conjugated<Conj>(computed<ELEMENT>(x.value[e]));
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
matmul_batched(ELEMENT* __restrict__ c, const ELEMENT* __restrict__ input, const ELEMENT* __restrict__ other,
               const ELEMENT* __restrict__ bias, const ELEMENT* __restrict__ residual,
               INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX c_n, INDEX bias_stride,
               INDEX r_m, INDEX r_n, long long a_batch0, long long a_batch1, long long a_batch2,
               long long b_batch0, long long b_batch1, long long b_batch2,
               long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
               INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K, SCALAR alpha, SCALAR beta) {
    const int thread_n = threadIdx.x % THREADS_N, thread_m = threadIdx.x / THREADS_N % THREADS_M;
    const INDEX block = (INDEX)blockIdx.y * (INDEX)gridDim.x + (INDEX)blockIdx.x;
    const INDEX batch = block * MATRICES + (INDEX)(threadIdx.x / (THREADS_M * THREADS_N));
    const INDEX m0 = thread_m * TILE, n0 = thread_n * TILE;
    if (batch >= batches || m0 >= M || n0 >= N) return;

    const INDEX i01 = batch / batch2, i2 = batch - i01 * batch2, i0 = i01 / batch1, i1 = i01 - i0 * batch1;
    const S* a = (const S*)(SWAP ? other : input) + (i0 * a_batch0 + i1 * a_batch1 + i2 * a_batch2);
    const S* b = (const S*)(SWAP ? input : other) + (i0 * b_batch0 + i1 * b_batch1 + i2 * b_batch2);
    a += (long long)m0 * a_m;
    b += (long long)n0 * b_n;

    T acc[TILE][TILE] = {};
#pragma unroll 1
    for (INDEX k = 0; k < K; k += TILE) {
        T left[TILE][TILE], right[TILE][TILE];
        load<A_K_FAST, A_WIDTH, A_CONJ>(left, a, a_m, a_k, M - m0, K - k);
        load<B_K_FAST, B_WIDTH, B_CONJ>(right, b, b_n, b_k, N - n0, K - k);
#pragma unroll
        for (int e = 0; e < TILE; ++e)
#pragma unroll
            for (int i = 0; i < TILE; ++i)
#pragma unroll
                for (int j = 0; j < TILE; ++j) acc[i][j] = multiply_add(left[e][i], right[e][j], acc[i][j]);
        a += TILE * (long long)a_k;
        b += TILE * (long long)b_k;
    }

    const Finishing finish = {
        (T)alpha, (T)beta, (const S*)bias, bias_stride,
        (const S*)residual + (i0 * r_batch0 + i1 * r_batch1 + i2 * r_batch2), r_m, r_n};
    S* out = (S*)c + batch * c_batch;
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int j = 0; j < TILE; ++j) {
            const INDEX m = m0 + i, n = n0 + j;
            if (m >= M || n >= N) continue;
            T add = 0;
            if (BIAS) add = finish.bias_at(BIAS == 2 ? m : n);
            out[(long long)m * c_m + (long long)n * c_n] = finish(acc[i][j], add, m, n);
        }
}
