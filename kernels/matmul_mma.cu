// matmul_mma: c = a b, finished, batched, on the tensor cores: tiles come by asynchronous copies, STAGES deep.
//
// Entry:    matmul_mma(OUTPUT* c, const ELEMENT* input, const ELEMENT* other, const OUTPUT* bias,
//                      const OUTPUT* residual,
//                      INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX bias_stride,
//                      INDEX r_m, INDEX r_n,
//                      long long a_batch0, long long a_batch1, long long a_batch2,
//                      long long b_batch0, long long b_batch1, long long b_batch2,
//                      long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
//                      INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K, INDEX k_total,
//                      SCALAR alpha, SCALAR beta)
// Shapes:   as matmul_simt's
// Types:    ELEMENT = __half, __nv_bfloat16, float, signed char, unsigned char; a float is read as tf32: its top 19
//           bits. Accumulated in float, the last two in int. OUTPUT = ELEMENT, or as it is
//           accumulated
// Defines:  ELEMENT, OUTPUT what c, bias and residual are; SCALAR INDEX as matmul_simt's;
//           MULTIPLY f16, bf16, tf32, s8 or u8; BM BN the block's tile, of 64 x 64 a warp; STAGES tiles on their way;
//           MIN_BLOCKS that must fit an SM by registers;
//           A_K_FAST B_K_FAST 1: k is the dimension whose elements are neighbours; A_WIDTH B_WIDTH bytes copied at once
//           along it (4, 8, 16), then aligned and dividing the operand's size; 0: element by element;
//           C_WIDTH neighbours along n a store moves: 1, or 16 bytes' worth, which then divides N;
//           BIAS ACTIVATION SCALED RESIDUAL SPLIT as matmul_simt's
// Launch:   grid ceil(M / BM) * ceil(N / BN) * batches, on x, y taking over beyond 2^31 - 1;
//           block 32 * (BM / 64) * (BN / 64)
// Shared:   dynamic, STAGES * (BM + BN) * 64; STAGES >= 3
// Needs:    c does not overlap what is read; sm_80
// Sum:      32 bytes along k an instruction, inside which the order is the hardware's. Repeatable
// Host:     cudaops/ops/matmul_plan.py, plan_matmul; cudaops/ops/linear.py, plan_linear
#include "epilogue.cuh"
#include "mma_tile.cuh"
#include "raster.cuh"
#include "tile_copy.cuh"

constexpr int THREADS = 32 * (BM / 64) * (BN / 64);
using CopyA = TileCopy<ELEMENT, BM, THREADS, A_K_FAST, A_WIDTH, INDEX>;
using CopyB = TileCopy<ELEMENT, BN, THREADS, B_K_FAST, B_WIDTH, INDEX>;
using Tile = MmaTile<Multiply::MULTIPLY, BM, BN, CopyA::K_ROWS, CopyB::K_ROWS>;
using Finishing = Finish<OUTPUT, INDEX, (BiasAxis)BIAS, (Activation)ACTIVATION, RESIDUAL, SCALED>;
using E = Stored<ELEMENT>::type;
using Out = Stored<OUTPUT>::type;

static_assert(STAGES >= 3, "the outputs of a warp pass through the stages' memory");
constexpr int BK = CopyA::BK, A_BYTES = Tile::A::BYTES, STAGE_BYTES = A_BYTES + Tile::B::BYTES;

extern __shared__ __align__(128) char stages[];

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
matmul_mma(OUTPUT* __restrict__ c, const ELEMENT* __restrict__ input, const ELEMENT* __restrict__ other,
           const OUTPUT* __restrict__ bias, const OUTPUT* __restrict__ residual,
           INDEX a_m, INDEX a_k, INDEX b_k, INDEX b_n, INDEX c_m, INDEX bias_stride, INDEX r_m, INDEX r_n,
           long long a_batch0, long long a_batch1, long long a_batch2,
           long long b_batch0, long long b_batch1, long long b_batch2,
           long long r_batch0, long long r_batch1, long long r_batch2, long long c_batch,
           INDEX batch1, INDEX batch2, INDEX batches, INDEX M, INDEX N, INDEX K, INDEX k_total, SCALAR alpha,
           SCALAR beta) {
    const INDEX tiles_m = (M + BM - 1) / BM, tiles_n = (N + BN - 1) / BN;
    const INDEX block = (INDEX)blockIdx.y * (INDEX)gridDim.x + (INDEX)blockIdx.x;
    const INDEX batch = block / (tiles_m * tiles_n);
    if (batch >= batches) return;  // the last row of a two-dimensional grid may be short
    INDEX tile_m, tile_n;
    tile_of<8>(block - batch * (tiles_m * tiles_n), tiles_m, tiles_n, tile_m, tile_n);
    const INDEX m0 = tile_m * BM, n0 = tile_n * BN;

    const INDEX i01 = batch / batch2, i2 = batch - i01 * batch2, i0 = i01 / batch1, i1 = i01 - i0 * batch1;
    const INDEX k_end = SPLIT && k_total - i2 * K < K ? k_total - i2 * K : K;  // of this part of the sum
    const E* a = (const E*)input + (i0 * a_batch0 + i1 * a_batch1 + i2 * a_batch2);
    const E* b = (const E*)other + (i0 * b_batch0 + i1 * b_batch1 + i2 * b_batch2);
    a += (long long)m0 * a_m;
    b += (long long)n0 * b_n;

    // Steps are begun STAGES - 1 ahead. A step beyond the end copies nothing, but counts as a group all the same.
    const INDEX steps = (k_end + BK - 1) / BK;
    INDEX begun = 0;
    const auto begin_step = [&] {
        if (begun < steps) {
            char* stage = stages + (unsigned)begun % STAGES * STAGE_BYTES;
            CopyA::copy(stage, a, a_m, a_k, M - m0, k_end - begun * BK);
            CopyB::copy(stage + A_BYTES, b, b_n, b_k, N - n0, k_end - begun * BK);
            a += BK * (long long)a_k;
            b += BK * (long long)b_k;
        }
        commit_copies();
        ++begun;
    };
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) begin_step();

    Tile::Accumulators acc = {};
#pragma unroll 1
    for (INDEX step = 0; step < steps; ++step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // what this step needs is there for all, and what the one before read is free
        begin_step();
        const unsigned stage = shared_address(stages) + (unsigned)step % STAGES * STAGE_BYTES;
        Tile::multiply(acc, stage, stage + A_BYTES);
    }

    const Finishing finish = Finishing{
        (Finishing::T)alpha, (Finishing::T)beta, (const Out*)bias, bias_stride,
        (const Out*)residual + (i0 * r_batch0 + i1 * r_batch1 + i2 * r_batch2), r_m, r_n}.moved(m0, n0);
    __syncthreads();  // every warp has read its last tiles
    Out* tile = (Out*)c + (batch * c_batch + (long long)m0 * c_m + n0);
    store_tile_staged<Tile, C_WIDTH, OUTPUT>(acc, (Tile::T*)stages, tile, c_m, finish, M - m0, N - n0);
}
