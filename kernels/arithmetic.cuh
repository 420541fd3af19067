// Multiply-add in the type a kernel computes in.
#pragma once

#include "element.cuh"

// Named fma so that no compiler option decides whether a product is rounded before it is added.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ unsigned multiply_add(unsigned a, unsigned b, unsigned c) { return a * b + c; }
__device__ __forceinline__ unsigned long long multiply_add(
    unsigned long long a, unsigned long long b, unsigned long long c) {
    return a * b + c;
}
template <typename R>
__device__ __forceinline__ Complex<R> multiply_add(Complex<R> a, Complex<R> b, Complex<R> c) {
    return {multiply_add(a.re, b.re, multiply_add(-a.im, b.im, c.re)),
            multiply_add(a.re, b.im, multiply_add(a.im, b.re, c.im))};
}
