// One operand's Outer x Bk tile on its way from global memory through registers to shared memory.
//
// Outer is BM for the left operand, BN for the right one. Threads run along the operand's fast dimension, the one whose
// elements are neighbours in memory, so a warp's loads fall together whether or not the operand is transposed.
// Between load and store the tile is in registers: the next tile's loads are in flight while this one is multiplied.
#pragma once

#include "pack.cuh"

// KFast: k is the fast dimension; else the outer one. Width: elements a load moves, along the fast dimension.
// Unit: the fast dimension's stride is 1 (Width > 1 needs it). Index: int where every size and stride fits.
template <typename T, int Outer, int Bk, int Threads, bool KFast, int Width, bool Unit, typename Index>
struct TileLoad {
    static constexpr int FAST = KFast ? Bk : Outer;
    static constexpr int SLOW = KFast ? Outer : Bk;
    static constexpr int LINE = FAST / Width;  // loads that cover a line of the fast dimension
    static constexpr int LOADS = LINE * SLOW;
    static constexpr int COUNT = (LOADS + Threads - 1) / Threads;   // loads of a thread
    static constexpr int ACROSS = LINE > Threads ? LINE / Threads : 1;  // of them in one line
    static constexpr int STEP = LINE > Threads ? 1 : Threads / LINE;    // lines from one of its lines to the next
    static_assert(FAST % Width == 0 && (LINE % Threads == 0 || Threads % LINE == 0), "threads must tile the lines");
    static_assert(LOADS % Threads == 0 || LOADS < Threads, "every thread has as many loads, or one at most");
    static_assert(Unit || Width == 1, "a wide load needs neighbours");

    using Registers = Pack<T, Width>[COUNT];

    // Where this thread's i-th load sits in the tile.
    static __device__ __forceinline__ int fast(int i) { return (threadIdx.x % LINE + i % ACROSS * Threads) * Width; }
    static __device__ __forceinline__ int slow(int i) { return threadIdx.x / LINE + i / ACROSS * STEP; }
    static __device__ __forceinline__ bool mine() { return LOADS >= Threads || threadIdx.x < LOADS; }

    static __device__ __forceinline__ Index slow_of(Index outer, Index k) { return KFast ? outer : k; }
    static __device__ __forceinline__ Index fast_of(Index outer, Index k) { return KFast ? k : outer; }

    // From the tile's first element to this thread's. Products with a stride are 64 bits wide even where Index is int, so
    // that no offset can wrap.
    static __device__ __forceinline__ long long start(Index outer_stride, Index k_stride) {
        const long long line = (long long)slow(0) * slow_of(outer_stride, k_stride);
        return line + (Unit ? fast(0) : (long long)fast(0) * fast_of(outer_stride, k_stride));
    }

    // From this thread's first element to that of its i-th load: the same for every thread.
    static __device__ __forceinline__ long long offset(int i, Index outer_stride, Index k_stride) {
        const int along = i % ACROSS * Threads * Width;
        const long long line = (long long)(i / ACROSS * STEP) * slow_of(outer_stride, k_stride);
        return line + (Unit ? along : (long long)along * fast_of(outer_stride, k_stride));
    }

    // A tile that lies wholly inside the operand; `from` is this thread's first element.
    static __device__ __forceinline__ void whole(Registers& r, const T* from, Index outer_stride, Index k_stride) {
        if (!mine()) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) r[i] = load_pack<Width>(from + offset(i, outer_stride, k_stride));
    }

    // A tile that overhangs: outer_left and k_left elements are inside. Outside is zero, and is not read.
    // A wide load is wholly inside or outside: the host takes Width > 1 only where it divides the operand's size.
    static __device__ __forceinline__ void overhanging(
        Registers& r, const T* from, Index outer_stride, Index k_stride, Index outer_left, Index k_left) {
        if (!mine()) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool inside = slow(i) < slow_of(outer_left, k_left) && fast(i) < fast_of(outer_left, k_left);
            r[i] = Pack<T, Width>{};
            if (inside) r[i] = load_pack<Width>(from + offset(i, outer_stride, k_stride));
        }
    }

    // To shared memory laid out [outer][k] (KRows) or [k][outer], `pitch` elements from row to row.
    template <bool KRows>
    static __device__ __forceinline__ void store(T* tile, int pitch, const Registers& r) {
        if (!mine()) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if constexpr (KRows == KFast) {
                store_pack(tile + slow(i) * pitch + fast(i), r[i]);
            } else {
#pragma unroll
                for (int e = 0; e < Width; ++e) tile[(fast(i) + e) * pitch + slow(i)] = r[i].value[e];
            }
        }
    }
};
