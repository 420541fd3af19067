/* What random programs (c_programs.py) are made of, with one meaning under NVRTC and under a host compiler: on the host,
   CUDA's own intrinsics are written out by what the CUDA Math API and the PTX ISA say of them. */
#ifdef __CUDACC_RTC__
#define DEVICE __device__
#define APART __device__ __noinline__
#else
#include <fenv.h>
#include <math.h>
#include <string.h>
#define DEVICE static
#define APART static

static i32 __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
static i32 __clzll(u64 x) { return x ? __builtin_clzll(x) : 64; }
static i32 __popc(u32 x) { return __builtin_popcount(x); }
static i32 __popcll(u64 x) { return __builtin_popcountll(x); }
static i32 __ffs(i32 x) { return __builtin_ffs(x); }
static i32 __ffsll(i64 x) { return __builtin_ffsll(x); }
static u64 __brevll(u64 x) {
    u64 r = 0;
    for (int n = 0; n < 64; n++) r |= (x >> n & 1) << (63 - n);
    return r;
}
static u32 __brev(u32 x) { return (u32)(__brevll(x) >> 32); }
static u32 __funnelshift_l(u32 lo, u32 hi, u32 n) { return (u32)((((u64)hi << 32 | lo) << (n & 31)) >> 32); }
static u32 __funnelshift_r(u32 lo, u32 hi, u32 n) { return (u32)(((u64)hi << 32 | lo) >> (n & 31)); }
static u32 __funnelshift_lc(u32 lo, u32 hi, u32 n) { return n >= 32 ? lo : __funnelshift_l(lo, hi, n); }
static u32 __funnelshift_rc(u32 lo, u32 hi, u32 n) { return n >= 32 ? hi : __funnelshift_r(lo, hi, n); }
static u32 __byte_perm(u32 x, u32 y, u32 s) {
    u64 all = (u64)y << 32 | x;
    u32 r = 0;
    for (int n = 0; n < 4; n++) r |= (u32)(all >> 8 * (s >> 4 * n & 7) & 255) << 8 * n;
    return r;
}
static u32 __umulhi(u32 x, u32 y) { return (u32)((u64)x * y >> 32); }
static i32 __mulhi(i32 x, i32 y) { return (i32)((i64)x * y >> 32); }
static u64 __umul64hi(u64 x, u64 y) { return (u64)((unsigned __int128)x * y >> 64); }
static i64 __mul64hi(i64 x, i64 y) { return (i64)((__int128)x * y >> 64); }
static u32 __usad(u32 x, u32 y, u32 z) { return (x > y ? x - y : y - x) + z; }

/* One operation under each rounding mode; volatile, or it would move out from between the changes of the mode. */
#define UNDER(mode, type, operation) volatile type r; fesetround(mode); r = operation; fesetround(FE_TONEAREST); return r
#define ROUNDED(suffix, mode) \
    static float __fadd_##suffix(volatile float x, volatile float y) { UNDER(mode, float, x + y); } \
    static float __fmul_##suffix(volatile float x, volatile float y) { UNDER(mode, float, x * y); } \
    static float __fdiv_##suffix(volatile float x, volatile float y) { UNDER(mode, float, x / y); } \
    static float __fsqrt_##suffix(volatile float x) { UNDER(mode, float, sqrtf(x)); } \
    static float __fmaf_##suffix(volatile float x, volatile float y, volatile float z) { UNDER(mode, float, fmaf(x, y, z)); } \
    static double __dadd_##suffix(volatile double x, volatile double y) { UNDER(mode, double, x + y); } \
    static double __dmul_##suffix(volatile double x, volatile double y) { UNDER(mode, double, x * y); } \
    static double __ddiv_##suffix(volatile double x, volatile double y) { UNDER(mode, double, x / y); } \
    static double __dsqrt_##suffix(volatile double x) { UNDER(mode, double, sqrt(x)); } \
    static double __fma_##suffix(volatile double x, volatile double y, volatile double z) { UNDER(mode, double, fma(x, y, z)); } \
    static float __double2float_##suffix(volatile double x) { UNDER(mode, float, (float)x); } \
    static float __int2float_##suffix(volatile i32 x) { UNDER(mode, float, (float)x); } \
    static float __uint2float_##suffix(volatile u32 x) { UNDER(mode, float, (float)x); } \
    static float __ll2float_##suffix(volatile i64 x) { UNDER(mode, float, (float)x); } \
    static double __ll2double_##suffix(volatile i64 x) { UNDER(mode, double, (double)x); }
ROUNDED(rn, FE_TONEAREST)
ROUNDED(rz, FE_TOWARDZERO)
ROUNDED(ru, FE_UPWARD)
ROUNDED(rd, FE_DOWNWARD)

/* To an integer: saturated; NaN is 0, or the sign bit where either side has 64 bits. */
#define SATURATED(name, from, to, round, lowest, end, highest, nan) \
    static to name(from x) { return x != x ? (to)(nan) : x < (from)(lowest) ? (to)(lowest) : x >= (from)(end) ? (to)(highest) : (to)round(x); }
#define TO_INTEGER(suffix, floatly, doubly) \
    SATURATED(__float2int_##suffix, float, i32, floatly, -0x80000000LL, 0x1p31, 0x7FFFFFFF, 0) \
    SATURATED(__float2ll_##suffix, float, i64, floatly, -0x7FFFFFFFFFFFFFFFLL - 1, 0x1p63, 0x7FFFFFFFFFFFFFFFLL, 1ULL << 63) \
    SATURATED(__double2int_##suffix, double, i32, doubly, -0x80000000LL, 0x1p31, 0x7FFFFFFF, 0x80000000) \
    SATURATED(__double2ll_##suffix, double, i64, doubly, -0x7FFFFFFFFFFFFFFFLL - 1, 0x1p63, 0x7FFFFFFFFFFFFFFFLL, 1ULL << 63)
TO_INTEGER(rn, rintf, rint)
TO_INTEGER(rz, truncf, trunc)
TO_INTEGER(ru, ceilf, ceil)
TO_INTEGER(rd, floorf, floor)
#endif

/* The remainder and quotient that C defines, and something else where it does not. */
#define DIVISION(type, lowest) \
    DEVICE type quotient_##type(type x, type y) { return y == 0 || (x == (type)(lowest) && y == (type)-1) ? x : x / y; } \
    DEVICE type remainder_##type(type x, type y) { return y == 0 || (x == (type)(lowest) && y == (type)-1) ? y : x % y; }
DIVISION(i32, -0x7FFFFFFF - 1)
DIVISION(u32, 0)
DIVISION(i64, -0x7FFFFFFFFFFFFFFFLL - 1)
DIVISION(u64, 0)

#define EXTREMES(type) \
    DEVICE type least_##type(type x, type y) { return x < y ? x : y; } \
    DEVICE type greatest_##type(type x, type y) { return x > y ? x : y; }
EXTREMES(i32)
EXTREMES(u32)
EXTREMES(i64)
EXTREMES(u64)

/* min and max: the number where the other is NaN, and -0 below +0. */
#ifdef __CUDACC_RTC__
#define least_float fminf
#define least_double fmin
#define greatest_float fmaxf
#define greatest_double fmax
#else
#define FLOATING_EXTREMES(type, minus) \
    static type least_##type(type x, type y) { return x != x ? y : y != y ? x : x < y || (x == y && minus(x)) ? x : y; } \
    static type greatest_##type(type x, type y) { return x != x ? y : y != y ? x : x > y || (x == y && !minus(x)) ? x : y; }
FLOATING_EXTREMES(float, signbit)
FLOATING_EXTREMES(double, signbit)
#endif

/* The bits of a number; all NaN are alike, as which of them an operation gives is the hardware's choice. */
DEVICE u64 bits_float(float x) {
    if (x != x) return 0x7FC00000;
#ifdef __CUDACC_RTC__
    return __float_as_uint(x);
#else
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
#endif
}
DEVICE u64 bits_double(double x) {
    if (x != x) return 0x7FF8000000000000;
#ifdef __CUDACC_RTC__
    return (u64)__double_as_longlong(x);
#else
    u64 bits;
    memcpy(&bits, &x, 8);
    return bits;
#endif
}

/* What every function gets of its thread. */
#define THREAD u32 tid, u32 tx, u32 ty, u32 bid, const u32* table, const float* floats, const double* doubles
#define SAME tid, tx, ty, bid, table, floats, doubles
