// The product of two tiles in shared memory by the tensor cores: 64 x 64 outputs a warp.
//
// A row of a tile is 64 bytes along k, in four chunks of 16: 32 halves, 16 tf32 or 64 bytes, always two steps of mma.
// Chunk c of row r sits at c ^ (r / 2 % 4), so that eight rows read at once lie in different banks. An operand whose
// outer dimension is the fast one can also lie as [k][outer] (halves only, which ldmatrix can turn round): there chunk c
// of row k sits at c ^ (k % 8).
#pragma once

#include "element.cuh"
#include "pack.cuh"

// One instruction's worth of k is 32 bytes for every type, so that only the instruction differs.
enum class Multiply { f16, bf16, tf32, s8, u8 };

template <Multiply Which> struct Accumulator { using type = float; };
template <> struct Accumulator<Multiply::s8> { using type = int; };
template <> struct Accumulator<Multiply::u8> { using type = int; };

template <Multiply Which, typename T>
__device__ __forceinline__ void multiply_add(T (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#define MMA(shape, types, constraint)                                                                                 \
    asm("mma.sync.aligned." shape ".row.col." types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : constraint(c[0]), constraint(c[1]), constraint(c[2]), constraint(c[3])                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (Which == Multiply::f16) MMA("m16n8k16", "f32.f16.f16.f32", "+f");
    else if constexpr (Which == Multiply::bf16) MMA("m16n8k16", "f32.bf16.bf16.f32", "+f");
    else if constexpr (Which == Multiply::tf32) MMA("m16n8k8", "f32.tf32.tf32.f32", "+f");
    else if constexpr (Which == Multiply::s8) MMA("m16n8k32", "s32.s8.s8.s32", "+r");
    else MMA("m16n8k32", "s32.u8.u8.s32", "+r");
#undef MMA
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

template <bool Turn>
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned from) {
    if constexpr (Turn)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

constexpr int ROW_BYTES = 64, CHUNK = 16, ROW_CHUNKS = ROW_BYTES / CHUNK;

// An operand's tile in shared memory, Outer x 64 bytes of k. KRows: [outer][k], else [k][outer] of halves.
template <int Outer, bool KRows>
struct MmaOperand {
    static constexpr int PITCH = KRows ? ROW_BYTES : 2 * Outer;
    static constexpr int BYTES = Outer * ROW_BYTES;

    // Where 16-byte chunk `chunk` of a row sits in the tile.
    static __device__ __forceinline__ int place(int row, int chunk) {
        return row * PITCH + ((KRows ? chunk ^ (row / 2 % ROW_CHUNKS) : chunk ^ (row % 8)) * CHUNK);
    }

    // Four 8 x 16-byte matrices: 16 of the outer dimension x 32 bytes of k, for all steps of the tile. The lane's row is
    // the same in each, so that its swizzle is: `outer` is a multiple of 16, and only adds.
    // OuterFirst: the matrices go along the outer dimension first (A), else along k (B).
    template <bool OuterFirst>
    static __device__ __forceinline__ void load(unsigned (&r)[4], unsigned tile, int outer, int step) {
        const int lane = threadIdx.x % 32, inside = lane % 8, first = lane / 8 % 2, second = lane / 16;
        const int along_outer = OuterFirst ? first : second, along_k = OuterFirst ? second : first;
        if constexpr (KRows) {
            load_matrices<false>(r, tile + place(along_outer * 8 + inside, step * 2 + along_k) + outer * PITCH);
        } else {
            const int k = along_k * 8 + inside;  // 16 halves a step
            load_matrices<true>(r, tile + place(k, outer / 8 + along_outer) + step * 16 * PITCH);
        }
    }
};

template <Multiply Which, int Bm, int Bn, bool AKRows, bool BKRows>
struct MmaTile {
    using A = MmaOperand<Bm, AKRows>;
    using B = MmaOperand<Bn, BKRows>;
    static constexpr int WARP_M = 64, WARP_N = 64, WARPS_N = Bn / WARP_N;
    static constexpr int THREADS = 32 * (Bm / WARP_M) * WARPS_N;

    using T = typename Accumulator<Which>::type;
    using Accumulators = T[WARP_M / 16][WARP_N / 8][4];

    // The warp's outputs in the block.
    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / WARPS_N * WARP_M; }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % WARPS_N * WARP_N; }

    // STAGED_ROWS of them, from row `first` on, row by row to shared memory. The pitch keeps a warp's stores off one
    // another's banks; all warps' rows take no more than three stages of the tiles did.
    static constexpr int STAGED_ROWS = 32, STAGED_PITCH = WARP_N + 8;
    static __device__ __forceinline__ void stage(const Accumulators& acc, T* to, int first) {
        const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < STAGED_ROWS / 16; ++i)
#pragma unroll
            for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const T* pair = acc[first / 16 + i][j] + half * 2;
                    store_pack(to + (i * 16 + half * 8 + row) * STAGED_PITCH + j * 8 + column, Pack<T, 2>{pair[0], pair[1]});
                }
    }

    static __device__ __forceinline__ void multiply(Accumulators& acc, unsigned a_tile, unsigned b_tile) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            unsigned a[WARP_M / 16][4], b[WARP_N / 16][4];
#pragma unroll
            for (int i = 0; i < WARP_M / 16; ++i) A::template load<true>(a[i], a_tile, warp_row() + i * 16, step);
#pragma unroll
            for (int j = 0; j < WARP_N / 16; ++j) B::template load<false>(b[j], b_tile, warp_column() + j * 16, step);
#pragma unroll
            for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
                for (int j = 0; j < WARP_N / 8; ++j) {
                    const unsigned pair[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                    multiply_add<Which>(acc[i][j], a[i], pair);
                }
        }
    }
};
