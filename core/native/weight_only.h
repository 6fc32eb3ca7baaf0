// Products of activations as they are and weights of 8 or 4 bits.
//
// Weights are codes with a scale (and a minimum), as core/quantization.py makes them. A panel of NR columns (gemm.h) is a list of chunks of
// 32 ks, everything of a chunk next to each other, so that memory is read in one stream:
//   INT8  the columns' scales (f32), then in each chunk 32 * NR codes from -127 to 127. weight = scale * code
//   INT4  in each chunk scales and minima (f16, NR of each), then 16 * NR bytes of codes from 0 to 15. weight = scale * code + minimum
//
// What is summed is x * code: codes are exact in bf16 too, and scales come in where a sum over their ks is complete. So no weight is rounded
// on the way, and a code costs two instructions (INT4 in bf16), where scaling it first would cost six. Of a minimum every k of a chunk has
// the same: it is multiplied with the sum of x over these, which is computed once a row.
//
// One tile of rows takes codes apart in registers, several tiles share what is unpacked of a chunk into the L1 cache: the same numbers are
// added in the same order, so a row's result depends on nothing but the row here too.
#pragma once

#include "gemm.h"

namespace octavo {
namespace OCTAVO_LEVEL {

enum Quantization { WHOLE = 0, INT8 = 1, INT4 = 2 };  // as Python's QUANTIZATIONS (core/native/library.py)

constexpr int GROUP = 32;                             // ks
constexpr int BLOCK = 8;                              // tiles that share an unpacked chunk

// The type whose products are computed for activations of type T: pairs of bf16 where the processor multiplies these, else floats.
OCTAVO_INLINE f32 product_type(f32) { return {}; }
OCTAVO_INLINE f32 product_type(f16) { return {}; }
#if defined(OCTAVO_PAIRS)
OCTAVO_INLINE bf16 product_type(bf16) { return {}; }
#else
OCTAVO_INLINE f32 product_type(bf16) { return {}; }
#endif
template <class T>
using Products = decltype(product_type(T()));

// Of P, f32 or bf16: ks that a product takes, and products of a chunk.
template <class P>
constexpr int depth_of = sizeof(typename Format<P>::Input) / sizeof(P);
template <class P>
constexpr int products_of_group = GROUP / depth_of<P>;

// Both kinds of code have
//   head_bytes, group_bytes: of a panel's head, and of a chunk
//   codes<P>(chunk, base, u, j): those of product base + u (base: a multiple of 8, u: below 8) and the columns from j * W on
//   begin, end: sums before and after the products of a chunk; `totals` are those of the chunks before

struct Int8 {
    static constexpr int64_t head_bytes = NR * sizeof(float), group_bytes = GROUP * NR;

    template <class P>
    OCTAVO_INLINE vf codes(const char* chunk, int64_t base, int u, int j) {
        const int8_t* at = (const int8_t*)chunk + ((base + u) * NR + j * W) * depth_of<P>;
#if defined(OCTAVO_PAIRS)
        if (depth_of<P> == 2) return load_pairs(at);
#endif
        return load(at);
    }
    template <class P>
    static int64_t code_at(int64_t k, int64_t column) {
        return (k / depth_of<P> * NR + column) * depth_of<P> + k % depth_of<P>;
    }

    template <int rows>
    OCTAVO_INLINE void begin(const float* totals, vf (&sums)[rows][3]) {
        OCTAVO_UNROLL for (int i = 0; i < rows; i++) OCTAVO_UNROLL for (int j = 0; j < 3; j++) sums[i][j] = load(totals + i * NR + j * W);
    }
    template <class P, int rows>
    OCTAVO_INLINE void end(const char*, const float*, int64_t, vf (&sums)[rows][3], float* totals) {
        OCTAVO_UNROLL for (int i = 0; i < rows; i++) OCTAVO_UNROLL for (int j = 0; j < 3; j++) store(totals + i * NR + j * W, sums[i][j]);
    }
    OCTAVO_INLINE vf finish(const char* head, int j, vf total) { return total * load((const float*)head + j * W); }
};

struct Int4 {
    static constexpr int64_t head_bytes = 0, group_bytes = (2 * sizeof(f16) + GROUP / 2) * NR;

    static const f16* scales(const char* chunk) { return (const f16*)chunk; }
    static const f16* minima(const char* chunk) { return scales(chunk) + NR; }
    // Eight ks of a column share a word; the even ones lie in its lower half, the odd ones above: pairs at one distance.
    static int64_t word_at(int64_t k, int64_t column) { return 2 * (int64_t)sizeof(f16) * NR + (k / 8 * NR + column) * 4; }
    static constexpr int bit_of(int k) { return k % 8 / 2 * 4 + k % 2 * 16; }

    template <class P>
    OCTAVO_INLINE vf codes(const char* chunk, int64_t base, int u, int j) {
        vu words = load_bits<vu>(chunk + word_at((base + u) * depth_of<P>, j * W));
        int bit = bit_of(u * depth_of<P>);
#if defined(OCTAVO_PAIRS)
        if (depth_of<P> == 2) return pairs_from_16(words, bit);
#endif
        return __builtin_convertvector((vi)(words >> bit & 15), vf);
    }

    template <int rows>
    OCTAVO_INLINE void begin(const float*, vf (&sums)[rows][3]) {
        OCTAVO_UNROLL for (int i = 0; i < rows; i++) OCTAVO_UNROLL for (int j = 0; j < 3; j++) sums[i][j] = vf{};
    }
    template <class P, int rows>
    OCTAVO_INLINE void end(const char* chunk, const float* x_sums, int64_t stride, vf (&sums)[rows][3], float* totals) {
        constexpr float added = depth_of<P> == 2 ? 16.0f : 0.0f;  // to every code, see pairs_from_16
        OCTAVO_UNROLL for (int j = 0; j < 3; j++) {
            vf scale = load(scales(chunk) + j * W), offset = fma(set1(-added), scale, load(minima(chunk) + j * W));
            OCTAVO_UNROLL for (int i = 0; i < rows; i++) {
                vf total = fma(scale, sums[i][j], load(totals + i * NR + j * W));
                store(totals + i * NR + j * W, fma(offset, set1(x_sums[i * stride]), total));
            }
        }
    }
    OCTAVO_INLINE vf finish(const char*, int, vf total) { return total; }
};

// x of up to MR rows: at the first k of a chunk, of which so many products are left; sums of x over each chunk, `sums_stride` apart.
struct ChunkInputs {
    const char* x;
    int64_t stride;
    const float* sums;
    int64_t sums_stride, rows, products;
};

// weight_only_tile.cpp. What a chunk adds to totals [rows, NR]: its codes taken apart in registers, or before by `unpack`, for several tiles.
template <class P, class Q>
void add_chunk(const ChunkInputs& in, const char* chunk, float* totals);
template <class P, class Q>
void add_chunk(const ChunkInputs& in, const char* chunk, const float* words, float* totals);
template <class P, class Q>
void unpack(const char* chunk, float* words);

// As `multiply` of gemm.h, of codes.
template <class T, class Q, class Sink>
static void multiply_codes(const Weight& w, Inputs in, int64_t rows, Share share, Sink sink) {
    typedef Products<T> P;
    const int64_t chunks = ceil_div(w.k, GROUP), products = ceil_div(w.k, depth_of<P>), panel_bytes = Q::head_bytes + chunks * Q::group_bytes;
    for_panels(ceil_div(w.n, NR), rows, share, [&](int64_t panel, int64_t first, int64_t count) {
        for (int64_t blocks = ceil_div(count, BLOCK * MR), b = 0; b < blocks; b++) {
            int64_t begin = first + count * b / blocks, height = first + count * (b + 1) / blocks - begin, tiles = ceil_div(height, MR);
            float totals[BLOCK][2][MR * NR];
            for (int g = 0; g < w.groups; g++) {
                const char* head = (const char*)w.panels + (panel * w.groups + g) * panel_bytes;
                for (int64_t t = 0; t < tiles; t++) memset(totals[t][g], 0, sizeof totals[t][g]);
                for (int64_t c = 0; c < chunks; c++) {
                    const char* chunk = head + Q::head_bytes + c * Q::group_bytes;
                    float words[products_of_group<P> * NR];
                    if (tiles > 1) unpack<P, Q>(chunk, words);
                    for (int64_t t = 0; t < tiles; t++) {
                        int64_t row = begin + height * t / tiles, products_before = c * products_of_group<P>;
                        ChunkInputs tile = {in.x + row * in.stride + products_before * (int64_t)sizeof(typename Format<P>::Input),
                                            in.stride,
                                            in.sums ? in.sums + row * chunks + c : nullptr,
                                            chunks,
                                            begin + height * (t + 1) / tiles - row,
                                            min(products_of_group<P>, products - products_before)};
                        if (tiles > 1) add_chunk<P, Q>(tile, chunk, words, totals[t][g]);
                        else add_chunk<P, Q>(tile, chunk, totals[t][g]);
                    }
                }
                const float* bias = w.bias ? w.bias + (panel * w.groups + g) * NR : nullptr;
                for (int64_t t = 0; t < tiles; t++)
                    for (int i = 0; i < MR; i++) OCTAVO_UNROLL for (int j = 0; j < 3; j++) {
                        float* at = totals[t][g] + i * NR + j * W;
                        vf total = Q::finish(head, j, load(at));
                        store(at, bias ? total + load(bias + j * W) : total);
                    }
            }
            for (int64_t t = 0; t < tiles; t++) {
                int64_t row = begin + height * t / tiles;
                sink(panel * NR, row, begin + height * (t + 1) / tiles - row, totals[t]);
            }
        }
    });
}

// ---- what linears call, whatever the weight: inputs, memory for them, products

template <class T>
OCTAVO_INLINE int64_t scratch_for(const Weight& w, int64_t rows) {
    return scratch_for_inputs<T>(rows, w.k) + (w.quantization == INT4 ? rows * ceil_div(w.k, GROUP) * (int64_t)sizeof(float) : 0);
}

// As `as_inputs`, with the sums of x over each chunk where minima are multiplied with these.
template <class T>
static Inputs inputs_of(const Weight& w, const T* x, int64_t stride, int64_t rows, char* to, Share share) {
    if (w.quantization != INT4) return as_inputs(x, stride, rows, w.k, to, share);
    const int64_t chunks = ceil_div(w.k, GROUP);
    float* sums = (float*)(to + scratch_for_inputs<T>(rows, w.k));
    for (int64_t r = share.begin(rows); r < share.end(rows); r++)
        for (int64_t c = 0; c < chunks; c++) {
            vf v = {};
            for (int64_t d = c * GROUP; d < min(w.k, (c + 1) * GROUP); d += W)
                v += w.k - d >= W ? load(x + r * stride + d) : load_first(x + r * stride + d, w.k - d);
            sums[r * chunks + c] = sum(v);
        }
    Inputs in = as_inputs(x, stride, rows, w.k, to, share);
    if (readable<T>(w.k)) barrier();  // as_inputs had no need of one
    in.sums = sums;
    return in;
}

template <class T, class Sink>
static void multiply_any(const Weight& w, Inputs in, int64_t rows, Share share, Sink sink) {
    if (w.quantization == INT8) multiply_codes<T, Int8>(w, in, rows, share, sink);
    else if (w.quantization == INT4) multiply_codes<T, Int4>(w, in, rows, share, sink);
    else multiply<T>(w, in, rows, share, sink);
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
