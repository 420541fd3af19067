// conv_split_sum: what the splits of a convolution's sum left in the workspace, added up in order; bias and activation.
//
// Entry:    conv_split_sum(ELEMENT* c, const ELEMENT* workspace, const ELEMENT* bias, INDEX numel, INDEX splits,
//                          INDEX inner, INDEX channels, int has_bias)
// Shapes:   c [numel] dense, in any order of axes; workspace [splits][numel]; bias [channels], an element's channel being
//           (i / inner) % channels, or, where has_bias is 0, anything: it is not read
// Types:    ELEMENT = float, double, int, long long (integers wrap)
// Defines:  ELEMENT; THREADS a block; ITEMS elements a thread; INDEX = int where splits * numel fits 31 bits,
//           else long long; ACTIVATION (epilogue.cuh)
// Launch:   grid ceil(numel / (THREADS * ITEMS)), block THREADS
// Shared:   none
// Needs:    c does not overlap the workspace
// Sum:      over splits ascending: repeatable
// Host:     cudaops/ops/conv_plan.py
#include "epilogue.cuh"

using T = Compute<ELEMENT>::type;

// Whole: all of the block's elements are there, so nothing is tested one by one.
template <bool Whole>
__device__ __forceinline__ void add_up(ELEMENT* c, const ELEMENT* workspace, const ELEMENT* bias, INDEX first,
                                       INDEX numel, INDEX splits, INDEX inner, INDEX channels, int has_bias) {
    T sum[ITEMS] = {};
    const ELEMENT* part = workspace + first;
    for (INDEX split = 0; split < splits; ++split, part += numel) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (Whole || first + i * THREADS < numel) sum[i] += static_cast<T>(part[i * THREADS]);
    }
    if (has_bias) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (Whole || first + i * THREADS < numel)
                sum[i] += static_cast<T>(bias[(first + i * THREADS) / inner % channels]);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (Whole || first + i * THREADS < numel)
            c[first + i * THREADS] =
                static_cast<ELEMENT>(activate<static_cast<Activation>(ACTIVATION), ELEMENT>(sum[i]));
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_split_sum(
    ELEMENT* __restrict__ c, const ELEMENT* __restrict__ workspace, const ELEMENT* __restrict__ bias,
    const INDEX numel, const INDEX splits, const INDEX inner, const INDEX channels, const int has_bias) {
    const INDEX block = static_cast<INDEX>(blockIdx.x) * (THREADS * ITEMS), first = block + threadIdx.x;
    if (block + THREADS * ITEMS <= numel)
        add_up<true>(c, workspace, bias, first, numel, splits, inner, channels, has_bias);
    else
        add_up<false>(c, workspace, bias, first, numel, splits, inner, channels, has_bias);
}
