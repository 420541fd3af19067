// The type a kernel computes in, and multiply-add in it.
#pragma once

// Signed overflow is undefined in C++; torch's integers wrap. So integers are computed unsigned, in the same bits.
template <typename T> struct Compute { using type = T; };
template <> struct Compute<int> { using type = unsigned int; };
template <> struct Compute<long long> { using type = unsigned long long; };

// Named fma so that no compiler option decides whether a product is rounded before it is added.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ unsigned multiply_add(unsigned a, unsigned b, unsigned c) { return a * b + c; }
__device__ __forceinline__ unsigned long long multiply_add(
    unsigned long long a, unsigned long long b, unsigned long long c) {
    return a * b + c;
}
