// matmul_split_sum: c = the parts of a split product added up in order, finished.
//
// Entry:    matmul_split_sum(ELEMENT* c, const PARTIAL* parts, const ELEMENT* bias, const ELEMENT* residual,
//                            INDEX bias_stride, INDEX r_m, INDEX r_n,
//                            long long r_batch0, long long r_batch1, long long r_batch2,
//                            INDEX batch1, INDEX batch2, INDEX M, INDEX N, INDEX splits, long long outputs,
//                            SCALAR alpha, SCALAR beta)
// Shapes:   c [batches][M][N] and parts [batches][splits][M][N] contiguous, outputs = batches * M * N; bias [N] and
//           residual [batches][M][N] as matmul_simt's
// Types:    ELEMENT = float, double, __half, __nv_bfloat16, float2, double2, signed char, unsigned char, short, int,
//           long long; PARTIAL what its products are accumulated in: float, double, float2, double2, int, long long
// Defines:  ELEMENT PARTIAL SCALAR; INDEX = int where every size and stride fits 31 bits, else long long;
//           BIAS 0 none, 1 along n; ACTIVATION RESIDUAL SCALED as matmul_simt's
// Launch:   grid ceil(outputs / 256), on x, y taking over beyond 2^31 - 1; block 256
// Shared:   none
// Needs:    c does not overlap what is read
// Sum:      the parts in order: repeatable
// Host:     cudaops/ops/matmul_plan.py, plan_product
#include "epilogue.cuh"

using T = Compute<ELEMENT>::type;
using Out = Stored<ELEMENT>::type;
using Part = Stored<PARTIAL>::type;
using Finishing = Finish<ELEMENT, INDEX, (BiasAxis)BIAS, (Activation)ACTIVATION, RESIDUAL, SCALED>;

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
matmul_split_sum(ELEMENT* __restrict__ c, const PARTIAL* __restrict__ parts, const ELEMENT* __restrict__ bias,
                 const ELEMENT* __restrict__ residual, INDEX bias_stride, INDEX r_m, INDEX r_n,
                 long long r_batch0, long long r_batch1, long long r_batch2, INDEX batch1, INDEX batch2,
                 INDEX M, INDEX N, INDEX splits, long long outputs, SCALAR alpha, SCALAR beta) {
    const long long block = (long long)blockIdx.y * gridDim.x + blockIdx.x, i = block * THREADS + threadIdx.x;
    if (i >= outputs) return;
    const long long matrix = (long long)M * N, batch = i / matrix, inside = i - batch * matrix;
    const INDEX m = (INDEX)(inside / N), n = (INDEX)(inside - (long long)m * N);
    const Part* part = (const Part*)parts + batch * splits * matrix + inside;
    T sum = computed<PARTIAL>(*part);
    for (INDEX s = 1; s < splits; ++s) sum += computed<PARTIAL>(part[s * matrix]);

    const long long i01 = batch / batch2, i2 = batch - i01 * batch2, i0 = i01 / batch1, i1 = i01 - i0 * batch1;
    const Finishing finish = {
        (T)alpha, (T)beta, (const Out*)bias, bias_stride,
        (const Out*)residual + (i0 * r_batch0 + i1 * r_batch1 + i2 * r_batch2), r_m, r_n};
    T add = 0;
    if (BIAS) add = finish.bias_at(n);
    ((Out*)c)[i] = finish(sum, add, m, n);
}
