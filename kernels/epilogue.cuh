// From accumulators to the output: bias, activation, store.
#pragma once

#include "arithmetic.cuh"
#include "pack.cuh"

enum class BiasAxis { none, columns, rows };
enum class Activation { none, relu };

// NaN passes, as in torch. (An integer comes here unsigned, so its sign is looked at in its own type.)
template <Activation Which, typename Element, typename T>
__device__ __forceinline__ T activate(T x) {
    if constexpr (Which == Activation::relu) return (Element)x <= (Element)0 ? (T)0 : x;
    return x;
}

// Tile says where accumulator [i][j] sits in the block's tile (SimtTile). Width: neighbouring columns a store moves;
// above 1 the columns' stride is 1, and the host knows Width to divide their number.
template <typename Tile, typename Element, int Width, BiasAxis Bias, Activation Which>
struct Epilogue {
    using T = typename Compute<Element>::type;

    // c and bias point to the tile's first element; rows_left x columns_left of it are inside. Interior: all.
    template <bool Interior, typename Index>
    static __device__ __forceinline__ void store(
        const typename Tile::Accumulators& acc, T* c, Index c_m, Index c_n, const T* bias, Index bias_stride,
        Index rows_left, Index columns_left) {
        T column_bias[Tile::N] = {};
        if constexpr (Bias == BiasAxis::columns) {
#pragma unroll
            for (int j = 0; j < Tile::N; ++j) {
                const int n = Tile::column(j);
                if (Interior || n < columns_left) column_bias[j] = bias[(long long)n * bias_stride];
            }
        }
#pragma unroll
        for (int i = 0; i < Tile::M; ++i) {
            const int m = Tile::row(i);
            if (!Interior && m >= rows_left) continue;
            T* line = c + (long long)m * c_m;
            T add = 0;
            if constexpr (Bias == BiasAxis::rows) add = bias[(long long)m * bias_stride];
#pragma unroll
            for (int j = 0; j < Tile::N; j += Width) {
                const int n = Tile::column(j);
                if (!Interior && n >= columns_left) continue;
                Pack<T, Width> out;
#pragma unroll
                for (int e = 0; e < Width; ++e) {
                    T x = acc[i][j + e];
                    if constexpr (Bias == BiasAxis::columns) x += column_bias[j + e];
                    if constexpr (Bias == BiasAxis::rows) x += add;
                    out.value[e] = activate<Which, Element>(x);
                }
                store_pack(Width > 1 ? line + n : line + (long long)n * c_n, out);
            }
        }
    }
};
