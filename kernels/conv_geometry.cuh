// Where a convolution's operands lie: the geometry the host passes by value, division by multiply-high,
// and the two halves of implicit im2col, a pixel (where its window starts) and a tap (where in the window).
//
// A B element is `b[pixel.offset + tap.offset]`, and it counts when `inside(pixel.key, tap.key)`. Everything that would
// need a division or a comparison with the image's edges is in those four values: a tile's fill only adds and tests.
#pragma once

#define FORWARD 0
#define INPUT_GRAD 1
#define WEIGHT_GRAD 2

using Index = INDEX;

// n / d for 0 <= n < 2^31, as (mulhi(n, magic) + n) >> shift.
// Source: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994.
struct FastDiv {
    int divisor;
    unsigned magic;
    unsigned shift;
};

__device__ __forceinline__ FastDiv fast_division(int divisor) {
    const unsigned shift = divisor > 1 ? 32 - __clz(divisor - 1) : 0;
    const unsigned long long rest = ((1ull << shift) - divisor) << 32;
    return FastDiv{divisor, static_cast<unsigned>(rest / divisor + 1), shift};
}

__device__ __forceinline__ int divide(int n, const FastDiv& d) {
    return static_cast<int>((__umulhi(static_cast<unsigned>(n), d.magic) + static_cast<unsigned>(n)) >> d.shift);
}

__device__ __forceinline__ long long divide(long long n, const FastDiv& d) { return n / d.divisor; }

// Height or width.
struct Axis {
    int pixels;     // of C (for the weight gradient, of A): the output's, or for the input gradient the input's
    int source;     // size of the image B is taken from
    int taps;
    int stride, pad, dilation;
    int tap_apart;  // stride / gcd(stride, dilation): how far apart the input gradient's taps of one phase are
};

// Packed by cudaops/ops/conv_plan.py in this order. Strides are in elements, sizes those of one group.
struct ConvGeometry {
    Index split_stride;    // elements between the partial results of two splits
    Index a_group, b_group, c_group;
    Index a_row;           // from one row of A to the next
    Index a_k[3];          // A along the sum: (channel, r, s), or for the weight gradient (image, y, x)
    Index b_channel, b_image, b_y, b_x;
    Index b_last;          // the largest offset of a B element within a group
    Index c_row;
    Index c_n[3];          // C along its columns: (image, y, x), or for the weight gradient (channel, r, s)
    int m;
    int images, channels;  // in B
    int groups, tiles_m, tiles_n;  // tiles_n of the largest phase
    int a_linear;          // A's elements lie side by side along the sum
    int has_bias;
    Axis y, x;
    // Where there is one phase: pixels in an image, in a row; taps (with TAP_OUTER, channels).
    FastDiv by_image, by_row, by_taps;
};

// What a block sees along an axis: pixel p's window starts at start + p * step of the source, tap t is t * tap_step on.
struct View {
    int pixels, taps;
    int start, step, tap_step;
    int first_pixel, pixel_apart;  // its pixels among C's
    int first_tap, tap_apart;      // its taps among A's
};

// dx[y] gathers dy[(y + pad - r * dilation) / stride] where that divides. So pixels fall into `stride` phases by the
// remainder of y + pad; each meets only the taps with that remainder of r * dilation: a convolution of stride 1 by itself.
__device__ __forceinline__ View view_of(const Axis& axis, int phase) {
#if MODE == INPUT_GRAD
    if (axis.stride == 1)
        return View{axis.pixels, axis.taps, axis.pad, 1, -axis.dilation, 0, 1, 0, 1};
    View view;
    view.first_pixel = (phase + axis.stride - axis.pad % axis.stride) % axis.stride;
    view.pixel_apart = axis.stride;
    view.pixels = (axis.pixels - view.first_pixel + axis.stride - 1) / axis.stride;
    view.first_tap = 0;
    view.tap_apart = axis.tap_apart;
    while (view.first_tap < axis.taps && view.first_tap * axis.dilation % axis.stride != phase) ++view.first_tap;
    view.taps = (axis.taps - view.first_tap + view.tap_apart - 1) / view.tap_apart;
    view.start = (view.first_pixel + axis.pad - view.first_tap * axis.dilation) / axis.stride;
    view.step = 1;
    view.tap_step = -(view.tap_apart * axis.dilation / axis.stride);
    return view;
#else
    return View{axis.pixels, axis.taps, -axis.pad, axis.stride, axis.dilation, 0, 1, 0, 1};
#endif
}

// The matrix product of one phase; elsewhere than in a strided input gradient there is one.
struct Problem {
    Index n, k;  // columns, and length of the sum
    View y, x;
    FastDiv by_image, by_row, by_taps;
    bool pixels_linear;  // neighbouring pixels' windows start at neighbouring elements of B, ends of rows included
};

__device__ __forceinline__ Problem problem_of(int phase, const ConvGeometry& g) {
    Problem p;
    const int phase_y = MODE == INPUT_GRAD ? phase / g.x.stride : 0;
    p.y = view_of(g.y, phase_y);
    p.x = view_of(g.x, phase - phase_y * g.x.stride);
    const Index pixels = static_cast<Index>(p.y.pixels) * p.x.pixels * g.images;
    const Index taps = static_cast<Index>(p.y.taps) * p.x.taps * g.channels;
    p.n = MODE == WEIGHT_GRAD ? taps : pixels;
    p.k = MODE == WEIGHT_GRAD ? pixels : taps;
    p.by_image = g.by_image;
    p.by_row = g.by_row;
    p.by_taps = g.by_taps;
    if (MODE == INPUT_GRAD && g.y.stride * g.x.stride > 1 && pixels > 0) {
        p.by_image = fast_division(p.y.pixels * p.x.pixels);
        p.by_row = fast_division(p.x.pixels);
        if (!TAP_OUTER) p.by_taps = fast_division(max(1, p.y.taps * p.x.taps));
    }
    p.pixels_linear = p.y.step == 1 && p.x.step == 1 && p.y.pixels == g.y.source && p.x.pixels == g.x.source &&
                      g.b_x == 1 && g.b_y == g.x.source;
    return p;
}

#if WIDE_FILTER
// Filters of more than 15 rows or columns: positions, compared with the edges at every element.
struct PixelKey {
    int y, x;
};
struct TapKey {
    int y, x;
};
constexpr int FAR = 1 << 30;
#else
// Bits 0 to 14 stand for the filter's rows, 15 to 29 for its columns, bit 30 for "never".
// A pixel sets the bits of the rows and columns that fall outside the image for it; a tap sets the two it uses.
using PixelKey = unsigned;
using TapKey = unsigned;
constexpr int COLUMN_BIT = 15;
constexpr unsigned NEVER = 1u << 30;
#endif

struct Pixel {
    Index offset;
    PixelKey key;
};

struct Tap {
    Index b_offset;
    Index a_offset;
    TapKey key;
};

__device__ __forceinline__ bool inside(PixelKey pixel, TapKey tap, const ConvGeometry& g) {
#if WIDE_FILTER
    return static_cast<unsigned>(pixel.y + tap.y) < static_cast<unsigned>(g.y.source) &&
           static_cast<unsigned>(pixel.x + tap.x) < static_cast<unsigned>(g.x.source);
#else
    return (pixel & tap) == 0;
#endif
}

// A pixel and a tap that are inside with nothing: what lies beyond the ragged edges.
__device__ __forceinline__ PixelKey no_pixel() {
#if WIDE_FILTER
    return PixelKey{-FAR, -FAR};
#else
    return ~0u;
#endif
}

__device__ __forceinline__ TapKey no_tap() {
#if WIDE_FILTER
    return TapKey{-FAR, -FAR};
#else
    return NEVER;
#endif
}

// Pixel number `n` in (image, y, x) order.
__device__ __forceinline__ void split_pixel(Index n, const Problem& p, Index& image, int& y, int& x) {
    image = divide(n, p.by_image);
    const int rest = static_cast<int>(n - image * p.by_image.divisor);
    y = divide(rest, p.by_row);
    x = rest - y * p.by_row.divisor;
}

__device__ __forceinline__ Pixel pixel_at(Index n, const Problem& p, const ConvGeometry& g) {
    Index image;
    int y, x;
    split_pixel(n, p, image, y, x);
    y = p.y.start + y * p.y.step;
    x = p.x.start + x * p.x.step;
    Pixel pixel;
    pixel.offset = image * g.b_image + y * g.b_y + x * g.b_x;
#if WIDE_FILTER
    pixel.key = PixelKey{y, x};
#else
    unsigned bad = NEVER;
#pragma unroll 1
    for (int r = 0; r < p.y.taps; ++r, y += p.y.tap_step)
        bad |= static_cast<unsigned>(static_cast<unsigned>(y) >= static_cast<unsigned>(g.y.source)) << r;
#pragma unroll 1
    for (int s = 0; s < p.x.taps; ++s, x += p.x.tap_step)
        bad |= static_cast<unsigned>(static_cast<unsigned>(x) >= static_cast<unsigned>(g.x.source))
               << (COLUMN_BIT + s);
    pixel.key = bad;
#endif
    return pixel;
}

// Tap number `t` in (r, s) order.
__device__ __forceinline__ Tap tap_at(int t, const Problem& p, const ConvGeometry& g) {
    const int r = t / p.x.taps, s = t - r * p.x.taps;
    const int y = r * p.y.tap_step, x = s * p.x.tap_step;
    Tap tap;
    tap.b_offset = y * g.b_y + x * g.b_x;
    tap.a_offset = (p.y.first_tap + r * p.y.tap_apart) * g.a_k[1] + (p.x.first_tap + s * p.x.tap_apart) * g.a_k[2];
#if WIDE_FILTER
    tap.key = TapKey{y, x};
#else
    tap.key = 1u << r | 1u << (COLUMN_BIT + s);
#endif
    return tap;
}
