// W neighbouring values moved by one instruction: 16 bytes at most, aligned to their size.
#pragma once

template <typename T>
constexpr int PACK_WIDTH = 16 / sizeof(T);  // values in the widest access

template <typename T, int W>
struct alignas(sizeof(T) * W) Pack {
    T value[W];
};

// CUDA's own type for a pack, which the compiler never takes apart; other packs are left to its own merging.
template <typename T, int W> struct Vector { using type = Pack<T, W>; };
template <> struct Vector<float, 4> { using type = float4; };
template <> struct Vector<float, 2> { using type = float2; };
template <> struct Vector<double, 2> { using type = double2; };
template <> struct Vector<unsigned, 4> { using type = uint4; };
template <> struct Vector<unsigned, 2> { using type = uint2; };
template <> struct Vector<unsigned long long, 2> { using type = ulonglong2; };

template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_pack(const T* from) {
    using V = typename Vector<T, W>::type;
    const V v = *reinterpret_cast<const V*>(from);
    if constexpr (W == 4) return {v.x, v.y, v.z, v.w};
    else if constexpr (W == 2) return {v.x, v.y};
    else return v;
}

template <int W, typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, W>& pack) {
    using V = typename Vector<T, W>::type;
    if constexpr (W == 4) *reinterpret_cast<V*>(to) = {pack.value[0], pack.value[1], pack.value[2], pack.value[3]};
    else if constexpr (W == 2) *reinterpret_cast<V*>(to) = {pack.value[0], pack.value[1]};
    else *reinterpret_cast<V*>(to) = pack;
}
