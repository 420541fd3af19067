// One operand's Outer x Bk tile on its way from global memory through registers to shared memory.
//
// Outer is BM for the left operand, BN for the right one. Threads run along the operand's fast dimension, the one whose
// elements are neighbours in memory, so a warp's loads fall together whether or not the operand is transposed.
// Between load and store the tile is in registers: the next tile's loads are in flight while this one is multiplied.
#pragma once

#include "element.cuh"
#include "pack.cuh"

// KFast: k is the fast dimension; else the outer one. Width: elements a load moves, along the fast dimension.
// Unit: the fast dimension's stride is 1 (Width > 1 needs it). Index: int where every size and stride fits.
// KRows: the tile in shared memory is [outer][k], else [k][outer], `pitch` elements from row to row; it holds what is
// computed with, the complex conjugate with Conj.
template <
    typename E, int Outer, int Bk, int Threads, bool KFast, int Width, bool Unit, bool KRows, bool Conj, typename Index>
struct TileLoad {
    using S = typename Stored<E>::type;
    using T = typename Compute<E>::type;
    static constexpr int FAST = KFast ? Bk : Outer;
    static constexpr int SLOW = KFast ? Outer : Bk;
    // Wide loads that must be taken apart again: a thread takes all of a line, which uses up what memory sends, and its
    // stores lie beside those of the next lane.
    static constexpr bool SCATTERED = KRows != KFast;
    static constexpr bool ALONG = Width == 1 || !SCATTERED;  // threads run along the fast dimension, then the slow
    static constexpr int LOADS_FAST = FAST / Width, LOADS = LOADS_FAST * SLOW;
    static constexpr int LINE = ALONG ? LOADS_FAST : SLOW;              // threads side by side
    static constexpr int COUNT = (LOADS + Threads - 1) / Threads;       // loads of a thread
    static constexpr int ACROSS = LINE > Threads ? LINE / Threads : 1;  // of them in one line
    static constexpr int STEP = LINE > Threads ? 1 : Threads / LINE;    // lines from one of its lines to the next
    static_assert(FAST % Width == 0 && (LINE % Threads == 0 || Threads % LINE == 0), "threads must tile the lines");
    static_assert(LOADS % Threads == 0 || LOADS < Threads, "every thread has as many loads, or one at most");
    static_assert(Unit || Width == 1, "a wide load needs neighbours");

    // Scattered stores go down a column: this many elements between rows keep a warp's off one another's banks.
    static constexpr int PAD = SCATTERED && ALONG ? 4 : 0;

    using Registers = Pack<S, Width>[COUNT];

    // Where this thread's i-th load sits in the tile.
    static __device__ __forceinline__ int line_of(int i) { return threadIdx.x / LINE + i / ACROSS * STEP; }
    static __device__ __forceinline__ int place_in_line(int i) { return threadIdx.x % LINE + i % ACROSS * Threads; }
    static __device__ __forceinline__ int fast(int i) { return (ALONG ? place_in_line(i) : line_of(i)) * Width; }
    static __device__ __forceinline__ int slow(int i) { return ALONG ? line_of(i) : place_in_line(i); }
    static __device__ __forceinline__ bool mine() { return LOADS >= Threads || threadIdx.x < LOADS; }

    static __device__ __forceinline__ Index slow_of(Index outer, Index k) { return KFast ? outer : k; }
    static __device__ __forceinline__ Index fast_of(Index outer, Index k) { return KFast ? k : outer; }

    // An element's offset. Products with a stride are 64 bits wide even where Index is int, so that no offset can wrap.
    static __device__ __forceinline__ long long offset(int slow, int fast, Index outer_stride, Index k_stride) {
        const long long line = (long long)slow * slow_of(outer_stride, k_stride);
        return line + (Unit ? fast : (long long)fast * fast_of(outer_stride, k_stride));
    }

    // From the tile's first element to this thread's.
    static __device__ __forceinline__ long long start(Index outer_stride, Index k_stride) {
        return offset(slow(0), fast(0), outer_stride, k_stride);
    }

    // From this thread's first element to that of its i-th load: the same for every thread.
    static __device__ __forceinline__ long long step(int i, Index outer_stride, Index k_stride) {
        const int lines = i / ACROSS * STEP, places = i % ACROSS * Threads;
        return offset(ALONG ? lines : places, (ALONG ? places : lines) * Width, outer_stride, k_stride);
    }

    // A tile that lies wholly inside the operand; `from` is this thread's first element.
    static __device__ __forceinline__ void whole(Registers& r, const S* from, Index outer_stride, Index k_stride) {
        if (!mine()) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) r[i] = load_pack<Width>(from + step(i, outer_stride, k_stride));
    }

    // A tile that overhangs: outer_left and k_left elements are inside. Outside is zero, and is not read.
    // A wide load is wholly inside or outside: the host takes Width > 1 only where it divides the operand's size.
    static __device__ __forceinline__ void overhanging(
        Registers& r, const S* from, Index outer_stride, Index k_stride, Index outer_left, Index k_left) {
        if (!mine()) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool inside = slow(i) < slow_of(outer_left, k_left) && fast(i) < fast_of(outer_left, k_left);
            r[i] = Pack<S, Width>{};
            if (inside) r[i] = load_pack<Width>(from + step(i, outer_stride, k_stride));
        }
    }

    static __device__ __forceinline__ void store(T* tile, int pitch, const Registers& r) {
        if (!mine()) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            Pack<T, Width> x;
#pragma unroll
            for (int e = 0; e < Width; ++e) x.value[e] = conjugated<Conj>(computed<E>(r[i].value[e]));
            if constexpr (!SCATTERED) {
                store_pack(tile + slow(i) * pitch + fast(i), x);
            } else {
#pragma unroll
                for (int e = 0; e < Width; ++e) tile[(fast(i) + e) * pitch + slow(i)] = x.value[e];
            }
        }
    }
};
