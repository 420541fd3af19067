// One operand's tile on its way from global to shared memory for the tensor cores (mma_tile.cuh says how it lies there).
//
// Where neighbours in memory are neighbours in the tile it is copied asynchronously, 4, 8 or 16 bytes at once. Else it
// goes through registers: words and bytes whose outer dimension is the fast one are turned round four by four, and what
// is strided or not aligned goes one by one.
#pragma once

#include "element.cuh"
#include "mma_tile.cuh"
#include "pack.cuh"

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Newest>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory"); }

// Bytes beyond the operand are zeros, and are not read.
template <int Bytes>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool inside) {
    const int there = inside ? Bytes : 0;
    if constexpr (Bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     ::"r"(to), "l"(from), "n"(Bytes), "r"(there) : "memory");
}

// KFast: k is the dimension whose elements are neighbours; Width: bytes at once along it, 0: one element, whatever its
// strides. Index: int where every size and stride fits.
template <typename E, int Outer, int Threads, bool KFast, int Width, typename Index>
struct TileCopy {
    using S = typename Stored<E>::type;
    static constexpr int SIZE = sizeof(S), BK = ROW_BYTES / SIZE;
    static constexpr bool K_ROWS = KFast || SIZE != 2;
    static constexpr bool ASYNC = Width > 0 && K_ROWS == KFast;
    static constexpr bool TURNED = Width == 4 * SIZE && !KFast && SIZE != 2;
    using Operand = MmaOperand<Outer, K_ROWS>;

    // In elements along the fast dimension, and lines of them.
    static constexpr int FAST = KFast ? BK : Outer, SLOW = KFast ? Outer : BK;
    static constexpr int AT_ONCE = Width > 0 ? Width / SIZE : 1;
    static constexpr int LINE = FAST / AT_ONCE;
    static constexpr int LINES_AT_ONCE = TURNED ? AT_ONCE : 1;
    static constexpr int PIECES = LINE * (SLOW / LINES_AT_ONCE), COUNT = (PIECES + Threads - 1) / Threads;
    // Unrolled, what stays the same from tile to tile is kept in registers, which many pieces would use up; and turning
    // takes many by itself.
    static constexpr int UNROLL = TURNED ? 1 : COUNT <= 8 ? COUNT : 4;
    static_assert(PIECES % Threads == 0 || PIECES < Threads, "every thread has as many pieces, or one at most");
    static_assert(Threads % LINE == 0 || LINE % Threads == 0, "threads must tile the lines");

    // Piece i of this thread: its line, and its first element there.
    static __device__ __forceinline__ int slow(int i) { return (threadIdx.x + i * Threads) / LINE * LINES_AT_ONCE; }
    static __device__ __forceinline__ int fast(int i) { return (threadIdx.x + i * Threads) % LINE * AT_ONCE; }
    static __device__ __forceinline__ int place(int outer, int k) {
        const int row = K_ROWS ? outer : k, byte = (K_ROWS ? k : outer) * SIZE;
        return Operand::place(row, byte / CHUNK) + byte % CHUNK;
    }

    // The tile at `from`, of which outer_left x k_left elements are inside; the rest is zero and is not read.
    static __device__ __forceinline__ void copy(
        char* tile, const S* from, Index outer_stride, Index k_stride, Index outer_left, Index k_left) {
        if (PIECES < Threads && threadIdx.x >= PIECES) return;
        const Index slow_left = KFast ? outer_left : k_left, fast_left = KFast ? k_left : outer_left;
        const Index slow_stride = KFast ? outer_stride : k_stride, fast_stride = KFast ? k_stride : outer_stride;
        if constexpr (ASYNC) {
#pragma unroll UNROLL
            for (int i = 0; i < COUNT; ++i) {
                const bool inside = slow(i) < slow_left && fast(i) < fast_left;
                const S* piece = from + (long long)slow(i) * slow_stride + fast(i);
                const int to = KFast ? place(slow(i), fast(i)) : place(fast(i), slow(i));
                copy_async<Width>(shared_address(tile + to), inside ? piece : from, inside);
            }
        } else if constexpr (TURNED) {
#pragma unroll UNROLL
            for (int i = 0; i < COUNT; ++i) {
                Pack<S, 4> line[4];
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    line[l] = Pack<S, 4>{};
                    if (slow(i) + l < slow_left && fast(i) < fast_left)
                        line[l] = load_pack<4>(from + (long long)(slow(i) + l) * slow_stride + fast(i));
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Pack<S, 4> turned = {line[0].value[e], line[1].value[e], line[2].value[e], line[3].value[e]};
                    store_pack((S*)(tile + place(fast(i) + e, slow(i))), turned);
                }
            }
        } else {
#pragma unroll UNROLL
            for (int i = 0; i < COUNT; ++i) {
                S x = 0;
                if (slow(i) < slow_left && fast(i) < fast_left)
                    x = from[(long long)slow(i) * slow_stride + (long long)fast(i) * fast_stride];
                *(S*)(tile + (KFast ? place(slow(i), fast(i)) : place(fast(i), slow(i)))) = x;
            }
        }
    }
};
