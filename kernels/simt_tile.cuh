// The product of two tiles in shared memory, accumulated in registers: Tm x Tn outputs a thread.
//
// A warp covers LANES_M * Tm rows and LanesN * Tn columns of the block's Bm x Bn. With LanesN = 32 it spans rows: all
// lanes need the same elements of A, a broadcast 16 bytes wide, and each its own of B, 8 bytes beside the next lane's,
// free of bank conflicts. (16 bytes of B would save one shared load in six; the emulator would spend that several times
// over on sorting them into registers.)
#pragma once

#include "arithmetic.cuh"
#include "pack.cuh"

// AKRows: A is [Bm][APitch] with k along the row; else [Bk][APitch] with m along it. B is [Bk][BPitch].
template <typename T, int Bm, int Bn, int Bk, int Tm, int Tn, int LanesN, bool AKRows, int APitch, int BPitch>
struct SimtTile {
    static constexpr int W = PACK_WIDTH<T>;     // of A along k, or along m where A is [k][m]
    static constexpr int RUN = W > 1 ? W / 2 : 1;  // columns a lane holds side by side
    static constexpr int LANES_M = 32 / LanesN;
    static constexpr int WARP_M = LANES_M * Tm, WARP_N = LanesN * Tn;
    static constexpr int WARPS_M = Bm / WARP_M, WARPS_N = Bn / WARP_N;
    // Steps of W along k that are unrolled: 8 k, or 4 where that is 512 multiply-adds already. With more the compiler
    // starts so many shared loads ahead that it spills.
    static constexpr int UNROLL = (Tm * Tn < 128 ? 8 : 4) / W;
    static constexpr int ROW_RUN = AKRows ? 1 : W;  // rows a lane holds side by side: those of one load of A
    static_assert(Bm % WARP_M == 0 && Bn % WARP_N == 0, "warps must tile the block");
    static_assert(Tn % RUN == 0 && Bk % W == 0 && Tm % ROW_RUN == 0, "registers must hold whole packs");
    static_assert(APitch % W == 0 && BPitch % RUN == 0, "rows must start aligned");

    static constexpr int M = Tm, N = Tn;
    using Accumulators = T[Tm][Tn];

    // Row and column in the block of accumulator [i][j]. Lanes interleave, so that what a warp reads at once is dense.
    static __device__ __forceinline__ int row(int i) {
        const int warp_m = threadIdx.x / 32 / WARPS_N, lane_m = threadIdx.x % 32 / LanesN;
        return warp_m * WARP_M + i / ROW_RUN * (LANES_M * ROW_RUN) + lane_m * ROW_RUN + i % ROW_RUN;
    }
    static __device__ __forceinline__ int column(int j) {
        const int warp_n = threadIdx.x / 32 % WARPS_N, lane_n = threadIdx.x % LanesN;
        return warp_n * WARP_N + j / RUN * (LanesN * RUN) + lane_n * RUN + j % RUN;
    }

    static __device__ __forceinline__ void multiply(Accumulators& acc, const T* a_tile, const T* b_tile) {
#pragma unroll UNROLL
        for (int k = 0; k < Bk; k += W) {
            Pack<T, RUN> b[W][Tn / RUN];
#pragma unroll
            for (int e = 0; e < W; ++e)
#pragma unroll
                for (int j = 0; j < Tn; j += RUN) {
                    b[e][j / RUN] = load_pack<RUN>(b_tile + (k + e) * BPitch + column(j));
                }
            if constexpr (AKRows) {
#pragma unroll
                for (int i = 0; i < Tm; ++i) {
                    const Pack<T, W> a = load_pack<W>(a_tile + row(i) * APitch + k);
#pragma unroll
                    for (int e = 0; e < W; ++e) add_row(acc[i], a.value[e], b[e]);
                }
            } else {
#pragma unroll
                for (int e = 0; e < W; ++e)
#pragma unroll
                    for (int i = 0; i < Tm; i += W) {
                        const Pack<T, W> a = load_pack<W>(a_tile + (k + e) * APitch + row(i));
#pragma unroll
                        for (int r = 0; r < W; ++r) add_row(acc[i + r], a.value[r], b[e]);
                    }
            }
        }
    }

    static __device__ __forceinline__ void add_row(T (&acc)[Tn], T a, const Pack<T, RUN> (&b)[Tn / RUN]) {
#pragma unroll
        for (int j = 0; j < Tn; ++j) acc[j] = multiply_add(a, b[j / RUN].value[j % RUN], acc[j]);
    }
};
