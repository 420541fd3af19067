// W neighbouring values moved by one instruction: 16 bytes at most, aligned to their size.
#pragma once

template <typename T>
constexpr int PACK_WIDTH = 16 / sizeof(T);  // values in the widest access

template <typename T, int W>
struct alignas(sizeof(T) * W) Pack {
    T value[W];
};

// CUDA's own type of 16 bytes of T, which the compiler never takes apart. Other packs are left to its own merging.
template <typename T> struct Vector { using type = char; };
template <> struct Vector<float> { using type = float4; };
template <> struct Vector<double> { using type = double2; };
template <> struct Vector<unsigned> { using type = uint4; };
template <> struct Vector<unsigned long long> { using type = ulonglong2; };

template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_pack(const T* from) {
    using V = typename Vector<T>::type;
    if constexpr (sizeof(V) == sizeof(T) * W && W == 4) {
        const V v = *reinterpret_cast<const V*>(from);
        return {v.x, v.y, v.z, v.w};
    } else if constexpr (sizeof(V) == sizeof(T) * W && W == 2) {
        const V v = *reinterpret_cast<const V*>(from);
        return {v.x, v.y};
    } else {
        return *reinterpret_cast<const Pack<T, W>*>(from);
    }
}

template <int W, typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, W>& pack) {
    using V = typename Vector<T>::type;
    if constexpr (sizeof(V) == sizeof(T) * W && W == 4) {
        *reinterpret_cast<V*>(to) = {pack.value[0], pack.value[1], pack.value[2], pack.value[3]};
    } else if constexpr (sizeof(V) == sizeof(T) * W && W == 2) {
        *reinterpret_cast<V*>(to) = {pack.value[0], pack.value[1]};
    } else {
        *reinterpret_cast<Pack<T, W>*>(to) = pack;
    }
}
