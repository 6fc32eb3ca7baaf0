// Products of activations [rows, k] and a packed weight: out[r, n] = sum over k of x[r, k] * weight[n, k] (+ bias[n]).
//
// A packed weight is a list of panels of NR = 3 W columns. Within a panel a step holds one k (bf16: two, a pair in a 32-bit word) of all NR
// columns, so that three vector loads serve every row of a tile. A tile is up to MR rows of one panel; its MR * 3 sums stay in registers.
// On a Zen 4 with vdpbf16ps this reaches 446 GFLOP/s on two cores, where torch's linears reach 300 at 64 rows.
//
// An element of the result is one sum that goes through k in order, in every tile height and on every thread, so a row's result depends
// on nothing but the row (in tiles of the processor's it goes through 32 ks at a time, always the same). What is done with finished tiles (rounding, residual, activation, argmax) is the caller's `sink`.
#pragma once

#include <omp.h>

#include "vec.h"

namespace octavo {

// As Python's `PackedLinear` (core/native/library.py) lays it out.
struct Weight {
    const void* panels;
    const float* bias;  // [groups * n padded to NR], in the order of the panels; null: none
    int64_t n, k;       // outputs of a group, inputs
    int32_t type, groups;  // groups 2: panels of gate and up in turn, n columns each
    int32_t quantization;  // of weight_only.h; 0: panels hold weights of `type`
};

// Memory of the calling thread, kept for the next call; null: there is none left. (processor.cpp)
void* scratch(int64_t bytes);

namespace OCTAVO_LEVEL {

constexpr int NR = 3 * W;
constexpr int MR = W == 16 ? 8 : 4;  // rows of a tile in vector registers; sums: 24 of 32 registers, or 12 of 16

// How weights of a type lie in panels, and what they are multiplied with.
//   Word: of one column and step; `depth` of k; multiplied in `phases` products
//   Input: what is read of x for one product; `direct`: x as it is in memory will do
//   height: rows of a tile at most
template <class T>
struct Format;

template <>
struct Format<f32> {
    typedef float Word;
    typedef float Input;
    static constexpr int depth = 1, phases = 1, height = MR;
    static constexpr bool direct = true;
    template <int phase>
    OCTAVO_INLINE vf weight(const Word* p) { return load_bits<vf>(p); }
    OCTAVO_INLINE vf input(const char* p) { return set1(from_bits(load_bits<uint32_t>(p))); }
    OCTAVO_INLINE vf multiply(vf a, vf b, vf sum) { return fma(a, b, sum); }
};

template <>
struct Format<f16> : Format<f32> {
    typedef f16 Word;
    static constexpr bool direct = false;
    template <int phase>
    OCTAVO_INLINE vf weight(const Word* p) { return load(p); }
};

#if defined(__AVX512BF16__)
template <>
struct Format<bf16> {
    typedef uint32_t Word;
    typedef uint32_t Input;  // a pair
    static constexpr int depth = 2, phases = 1;
#if defined(OCTAVO_TILES)
    static constexpr int height = 2 * TILE_HEIGHT;
#else
    static constexpr int height = MR;
#endif
    static constexpr bool direct = true;
    template <int phase>
    OCTAVO_INLINE vf weight(const Word* p) { return load_bits<vf>(p); }
    OCTAVO_INLINE vf input(const char* p) { return set1(from_bits(load_bits<uint32_t>(p))); }
    OCTAVO_INLINE vf multiply(vf a, vf b, vf sum) { return multiply_pairs(a, b, sum); }
};
#else
template <>
struct Format<bf16> : Format<f32> {
    typedef uint32_t Word;
    static constexpr int depth = 2, phases = 2;
    static constexpr bool direct = false;
    template <int phase>
    OCTAVO_INLINE vf weight(const Word* p) {
        vu pair = load_bits<vu>(p);
        return (vf)(phase == 0 ? pair << 16 : pair & 0xffff0000u);
    }
};
#endif

// Bytes between what is read once and what is fetched meanwhile: from a panel on into the next.
constexpr int64_t READ_AHEAD = 8192;

// What is to be fetched into the L2 cache while a tile is computed: `lines` cache lines every four steps.
struct Ahead {
    const char* start;
    int lines;
};

template <class T>
constexpr int lines_of_four_steps() {
    return 4 * NR * (int)sizeof(typename Format<T>::Word) / 64;
}

// sums += x * weights of one phase of a step.
template <class T, int rows, int phase>
OCTAVO_INLINE void product(const char* x, int64_t x_stride, const typename Format<T>::Word* words, vf (&sums)[rows][3]) {
    typedef Format<T> F;
    vf w[3];
    OCTAVO_UNROLL for (int j = 0; j < 3; j++) w[j] = F::template weight<phase>(words + j * W);
    OCTAVO_UNROLL for (int i = 0; i < rows; i++) {
        vf a = F::input(x + i * x_stride + phase * sizeof(typename F::Input));
        OCTAVO_UNROLL for (int j = 0; j < 3; j++) sums[i][j] = F::multiply(a, w[j], sums[i][j]);
    }
}

template <class T, int rows>
OCTAVO_INLINE void step(const char* x, int64_t x_stride, const typename Format<T>::Word* words, vf (&sums)[rows][3]) {
    product<T, rows, 0>(x, x_stride, words, sums);
    if (Format<T>::phases == 2) product<T, rows, Format<T>::phases - 1>(x, x_stride, words, sums);
}

// rows x NR sums over all steps of one panel -> out [rows, NR].
template <class T, int rows>
static __attribute__((noinline)) void tile(const char* x, int64_t x_stride, const typename Format<T>::Word* panel, int64_t steps,
                                           const float* bias, Ahead ahead, float* out) {
    typedef Format<T> F;
    constexpr int64_t input_bytes = F::phases * sizeof(typename F::Input);
    vf sums[rows][3] = {};
    constexpr int lines = lines_of_four_steps<T>();
    int64_t s = 0;
    for (; s + 4 <= steps; s += 4) {
        if (rows == 1) {  // as fast as memory gives: fetch the panel itself, and on into the next, 4 KiB before it is read
            OCTAVO_UNROLL for (int q = 0; q < lines; q++)
                __builtin_prefetch((const char*)(panel + s * NR) + 4096 + q * 64, 0, 3);
        } else {
            for (int q = 0; q < ahead.lines; q++) __builtin_prefetch(ahead.start + q * 64, 0, 2);
            ahead.start += ahead.lines * 64;
        }
        OCTAVO_UNROLL for (int u = 0; u < 4; u++) step<T, rows>(x + (s + u) * input_bytes, x_stride, panel + (s + u) * NR, sums);
    }
    for (; s < steps; s++) step<T, rows>(x + s * input_bytes, x_stride, panel + s * NR, sums);
    OCTAVO_UNROLL for (int i = 0; i < rows; i++) OCTAVO_UNROLL for (int j = 0; j < 3; j++)
        store(out + i * NR + j * W, bias ? sums[i][j] + load(bias + j * W) : sums[i][j]);
}

template <class T>
static void tile_of(int64_t rows, const char* x, int64_t x_stride, const typename Format<T>::Word* panel, int64_t steps,
                           const float* bias, Ahead ahead, float* out) {
    switch (rows) {
        case 1: return tile<T, 1>(x, x_stride, panel, steps, bias, ahead, out);
        case 2: return tile<T, 2>(x, x_stride, panel, steps, bias, ahead, out);
        case 3: return tile<T, 3>(x, x_stride, panel, steps, bias, ahead, out);
        case 4: return tile<T, 4>(x, x_stride, panel, steps, bias, ahead, out);
    }
    if (MR == 8) switch (rows) {
            case 5: return tile<T, MR == 8 ? 5 : 1>(x, x_stride, panel, steps, bias, ahead, out);
            case 6: return tile<T, MR == 8 ? 6 : 1>(x, x_stride, panel, steps, bias, ahead, out);
            case 7: return tile<T, MR == 8 ? 7 : 1>(x, x_stride, panel, steps, bias, ahead, out);
            case 8: return tile<T, MR == 8 ? 8 : 1>(x, x_stride, panel, steps, bias, ahead, out);
        }
}

#if defined(OCTAVO_TILES)
// Rows of pairs in the processor's own tiles: 16 words of k at a time, of which a panel holds three tiles of columns as they are wanted. Words
// that are left are multiplied as vectors. One row too goes this way, since the sums' order is not that of vdpbf16ps.

OCTAVO_INLINE void fetch_lines(Ahead& ahead, int lines) {
    for (int q = 0; q < lines; q++) __builtin_prefetch(ahead.start + q * 64, 0, 2);
    ahead.start += lines * 64;
}

// More than 16 rows are two tiles, the second of which ends with the last row and may begin within the first: columns are read once for both,
// which made linears of 64 and 512 rows 10 to 15 % faster on a Sapphire Rapids.
template <bool two>
static __attribute__((noinline)) void tile_of_pairs(int64_t rows, const char* x, int64_t x_stride, const uint32_t* panel, int64_t steps,
                                                    const float* bias, Ahead ahead, float* out) {
    constexpr int64_t row_bytes = NR * sizeof(uint32_t);
    const int64_t height = two ? ceil_div(rows, 2) : rows, second = rows - height;
    const int fetched = ceil_div(ahead.lines * TILE_WORDS / 4, 3);  // lines beside a tile of columns
    configure_tiles(height);
    int64_t s = 0;
    for (; s + TILE_WORDS <= steps; s += TILE_WORDS) {
        const uint32_t* words = panel + s * NR;
        const char *first_rows = x + s * sizeof(uint32_t), *second_rows = first_rows + second * x_stride;
        load_tile<A>(first_rows, x_stride);
        fetch_lines(ahead, fetched);
        load_tile<B>(words, row_bytes), multiply_tiles<0>();
        if (two) load_tile<A>(second_rows, x_stride), multiply_tiles<3>();
        fetch_lines(ahead, fetched);
        load_tile<B>(words + W, row_bytes);
        if (two) multiply_tiles<4>(), load_tile<A>(first_rows, x_stride);
        multiply_tiles<1>();
        fetch_lines(ahead, fetched);
        load_tile<B>(words + 2 * W, row_bytes), multiply_tiles<2>();
        if (two) load_tile<A>(second_rows, x_stride), multiply_tiles<5>();
    }
    store_tile<0>(out, row_bytes), store_tile<1>(out + W, row_bytes), store_tile<2>(out + 2 * W, row_bytes);
    float* after = out + second * NR;
    if (two) store_tile<3>(after, row_bytes), store_tile<4>(after + W, row_bytes), store_tile<5>(after + 2 * W, row_bytes);
    if (s == steps && !bias) return;
    for (int64_t i = 0; i < rows; i++) {
        vf sums[1][3];
        OCTAVO_UNROLL for (int j = 0; j < 3; j++) sums[0][j] = load(out + i * NR + j * W);
        for (int64_t r = s; r < steps; r++) step<bf16, 1>(x + i * x_stride + r * sizeof(uint32_t), 0, panel + r * NR, sums);
        OCTAVO_UNROLL for (int j = 0; j < 3; j++) store(out + i * NR + j * W, bias ? sums[0][j] + load(bias + j * W) : sums[0][j]);
    }
}

template <>
[[maybe_unused]] void tile_of<bf16>(int64_t rows, const char* x, int64_t x_stride, const uint32_t* panel, int64_t steps, const float* bias,
                                    Ahead ahead, float* out) {
    if (rows > TILE_HEIGHT) tile_of_pairs<true>(rows, x, x_stride, panel, steps, bias, ahead, out);
    else tile_of_pairs<false>(rows, x, x_stride, panel, steps, bias, ahead, out);
}
#endif

// ---- activations in the form that tiles read

// x with rows `stride` bytes apart.
struct Inputs {
    const char* x;
    int64_t stride;
    const float* sums = nullptr;  // where weight_only.h needs them
};

template <class T>
OCTAVO_INLINE int64_t steps_of(int64_t k) {
    return ceil_div(k, Format<T>::depth);
}

// Whether rows of x [., k] can be read as they lie in memory: no conversion, and no part of a step beyond k.
template <class T>
OCTAVO_INLINE bool readable(int64_t k) {
    return Format<T>::direct && k % Format<T>::depth == 0;
}

// Bytes of a converted row, whole cache lines.
template <class T>
OCTAVO_INLINE int64_t converted_bytes(int64_t k) {
    return ceil_div(steps_of<T>(k) * Format<T>::phases * (int64_t)sizeof(typename Format<T>::Input), 64) * 64;
}

// One row of k values as inputs, zeros up to a whole step.
template <class T>
static void convert_row(const T* x, int64_t k, char* to) {
    if (Format<T>::direct) {
        memcpy(to, x, k * sizeof(T));
        memset(to + k * sizeof(T), 0, (steps_of<T>(k) * Format<T>::depth - k) * sizeof(T));
    } else {
        float* out = (float*)to;
        int64_t d = 0;
        for (; d + W <= k; d += W) store(out + d, load(x + d));
        if (d < k) store_first(out + d, load_first(x + d, k - d), k - d);
        if (steps_of<T>(k) * Format<T>::depth > k) out[k] = 0;
    }
}

// ---- sharing out

// Rows are computed in slabs of so many: what a call keeps in scratch memory does not grow with the step, and lies in the L2 cache.
constexpr int64_t SLAB = 512;

// Call f(first row, rows) for each slab, until one returns a status that is not 0, which is returned.
template <class Function>
OCTAVO_INLINE int in_slabs(int64_t rows, Function f) {
    int status = 0;
    for (int64_t first = 0; first < rows && !status; first += SLAB) status = f(first, min(SLAB, rows - first));
    return status;
}

// The address of an element of a tensor of some type; null of null.
OCTAVO_INLINE const char* at(const void* start, int64_t element, int type) {
    return start ? (const char*)start + element * (type == F32 ? 4 : 2) : nullptr;
}

struct Share {
    int thread, threads;
    int64_t begin(int64_t n) const { return n * thread / threads; }
    int64_t end(int64_t n) const { return n * (thread + 1) / threads; }
};

// Call f(share) on each of `threads` threads. OpenMP may give fewer.
template <class Function>
OCTAVO_INLINE void in_parallel(int threads, Function f) {
#pragma omp parallel num_threads(threads)
    {
        f(Share{omp_get_thread_num(), omp_get_num_threads()});
#if defined(OCTAVO_TILES)
        release_tiles();
#endif
    }
}

OCTAVO_INLINE void barrier() {
#pragma omp barrier
}

// This thread's share of converting x [rows, k], `stride` elements apart, into `to`; the others' are there after the barrier.
template <class T>
static Inputs as_inputs(const T* x, int64_t stride, int64_t rows, int64_t k, char* to, Share share) {
    if (readable<T>(k)) return {(const char*)x, stride * (int64_t)sizeof(T)};
    int64_t bytes = converted_bytes<T>(k);
    for (int64_t r = share.begin(rows); r < share.end(rows); r++) convert_row(x + r * stride, k, to + r * bytes);
    barrier();
    return {to, bytes};
}

template <class T>
OCTAVO_INLINE int64_t scratch_for_inputs(int64_t rows, int64_t k) {
    return readable<T>(k) ? 0 : rows * converted_bytes<T>(k);
}

// Call f(panel, first row, number of rows) for this thread's share: whole panels, so that a weight is read once; where these are few for many
// threads, parts of the rows too, of MR at least.
template <class Function>
OCTAVO_INLINE void for_panels(int64_t panels, int64_t rows, Share share, Function f) {
    int64_t parts = 1;
    while (panels * parts < 4 * share.threads && rows >= 2 * parts * MR && share.threads > 1) parts *= 2;
    for (int64_t item = share.begin(panels * parts); item < share.end(panels * parts); item++) {
        int64_t part = item / panels, first = rows * part / parts;
        f(item % panels, first, rows * (part + 1) / parts - first);
    }
}

// This thread's share of all tiles. For each, sink(column, row, count, sums): sums [groups][height * NR] of `count` rows from `row` on and of the
// columns from `column` on, as many of NR as there are.
template <class T, class Sink>
static void multiply(const Weight& w, Inputs in, int64_t rows, Share share, Sink sink) {
    typedef typename Format<T>::Word Word;
    constexpr int height_most = Format<T>::height;
    const int64_t steps = steps_of<T>(w.k), panel_words = steps * NR, panels = ceil_div(w.n, NR);
    const Word* words = (const Word*)w.panels;
    for_panels(panels, rows, share, [&](int64_t panel, int64_t first, int64_t count) {
        int64_t tiles = ceil_div(count, height_most);
        const Word* at = words + panel * w.groups * panel_words;
        // While this panel's tiles are computed the next panel is fetched, in equal parts by the first six tiles at most; a single tile, which
        // reads weights at the speed of memory, fetches what it reads next itself.
        int64_t fetching = max(1, min(tiles, 6)), per_tile = ceil_div(lines_of_four_steps<T>(), fetching);
        const char* next = (const char*)(at + w.groups * panel_words);
        float sums[2][height_most * NR];
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = first + count * t / tiles, height = first + count * (t + 1) / tiles - row;  // even heights: 5 + 4, not 8 + 1
            for (int g = 0; g < w.groups; g++) {
                Ahead ahead = {next + (t * w.groups + g) * per_tile * 64 * (steps / 4), t < fetching ? (int)per_tile : 0};
                if (tiles == 1) ahead = {(const char*)(at + g * panel_words) + READ_AHEAD, lines_of_four_steps<T>()};
                tile_of<T>(height, in.x + row * in.stride, in.stride, at + g * panel_words, steps,
                           w.bias ? w.bias + (panel * w.groups + g) * NR : nullptr, ahead, sums[g]);
            }
            sink(panel * NR, row, height, sums);
        }
    });
}

// What finished tiles become.

// out = sums (+ what stands in `add`), rounded once. `add` may be `out`.
template <class T>
struct Store {
    T* out;
    int64_t stride;
    const T* add;
    int64_t add_stride, n;
    template <int size>
    void operator()(int64_t column, int64_t row, int64_t count, float (&sums)[2][size]) const {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < NR && column + j < n; j += W) {
                T* to = out + (row + i) * stride + column + j;
                const T* from = add ? add + (row + i) * add_stride + column + j : nullptr;
                vf v = load(&sums[0][i * NR + j]);
                int64_t left = n - column - j;
                if (left >= W) store(to, from ? load(from) + v : v);
                else store_first(to, from ? load_first(from, left) + v : v, left);
            }
    }
};

// out = silu(gate) * up, rounded once.
template <class T>
struct StoreGated {
    T* out;
    int64_t stride, n;
    template <int size>
    void operator()(int64_t column, int64_t row, int64_t count, float (&sums)[2][size]) const {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < NR && column + j < n; j += W) {
                T* to = out + (row + i) * stride + column + j;
                vf v = silu(load(&sums[0][i * NR + j])) * load(&sums[1][i * NR + j]);
                int64_t left = n - column - j;
                if (left >= W) store(to, v);
                else store_first(to, v, left);
            }
    }
};

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
