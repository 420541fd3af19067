// Elements as they lie in memory, and the type a kernel computes in.
#pragma once

// Named by pointers only, so that the toolkit's large headers need not be read.
struct __half;
struct __nv_bfloat16;

// A complex number, as torch and CUDA's float2 and double2 lay it out.
template <typename R>
struct alignas(2 * sizeof(R)) Complex {
    R re, im;
    Complex() = default;
    __device__ __forceinline__ Complex(R real) : re(real), im(0) {}
    __device__ __forceinline__ Complex(R real, R imaginary) : re(real), im(imaginary) {}
    __device__ __forceinline__ Complex& operator+=(Complex z) { re += z.re; im += z.im; return *this; }
    friend __device__ __forceinline__ Complex operator+(Complex x, Complex z) { return {x.re + z.re, x.im + z.im}; }
    friend __device__ __forceinline__ Complex operator*(Complex x, Complex z) {
        return {x.re * z.re - x.im * z.im, x.re * z.im + x.im * z.re};
    }
};

// What an element's bytes are.
template <typename E> struct Stored { using type = E; };
template <> struct Stored<__half> { using type = unsigned short; };
template <> struct Stored<__nv_bfloat16> { using type = unsigned short; };
template <> struct Stored<float2> { using type = Complex<float>; };
template <> struct Stored<double2> { using type = Complex<double>; };

// Signed overflow is undefined in C++; torch's integers wrap. So integers are computed unsigned, in at least 32 bits.
template <typename E> struct Compute { using type = E; };
template <> struct Compute<signed char> { using type = unsigned int; };
template <> struct Compute<unsigned char> { using type = unsigned int; };
template <> struct Compute<short> { using type = unsigned int; };
template <> struct Compute<int> { using type = unsigned int; };
template <> struct Compute<long long> { using type = unsigned long long; };
template <> struct Compute<__half> { using type = float; };
template <> struct Compute<__nv_bfloat16> { using type = float; };
template <> struct Compute<float2> { using type = Complex<float>; };
template <> struct Compute<double2> { using type = Complex<double>; };

template <typename E>
__device__ __forceinline__ typename Compute<E>::type computed(typename Stored<E>::type x) {
    return (typename Compute<E>::type)x;
}
template <>
__device__ __forceinline__ float computed<__half>(unsigned short x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}
template <>
__device__ __forceinline__ float computed<__nv_bfloat16>(unsigned short x) { return __uint_as_float((unsigned)x << 16); }

// Rounded to nearest, ties to even; the low bits of an integer.
template <typename E>
__device__ __forceinline__ typename Stored<E>::type stored(typename Compute<E>::type x) {
    return (typename Stored<E>::type)x;
}
template <>
__device__ __forceinline__ unsigned short stored<__half>(float x) {
    unsigned short narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
    return narrow;
}
template <>
__device__ __forceinline__ unsigned short stored<__nv_bfloat16>(float x) {
#if __CUDA_ARCH__ >= 800
    unsigned short narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
    return narrow;
#else
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

// The complex conjugate, where that is wanted.
template <bool Conj, typename T>
__device__ __forceinline__ T conjugated(T x) {
    if constexpr (Conj) x.im = -x.im;
    return x;
}
