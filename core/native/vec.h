// The vector layer: everything that differs between processors, and the only file with intrinsics.
//
// A source that includes it is compiled once a level; OCTAVO_LEVEL names the level and becomes namespace and symbol suffix.
// Values are vectors of W floats (GCC's and Clang's vector extensions: + - * / and comparisons are the language's own).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define OCTAVO_PASTE_(a, b, c) a##b##_##c
#define OCTAVO_PASTE(a, b, c) OCTAVO_PASTE_(a, b, c)
// A function of the C ABI: OCTAVO_API(norm) is octavo_norm_avx2 at level avx2. It returns 0, or 1 where memory ran out.
#define OCTAVO_CALL(name) OCTAVO_PASTE(octavo_, name, OCTAVO_LEVEL)
#define OCTAVO_API(name) extern "C" __attribute__((visibility("default"))) int OCTAVO_CALL(name)
#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")

namespace octavo {
namespace OCTAVO_LEVEL {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

// Storage types. Python passes them as 0, 1, 2.
typedef float f32;
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
enum Type { F32 = 0, BF16 = 1, F16 = 2 };

// Call f(T()) for the storage type of that number.
template <class Function>
OCTAVO_INLINE void for_type(int type, Function f) {
    if (type == F32) f(f32());
    else if (type == BF16) f(bf16());
    else f(f16());
}

OCTAVO_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
OCTAVO_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

OCTAVO_INLINE vf set1(float x) { return x - vf{}; }
OCTAVO_INLINE vf max(vf a, vf b) {  // b where one is NaN
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
OCTAVO_INLINE vf min(vf a, vf b) { return a < b ? a : b; }

// a * b + c, rounded once where the processor can.
OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

template <class Vector, class T>
OCTAVO_INLINE Vector load_bits(const T* p) {
    Vector v;
    memcpy(&v, p, sizeof v);
    return v;
}

// ---- one float from and to 16 bits, as the vector forms below do it

OCTAVO_INLINE float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
OCTAVO_INLINE uint32_t to_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

OCTAVO_INLINE float half_to_float(uint16_t h) {
#if defined(__AVX2__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);                // infinity, NaN
    if (rest >= 0x400) return from_bits(sign | ((rest << 13) + ((127 - 15) << 23)));               // normal
    return from_bits(sign | to_bits((float)rest * 0x1p-24f));                                      // subnormal or zero
#endif
}

OCTAVO_INLINE uint16_t float_to_half(float x) {
#if defined(__AVX2__)
    return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t u = to_bits(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);                                       // NaN
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                                      // rounds to infinity
    if (rest < 0x38800000) return (uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000));  // subnormal: units of 2^-24
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - ((127 - 15) << 23)) >> 13);
#endif
}

OCTAVO_INLINE float to_float(f32 x) { return x; }
OCTAVO_INLINE float to_float(bf16 x) { return from_bits((uint32_t)x.bits << 16); }
OCTAVO_INLINE float to_float(f16 x) { return half_to_float(x.bits); }

// ---- W values of a storage type

OCTAVO_INLINE vf load(const f32* p) { return load_bits<vf>(p); }
OCTAVO_INLINE vf load(const bf16* p) { return (vf)(__builtin_convertvector(load_bits<vh>(p), vu) << 16); }
OCTAVO_INLINE vf load(const f16* p) {
    vh h = load_bits<vh>(p);
#if defined(__AVX512F__)
    return _mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
    return _mm256_cvtph_ps((__m128i)h);
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = half_to_float(h[i]);
    return v;
#endif
}

// W whole numbers of 8 bits.
OCTAVO_INLINE vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = (float)p[i];
    return v;
#endif
}

OCTAVO_INLINE vh to_bf16(vf v) {  // to nearest, ties to even
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh(v);
#else
    vu u = (vu)v;
    vu rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return __builtin_convertvector(v == v ? rounded : vu{} + 0x7fc0, vh);
#endif
}
OCTAVO_INLINE vh to_f16(vf v) {
#if defined(__AVX512F__)
    return (vh)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (vh)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
    vh h;
    for (int i = 0; i < W; i++) h[i] = float_to_half(v[i]);
    return h;
#endif
}

OCTAVO_INLINE void store(f32* p, vf v) { memcpy(p, &v, sizeof v); }
OCTAVO_INLINE void store(bf16* p, vf v) {
    vh h = to_bf16(v);
    memcpy(p, &h, sizeof h);
}
OCTAVO_INLINE void store(f16* p, vf v) {
    vh h = to_f16(v);
    memcpy(p, &h, sizeof h);
}

// The first n of W values, the others 0; only those n are touched.
template <class T>
OCTAVO_INLINE vf load_first(const T* p, int64_t n) {
    T all[W] = {};
    memcpy(all, p, n * sizeof(T));
    return load(all);
}
template <class T>
OCTAVO_INLINE void store_first(T* p, vf v, int64_t n) {
    T all[W];
    store(all, v);
    memcpy(p, all, n * sizeof(T));
}

// v as it comes back from storage in T.
OCTAVO_INLINE vf rounded(f32, vf v) { return v; }
OCTAVO_INLINE vf rounded(bf16, vf v) { return (vf)(__builtin_convertvector(to_bf16(v), vu) << 16); }
OCTAVO_INLINE vf rounded(f16, vf v) {
    f16 all[W];
    store(all, v);
    return load(all);
}

// Sum of all W, halves first.
OCTAVO_INLINE float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float all[W];
    memcpy(all, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) all[i] += all[i + half];
    return all[0];
#endif
}
OCTAVO_INLINE float highest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float all[W];
    memcpy(all, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) all[i] = all[i] > all[i + half] ? all[i] : all[i + half];
    return all[0];
#endif
}

// e^x within 2 ulp for x from -87 to 88, clamped beyond (Cephes' polynomial).
OCTAVO_INLINE vf exp(vf x) {
    x = min(max(x, set1(-87.0f)), set1(88.0f));
    const vf magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = fma(x, set1(1.44269504f), magic) - magic;
    vf r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * (vf)power;
}

// x * sigmoid(x)
OCTAVO_INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }

// 2^x for x up to 127, 0 of minus infinity, NaN of NaN (Cephes' polynomial, within 2 ulp down to -126.5).
//
// With AVX-512 nothing is clamped: keys that a query does not see have minus infinity, and a finite power that underflows takes the processor
// hundreds of cycles. It made attention of 32 queries over 544 keys 1.7 times as slow, and of a prompt of 4,000 tokens 1.2 times.
OCTAVO_INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
    vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT);
#else
    x = max(set1(-127.0f), x);
    const vf magic = set1(12582912.0f);
    vf n = (x + magic) - magic, r = x - n;
#endif
    vf p = fma(set1(1.535336188e-4f), r, set1(1.339887440e-3f));
    p = fma(p, r, set1(9.618437357e-3f));
    p = fma(p, r, set1(5.550332471e-2f));
    p = fma(p, r, set1(2.402264791e-1f));
    p = fma(p, r, set1(6.931472028e-1f));
    p = fma(p, r, set1(1.0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
#endif
}

// Whether an element of a is above b's.
OCTAVO_INLINE bool any_above(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
#else
    for (int i = 0; i < W; i++)
        if (a[i] > b[i]) return true;
    return false;
#endif
}

// The hyperbolic tangent (Cephes': a polynomial near 0, else by exp).
OCTAVO_INLINE vf tanh(vf x) {
    vf square = x * x;
    vf p = fma(set1(-5.70498872745e-3f), square, set1(2.06390887954e-2f));
    p = fma(p, square, set1(-5.37397155531e-2f));
    p = fma(p, square, set1(1.33314422036e-1f));
    p = fma(p, square, set1(-3.33332819422e-1f));
    vf near = fma(p * square, x, x), far = 1.0f - 2.0f / (exp(x + x) + 1.0f);
    vf result = square < 0.390625f ? near : far;
    return x == x ? result : x;
}

// ---- squares of W vectors

// Element i: the sum of v[i].
OCTAVO_INLINE vf sums(vf (&v)[W]) {
#if defined(__AVX512F__)
    vf a[8], b[4], c[2];
    OCTAVO_UNROLL for (int i = 0; i < 8; i++) a[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    OCTAVO_UNROLL for (int i = 0; i < 4; i++) {
        __m512d x = (__m512d)a[2 * i], y = (__m512d)a[2 * i + 1];
        b[i] = (vf)_mm512_unpacklo_pd(x, y) + (vf)_mm512_unpackhi_pd(x, y);
    }
    OCTAVO_UNROLL for (int i = 0; i < 2; i++)
        c[i] = _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88) + _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd);
    return _mm512_shuffle_f32x4(c[0], c[1], 0x88) + _mm512_shuffle_f32x4(c[0], c[1], 0xdd);
#elif defined(__AVX2__)
    vf a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    vf b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
#else
    vf all;
    for (int i = 0; i < W; i++) all[i] = sum(v[i]);
    return all;
#endif
}

// Rows become columns.
OCTAVO_INLINE void transpose(vf (&v)[W]) {
#if defined(__AVX512F__) || defined(__AVX2__)
    vf a[W], b[W];  // after b, row 4i + j holds in its 128-bit lane L the elements 4L + j of rows 4i to 4i + 3
#if defined(__AVX512F__)
    OCTAVO_UNROLL for (int i = 0; i < W; i += 2) {
        a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    OCTAVO_UNROLL for (int i = 0; i < W; i += 4) OCTAVO_UNROLL for (int j = 0; j < 2; j++) {
        b[i + 2 * j] = (vf)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + 2 + j]);
        b[i + 2 * j + 1] = (vf)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + 2 + j]);
    }
    OCTAVO_UNROLL for (int j = 0; j < 4; j++) {
        vf even0 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd0 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
        vf even1 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), odd1 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        v[j] = _mm512_shuffle_f32x4(even0, even1, 0x88);
        v[4 + j] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
        v[8 + j] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
        v[12 + j] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
#else
    OCTAVO_UNROLL for (int i = 0; i < W; i += 2) {
        a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    OCTAVO_UNROLL for (int i = 0; i < W; i += 4) OCTAVO_UNROLL for (int j = 0; j < 2; j++) {
        b[i + 2 * j] = (vf)_mm256_unpacklo_pd((__m256d)a[i + j], (__m256d)a[i + 2 + j]);
        b[i + 2 * j + 1] = (vf)_mm256_unpackhi_pd((__m256d)a[i + j], (__m256d)a[i + 2 + j]);
    }
    OCTAVO_UNROLL for (int j = 0; j < 4; j++) {
        v[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
        v[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
    }
#endif
#else
    vf all[W];
    for (int i = 0; i < W; i++)
        for (int j = 0; j < W; j++) all[i][j] = v[j][i];
    for (int i = 0; i < W; i++) v[i] = all[i];
#endif
}

// ---- pairs of bf16: a vector of 2 W elements, two to a word, for processors that multiply them so

#if defined(__AVX512BF16__)
#define OCTAVO_PAIRS 1

// As exp2, for what is rounded to bf16: within 1e-4 of it, 1/20 of what rounding changes, by a polynomial of the third degree.
OCTAVO_INLINE vf exp2_of_bf16(vf x) {
    vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
    vf p = fma(fma(fma(set1(0.0771190897f), r, set1(0.2275643945f)), r, set1(0.6951461434f)), r, set1(1.0f));
    return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

// sum + a0 b0 + a1 b1 of each word.
OCTAVO_INLINE vf multiply_pairs(vf a, vf b, vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// The first n of 2 W elements, the others 0; only those n are touched.
OCTAVO_INLINE vf load_pairs_first(const bf16* p, int64_t n) { return (vf)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p); }

// 2 W whole numbers of 8 bits.
OCTAVO_INLINE vf load_pairs(const int8_t* p) { return (vf)_mm512_cvtne2ps_pbh(load(p + W), load(p)); }

// 16 + c of the numbers c of 4 bits that begin at bit `first`, 0 to 12, of each half of a word: 16 to 31 in bf16 differ in four bits only.
OCTAVO_INLINE vf pairs_from_16(vu words, int first) {
    vu placed = first < 3 ? words << (3 - first) : words >> (first - 3);
    return (vf)_mm512_ternarylogic_epi32((__m512i)placed, _mm512_set1_epi32(0x00780078), _mm512_set1_epi32(0x41804180), 0xea);  // and, or
}

// Elements of x and y at the same place become words, in the order of `unzip_columns`.
OCTAVO_INLINE void zip_columns(vf x, vf y, vf (&words)[2]) {
    words[0] = (vf)_mm512_unpacklo_epi16((__m512i)x, (__m512i)y);
    words[1] = (vf)_mm512_unpackhi_epi16((__m512i)x, (__m512i)y);
}
OCTAVO_INLINE void unzip_columns(vf (&v)[2]) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    vf low = _mm512_permutex2var_ps(v[0], first, v[1]);
    v[1] = _mm512_permutex2var_ps(v[0], _mm512_add_epi32(first, _mm512_set1_epi32(8)), v[1]);
    v[0] = low;
}
#endif

// ---- tiles: eight registers of up to 16 rows of 64 bytes, for processors that multiply these (AMX)

#if defined(__AMX_BF16__)
#define OCTAVO_TILES 1

constexpr int TILE_HEIGHT = 16, TILE_WORDS = 16;  // rows of a tile, words of a row
constexpr int A = 6, B = 7;                       // factors; 0 to 5 are sums

// From here on sums and A have so many rows, B has all; they are zero.
OCTAVO_INLINE void configure_tiles(int64_t rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } as = {};
    as.palette = 1;
    for (int i = 0; i < 8; i++) as.row_bytes[i] = 64, as.rows[i] = (uint8_t)(i == B ? TILE_HEIGHT : rows);
    __asm__ volatile("ldtilecfg %0" ::"m"(as));
}
// Before a thread does something else: tiles in use cost every change of tasks 8 KiB.
OCTAVO_INLINE void release_tiles() { __asm__ volatile("tilerelease"); }

// Rows at p, so many bytes apart, to a tile and back.
template <int tile>
OCTAVO_INLINE void load_tile(const void* p, int64_t row_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile>
OCTAVO_INLINE void store_tile(void* p, int64_t row_bytes) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile>
OCTAVO_INLINE void clear_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// sums += A B, words of A and B being pairs of bf16.
template <int sums>
OCTAVO_INLINE void multiply_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(sums));
}
#endif

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
