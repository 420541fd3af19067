// From accumulators to the output: scale, residual, bias, activation, store.
#pragma once

#include "arithmetic.cuh"
#include "pack.cuh"

enum class BiasAxis { none, columns, rows };
enum class Activation { none, relu, gelu, gelu_tanh, silu, sigmoid, tanh };

// As torch computes them on a CPU. NaN passes.
template <Activation Which, typename Element, typename T>
__device__ __forceinline__ T activate(T x) {
    if constexpr (Which == Activation::none) return x;
    // (An integer comes here unsigned, so its sign is looked at in its own type.)
    else if constexpr (Which == Activation::relu && T(-1) > T(0)) return (Element)x <= (Element)0 ? (T)0 : x;
    else if constexpr (Which == Activation::relu) return x <= (T)0 ? (T)0 : x;
    else if constexpr (Which == Activation::gelu) return (T)0.5 * x * ((T)1 + erf(x * (T)0.70710678118654752440));
    else if constexpr (Which == Activation::gelu_tanh)
        return (T)0.5 * x * ((T)1 + ::tanh((T)0.79788456080286535588 * (x + (T)0.044715 * x * x * x)));
    else if constexpr (Which == Activation::silu) return x / ((T)1 + exp(-x));
    else if constexpr (Which == Activation::sigmoid) return (T)1 / ((T)1 + exp(-x));
    else return ::tanh(x);
}

// What is made of the sum: activation(alpha sum + beta residual + bias). Scaled: alpha and beta are not both 1.
template <typename Element, typename Index, BiasAxis Bias, Activation Which, bool Residual, bool Scaled>
struct Finish {
    using T = typename Compute<Element>::type;
    using S = typename Stored<Element>::type;
    static constexpr BiasAxis AXIS = Bias;

    T alpha, beta;
    const S* bias;
    Index bias_stride;
    const S* residual;
    Index residual_m, residual_n;

    // For the part of the output that begins at (m, n).
    __device__ __forceinline__ Finish moved(long long m, long long n) const {
        Finish part = *this;
        part.bias += (Bias == BiasAxis::rows ? m : n) * bias_stride;
        part.residual += m * residual_m + n * residual_n;
        return part;
    }
    __device__ __forceinline__ T bias_at(long long i) const { return computed<Element>(bias[i * bias_stride]); }

    // `add` is the bias, where there is one.
    __device__ __forceinline__ S operator()(T sum, T add, long long m, long long n) const {
        T x = Scaled ? alpha * sum : sum;
        if constexpr (Residual) {
            const T r = computed<Element>(residual[m * residual_m + n * residual_n]);
            x = Scaled ? multiply_add(beta, r, x) : x + r;
        }
        if constexpr (Bias != BiasAxis::none) x += add;
        return stored<Element>(activate<Which, Element>(x));
    }
};

// Straight from registers. Tile says where accumulator [i][j] sits in the block's tile (SimtTile). Width: neighbouring columns a store
// moves; above 1 the columns' stride is 1, and the host knows Width to divide their number.
// c points to the tile's first element, and `finish` is moved there; rows_left x columns_left are inside. Interior: all.
template <bool Interior, typename Tile, int Width, typename Element, typename Index, typename Finishing>
__device__ __forceinline__ void store_tile(
    const typename Tile::Accumulators& acc, typename Stored<Element>::type* c, Index c_m, Index c_n,
    const Finishing& finish, Index rows_left, Index columns_left) {
    using T = typename Compute<Element>::type;
    using S = typename Stored<Element>::type;
    T column_bias[Tile::N] = {};
    if constexpr (Finishing::AXIS == BiasAxis::columns) {
#pragma unroll
        for (int j = 0; j < Tile::N; ++j) {
            const int n = Tile::column(j);
            if (Interior || n < columns_left) column_bias[j] = finish.bias_at(n);
        }
    }
#pragma unroll
    for (int i = 0; i < Tile::M; ++i) {
        const int m = Tile::row(i);
        if (!Interior && m >= rows_left) continue;
        S* line = c + (long long)m * c_m;
        T add = 0;
        if constexpr (Finishing::AXIS == BiasAxis::rows) add = finish.bias_at(m);
#pragma unroll
        for (int j = 0; j < Tile::N; j += Width) {
            const int n = Tile::column(j);
            if (!Interior && n >= columns_left) continue;
            Pack<S, Width> out;
#pragma unroll
            for (int e = 0; e < Width; ++e)
                out.value[e] = finish(acc[i][j + e], add + column_bias[j + e], m, n + e);
            store_pack(Width > 1 ? line + n : line + (long long)n * c_n, out);
        }
    }
}

// By way of shared memory, for accumulators that lie scattered over a warp (MmaTile): HALF rows of the warp's outputs at
// a time, so that what is finished and stored are neighbours, Width of them a thread, in a loop.
template <typename Tile, int Width, typename Element, typename Index, typename Finishing>
__device__ __forceinline__ void store_tile_staged(
    const typename Tile::Accumulators& acc, typename Tile::T* staging, typename Stored<Element>::type* c, Index c_m,
    const Finishing& finish, Index rows_left, Index columns_left) {
    using T = typename Compute<Element>::type;
    using S = typename Stored<Element>::type;
    constexpr int HALF = Tile::STAGED_ROWS, PITCH = Tile::STAGED_PITCH, LINE = Tile::WARP_N / Width;
    const int lane = threadIdx.x % 32;
    typename Tile::T* mine = staging + threadIdx.x / 32 * (HALF * PITCH);
#pragma unroll
    for (int first = 0; first < Tile::WARP_M; first += HALF) {
        __syncwarp();  // the half before has been read
        Tile::stage(acc, mine, first);
        __syncwarp();
#pragma unroll 1
        for (int piece = lane; piece < HALF * LINE; piece += 32) {
            const int row = piece / LINE, column = piece % LINE * Width;
            const int m = Tile::warp_row() + first + row, n = Tile::warp_column() + column;
            if (m >= rows_left || n >= columns_left) continue;
            Pack<S, Width> out;
#pragma unroll
            for (int e = 0; e < Width; ++e) {
                T add = 0;
                if constexpr (Finishing::AXIS == BiasAxis::columns) add = finish.bias_at(n + e);
                if constexpr (Finishing::AXIS == BiasAxis::rows) add = finish.bias_at(m);
                out.value[e] = finish((T)mine[row * PITCH + column + e], add, m, n + e);
            }
            store_pack(c + (long long)m * c_m + n, out);
        }
    }
}
