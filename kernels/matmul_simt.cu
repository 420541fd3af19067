// matmul_simt: c = a b, finished, batched, on the ordinary cores: tiles in shared memory, TM x TN outputs a thread.
//
// Entry:    matmul_simt(OUTPUT* c, const ELEMENT* input, const ELEMENT* other, const OUTPUT* bias,
//                       const OUTPUT* residual,
//                       INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX c_n, INDEX bias_stride,
//                       INDEX r_m, INDEX r_n,
//                       long long a_batch0, long long a_batch1, long long a_batch2,
//                       long long b_batch0, long long b_batch1, long long b_batch2,
//                       long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
//                       INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K, INDEX k_total,
//                       SCALAR alpha, SCALAR beta)
// Shapes:   c [batches][M][N], a [batches][M][K], b [batches][K][N], bias [N] or [M], residual [batches][M][N], at any
//           strides, in elements; where BIAS or RESIDUAL is 0 that tensor is anything: it is not read. A batch index is
//           read as (i0, i1, i2) of sizes (., batch1, batch2); a broadcast dimension has stride 0. K = 0 adds up nothing
// Types:    ELEMENT = float, double, __half, __nv_bfloat16, float2, double2, signed char, unsigned char, short, int,
//           long long; float2 and double2 are complex numbers. COMPUTED is what it is computed in: halves in float,
//           integers unsigned in 32 or 64 bits, of which the low ones are stored (they wrap). OUTPUT = ELEMENT, or as
//           wide as COMPUTED
// Defines:  ELEMENT; OUTPUT what c, bias and residual are; SCALAR what alpha and beta are: float, double or long long;
//           INDEX = int where every size, stride and the number of blocks fits 31 bits, else long long;
//           BM BN BK the block's tile, TM x TN outputs a thread, LANES_N lanes of a warp along n (32: it spans rows);
//           MIN_BLOCKS that must fit an SM by registers;
//           A_K_FAST B_K_FAST 1: loads run along k, 0: along m or n; A_UNIT B_UNIT 1: at stride 1 there;
//           A_WIDTH B_WIDTH elements a load moves: 1, or what fills 16 bytes as computed, then aligned and a divisor of
//           the operand's size; C_WIDTH likewise for stores along n; A_CONJ B_CONJ 1: of the conjugate;
//           BIAS 0 none, 1 along n, 2 along m; ACTIVATION (epilogue.cuh); RESIDUAL 1: there is one; SCALED 1: alpha and
//           beta count; SWAP 0: a is input and b is other, 1: exchanged, as the host does (c^T = b^T a^T) where n would
//           be short; SPLIT 1: the last of the batch's dimensions, of size batch2, are parts of a sum over k_total, each
//           of K but the last
// Launch:   grid ceil(M / BM) * ceil(N / BN) * batches, on x, y taking over beyond 2^31 - 1;
//           block 32 * (BM / (32 / LANES_N * TM)) * (BN / (LANES_N * TN))
// Shared:   static, 2 * (sizeof(COMPUTED) * ((BM + BN) * BK + B_K_FAST * (B_WIDTH == 1) * 4 * BK)
//           + 16 * A_K_FAST * (LANES_N < 32) * BM)
// Needs:    c does not overlap a, b or bias
// Sum:      one accumulator an output, k ascending, one fused multiply-add each: the same bits with every configuration
// Host:     cudaops/ops/matmul_plan.py, plan_matmul; cudaops/ops/linear.py, plan_linear
#include "epilogue.cuh"
#include "raster.cuh"
#include "simt_tile.cuh"
#include "tile_load.cuh"

using T = Compute<ELEMENT>::type;
using S = Stored<ELEMENT>::type;
using Out = Stored<OUTPUT>::type;

constexpr int THREADS = 32 * (BM / (32 / LANES_N * TM)) * (BN / (LANES_N * TN));
using LoadA = TileLoad<ELEMENT, BM, BK, THREADS, A_K_FAST, A_WIDTH, A_UNIT, A_K_FAST, A_CONJ, INDEX>;
using LoadB = TileLoad<ELEMENT, BN, BK, THREADS, B_K_FAST, B_WIDTH, B_UNIT, false, B_CONJ, INDEX>;

// A keeps the order it has in memory, so its stores are never scattered; its rows are apart where lanes read several.
constexpr int A_PITCH = A_K_FAST ? BK + (LANES_N < 32 ? PACK_WIDTH<T> : 0) : BM;
constexpr int B_PITCH = BN + LoadB::PAD;
constexpr int A_TILE = (A_K_FAST ? BM : BK) * A_PITCH;
constexpr int B_TILE = BK * B_PITCH;

using Tile = SimtTile<T, BM, BN, BK, TM, TN, LANES_N, A_K_FAST, A_PITCH, B_PITCH>;
using Finishing = Finish<OUTPUT, INDEX, (BiasAxis)BIAS, (Activation)ACTIVATION, RESIDUAL, SCALED>;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
matmul_simt(OUTPUT* __restrict__ c, const ELEMENT* __restrict__ input, const ELEMENT* __restrict__ other,
            const OUTPUT* __restrict__ bias, const OUTPUT* __restrict__ residual,
            INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX c_n, INDEX bias_stride, INDEX r_m, INDEX r_n,
            long long a_batch0, long long a_batch1, long long a_batch2,
            long long b_batch0, long long b_batch1, long long b_batch2,
            long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
            INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K, INDEX k_total, SCALAR alpha,
            SCALAR beta) {
    alignas(16) __shared__ T a_tiles[2][A_TILE];
    alignas(16) __shared__ T b_tiles[2][B_TILE];

    const INDEX tiles_m = (M + BM - 1) / BM, tiles_n = (N + BN - 1) / BN;
    const INDEX block = (INDEX)blockIdx.y * (INDEX)gridDim.x + (INDEX)blockIdx.x;
    const INDEX batch = block / (tiles_m * tiles_n);
    if (batch >= batches) return;  // the last row of a two-dimensional grid may be short
    INDEX tile_m, tile_n;
    tile_of<8>(block - batch * (tiles_m * tiles_n), tiles_m, tiles_n, tile_m, tile_n);
    const INDEX m0 = tile_m * BM, n0 = tile_n * BN;
    const bool interior = M - m0 >= BM && N - n0 >= BN;

    const INDEX i01 = batch / batch2, i2 = batch - i01 * batch2, i0 = i01 / batch1, i1 = i01 - i0 * batch1;
    const INDEX k_end = SPLIT && k_total - i2 * K < K ? k_total - i2 * K : K;  // of this part of the sum
    const S* a = (const S*)(SWAP ? other : input) + (i0 * a_batch0 + i1 * a_batch1 + i2 * a_batch2);
    const S* b = (const S*)(SWAP ? input : other) + (i0 * b_batch0 + i1 * b_batch1 + i2 * b_batch2);
    a += (long long)m0 * a_m + LoadA::start(a_m, a_k);
    b += (long long)n0 * b_n + LoadB::start(b_n, b_k);

    T acc[TM][TN] = {};
    typename LoadA::Registers next_a;
    typename LoadB::Registers next_b;
    // Each turn loads step k0 into registers, multiplies the step before it, then puts k0 where the one before was: two
    // buffers, one barrier a step, and the loads have a whole multiplication's time to arrive.
    // (The buffer is masked out of k0, not toggled, so that its range can be read off the code.)
#pragma unroll 1
    for (INDEX k0 = 0;; k0 += BK) {
        if (k0 < k_end) {
            if (interior && k_end - k0 >= BK) {
                LoadA::whole(next_a, a, a_m, a_k);
                LoadB::whole(next_b, b, b_n, b_k);
            } else {
                LoadA::overhanging(next_a, a, a_m, a_k, M - m0, k_end - k0);
                LoadB::overhanging(next_b, b, b_n, b_k, N - n0, k_end - k0);
            }
            a += BK * (long long)a_k;
            b += BK * (long long)b_k;
        }
        const int stage = (int)(k0 / BK & 1);
        if (k0 > 0) Tile::multiply(acc, a_tiles[stage ^ 1], b_tiles[stage ^ 1]);
        if (k0 >= k_end) break;
        LoadA::store(a_tiles[stage], A_PITCH, next_a);
        LoadB::store(b_tiles[stage], B_PITCH, next_b);
        __syncthreads();
    }

    const Finishing finish = Finishing{
        (T)alpha, (T)beta, (const Out*)bias, bias_stride,
        (const Out*)residual + (i0 * r_batch0 + i1 * r_batch1 + i2 * r_batch2), r_m, r_n}.moved(m0, n0);
    Out* tile = (Out*)c + (batch * c_batch + (long long)m0 * c_m + (long long)n0 * c_n);
    if (interior) {
        store_tile<true, Tile, C_WIDTH, OUTPUT>(acc, tile, c_m, c_n, finish, M - m0, N - n0);
    } else {
        store_tile<false, Tile, C_WIDTH, OUTPUT>(acc, tile, c_m, c_n, finish, M - m0, N - n0);
    }
}
