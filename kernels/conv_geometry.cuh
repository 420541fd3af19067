// Where a convolution's operands lie: the geometry the host passes by value, division by multiply-high,
// and the two halves of implicit im2col, a pixel (where its window starts) and a tap (where in the window).
//
// A B element is `b[pixel.offset + tap.offset]`, and it counts when `inside(pixel.key, tap.key)`. Everything that would
// need a division or a comparison with the image's edges is in those four values, so that a tile's fill only adds and tests.
#pragma once

#define FORWARD 0
#define INPUT_GRAD 1
#define WEIGHT_GRAD 2

using Index = INDEX;

// n / d for 0 <= n < 2^31, as (mulhi(n, magic) + n) >> shift (Granlund and Montgomery, "Division by invariant integers").
struct FastDiv {
    int divisor;
    unsigned magic;
    unsigned shift;
};

__device__ __forceinline__ int divide(int n, const FastDiv& d) {
    return static_cast<int>((__umulhi(static_cast<unsigned>(n), d.magic) + static_cast<unsigned>(n)) >> d.shift);
}

__device__ __forceinline__ long long divide(long long n, const FastDiv& d) { return n / d.divisor; }

// Packed by cudaops/ops/conv.py in this order. `m`, `n`, `k` are the matrix product's sizes in one group; strides in elements.
struct ConvGeometry {
    Index n, k;            // columns, and length of the sum
    Index k_per_split;     // share of blockIdx.y, a multiple of BK
    Index split_stride;    // elements between the partial results of two splits
    Index a_group, b_group, c_group;
    Index a_row;           // from one row of A to the next
    Index a_k[3];          // A along the sum: (channel, r, s), or for the weight gradient (image, y, x)
    Index b_channel, b_image, b_y, b_x;
    Index b_last;          // the largest offset of a B element within a group
    Index c_row;
    Index c_n[3];          // C along its columns: (image, y, x), or for the weight gradient (channel, r, s)
    int m;
    int tiles_m, tiles_n;
    int taps, filter_w;    // R * S, and S
    int filter_h;
    int in_h, in_w;        // the image B is taken from
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int a_linear;          // A's elements lie side by side along the sum
    int pixels_linear;     // the windows of neighbouring pixels start at neighbouring elements of B, across rows too
    int has_bias;
    FastDiv by_image;      // pixels in an image
    FastDiv by_row;        // pixels in a row
    FastDiv by_taps;       // taps, or channels where the sum runs over channels fastest
};

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
#if !WIDE_FILTER
    return (pixel & tap) == 0;
#elif MODE == INPUT_GRAD
    const int y = pixel.y - tap.y, x = pixel.x - tap.x;
    return y >= 0 && x >= 0 && y % g.stride_h == 0 && x % g.stride_w == 0 && y / g.stride_h < g.in_h &&
           x / g.stride_w < g.in_w;
#else
    return static_cast<unsigned>(pixel.y + tap.y) < static_cast<unsigned>(g.in_h) &&
           static_cast<unsigned>(pixel.x + tap.x) < static_cast<unsigned>(g.in_w);
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
#if !WIDE_FILTER
    return NEVER;
#elif MODE == INPUT_GRAD
    return TapKey{FAR, FAR};
#else
    return TapKey{-FAR, -FAR};
#endif
}

// Pixel number `n` in (image, y, x) order: of the output, or for the input gradient of the input.
__device__ __forceinline__ void split_pixel(Index n, const ConvGeometry& g, Index& image, int& y, int& x) {
    image = divide(n, g.by_image);
    const int rest = static_cast<int>(n - image * g.by_image.divisor);
    y = divide(rest, g.by_row);
    x = rest - y * g.by_row.divisor;
}

__device__ __forceinline__ Pixel pixel_at(Index n, const ConvGeometry& g) {
    Index image;
    int y, x;
    split_pixel(n, g, image, y, x);
    Pixel pixel;
#if MODE == INPUT_GRAD
    // dx[y] gathers dy[(y + pad - r * dilation) / stride] where that divides: quotients add up, remainders must agree.
    y += g.pad_h;
    x += g.pad_w;
    const int y0 = g.stride_h == 1 ? y : y / g.stride_h, x0 = g.stride_w == 1 ? x : x / g.stride_w;
    const int y_rest = y - y0 * g.stride_h, x_rest = x - x0 * g.stride_w;
#else
    const int y0 = y * g.stride_h - g.pad_h, x0 = x * g.stride_w - g.pad_w;
#endif
    pixel.offset = image * g.b_image + y0 * g.b_y + x0 * g.b_x;
#if WIDE_FILTER
#if MODE == INPUT_GRAD
    pixel.key = PixelKey{y, x};
#else
    pixel.key = PixelKey{y0, x0};
#endif
#else
    unsigned bad = NEVER;
#pragma unroll 1
    for (int r = 0; r < g.filter_h; ++r) {
        const int step = r * g.dilation_h;
#if MODE == INPUT_GRAD
        const int whole = step / g.stride_h;
        const bool out = y_rest != step - whole * g.stride_h ||
                         static_cast<unsigned>(y0 - whole) >= static_cast<unsigned>(g.in_h);
#else
        const bool out = static_cast<unsigned>(y0 + step) >= static_cast<unsigned>(g.in_h);
#endif
        bad |= static_cast<unsigned>(out) << r;
    }
#pragma unroll 1
    for (int s = 0; s < g.filter_w; ++s) {
        const int step = s * g.dilation_w;
#if MODE == INPUT_GRAD
        const int whole = step / g.stride_w;
        const bool out = x_rest != step - whole * g.stride_w ||
                         static_cast<unsigned>(x0 - whole) >= static_cast<unsigned>(g.in_w);
#else
        const bool out = static_cast<unsigned>(x0 + step) >= static_cast<unsigned>(g.in_w);
#endif
        bad |= static_cast<unsigned>(out) << (COLUMN_BIT + s);
    }
    pixel.key = bad;
#endif
    return pixel;
}

// Tap number `t` = r * S + s.
__device__ __forceinline__ Tap tap_at(int t, const ConvGeometry& g) {
    const int r = t / g.filter_w, s = t - r * g.filter_w;
    const int y = r * g.dilation_h, x = s * g.dilation_w;
    Tap tap;
#if MODE == INPUT_GRAD
    tap.b_offset = -((y / g.stride_h) * g.b_y + (x / g.stride_w) * g.b_x);
#else
    tap.b_offset = y * g.b_y + x * g.b_x;
#endif
    tap.a_offset = r * g.a_k[1] + s * g.a_k[2];
#if WIDE_FILTER
    tap.key = TapKey{y, x};
#else
    tap.key = 1u << r | 1u << (COLUMN_BIT + s);
#endif
    return tap;
}
