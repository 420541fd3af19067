// W neighbouring values moved by one instruction: 16 bytes at most, aligned to their size.
#pragma once

template <typename T>
constexpr int PACK_WIDTH = 16 / sizeof(T);  // values in the widest access

template <typename T, int W>
struct alignas(sizeof(T) * W) Pack {
    T value[W];
};

// CUDA's own type of as many bytes, which the compiler never takes apart. For what is computed with it is one of the
// same values, so that they need not be reinterpreted.
template <typename T, int Bytes> struct Vector;
template <typename T> struct Vector<T, 1> { using type = unsigned char; };
template <typename T> struct Vector<T, 2> { using type = unsigned short; };
template <typename T> struct Vector<T, 4> { using type = unsigned; };
template <typename T> struct Vector<T, 8> { using type = uint2; };
template <typename T> struct Vector<T, 16> { using type = uint4; };
template <> struct Vector<float, 4> { using type = float; };
template <> struct Vector<float, 8> { using type = float2; };
template <> struct Vector<float, 16> { using type = float4; };
template <> struct Vector<double, 8> { using type = double; };
template <> struct Vector<double, 16> { using type = double2; };
template <> struct Vector<unsigned long long, 8> { using type = unsigned long long; };
template <> struct Vector<unsigned long long, 16> { using type = ulonglong2; };

template <int W, typename T>
__device__ __forceinline__ Pack<T, W> load_pack(const T* from) {
    using V = typename Vector<T, sizeof(T) * W>::type;
    const V v = *reinterpret_cast<const V*>(from);
    Pack<T, W> pack;
    memcpy(&pack, &v, sizeof(v));
    return pack;
}

template <int W, typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, W>& pack) {
    using V = typename Vector<T, sizeof(T) * W>::type;
    V v;
    memcpy(&v, &pack, sizeof(v));
    *reinterpret_cast<V*>(to) = v;
}
