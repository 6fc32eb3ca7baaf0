// Codes of 8 and 4 bits into panels, and rows of weights out of them: see weight_only.h for the layout.

#include "weight_only.h"

using namespace octavo::OCTAVO_LEVEL;
using octavo::Weight;

namespace {

// Call f(Q()) for the kind of code of that number.
template <class Function>
OCTAVO_INLINE void for_codes(int quantization, Function f) {
    if (quantization == INT8) f(Int8());
    else f(Int4());
}

template <class Q>
int64_t panel_bytes(int64_t k) {
    return Q::head_bytes + ceil_div(k, GROUP) * Q::group_bytes;
}

// One column of a panel. codes [k]; `minima` are not there for 8 bits.
template <class P>
void pack_column(Int8, char* panel, int64_t column, const uint8_t* codes, int64_t k, const float* scales, const float*) {
    ((float*)panel)[column] = *scales;
    for (int64_t d = 0; d < k; d++)
        panel[Int8::head_bytes + d / GROUP * Int8::group_bytes + Int8::code_at<P>(d % GROUP, column)] = (char)codes[d];
}
template <class P>
void pack_column(Int4, char* panel, int64_t column, const uint8_t* codes, int64_t k, const float* scales, const float* minima) {
    for (int64_t c = 0; c < ceil_div(k, GROUP); c++) {
        char* chunk = panel + c * Int4::group_bytes;
        uint16_t scale = float_to_half(scales[c]), minimum = float_to_half(minima[c]);
        memcpy(chunk + column * sizeof scale, &scale, sizeof scale);
        memcpy(chunk + (NR + column) * sizeof minimum, &minimum, sizeof minimum);
        for (int64_t d = 0; d < min(GROUP, k - c * GROUP); d++) {
            char* at = chunk + Int4::word_at(d, column);
            uint32_t word = load_bits<uint32_t>(at) | (uint32_t)codes[c * GROUP + d] << Int4::bit_of((int)d);
            memcpy(at, &word, sizeof word);
        }
    }
}

// Weights of one column and chunk.
template <class P>
void read_chunk(Int8, const char* panel, int64_t c, int64_t column, float* out) {
    const int8_t* codes = (const int8_t*)panel + Int8::head_bytes + c * Int8::group_bytes;
    for (int k = 0; k < GROUP; k++) out[k] = ((const float*)panel)[column] * (float)codes[Int8::code_at<P>(k, column)];
}
template <class P>
void read_chunk(Int4, const char* panel, int64_t c, int64_t column, float* out) {
    const char* chunk = panel + c * Int4::group_bytes;
    float scale = to_float(Int4::scales(chunk)[column]), minimum = to_float(Int4::minima(chunk)[column]);
    for (int k = 0; k < GROUP; k++)
        out[k] = (float)(load_bits<uint32_t>(chunk + Int4::word_at(k, column)) >> Int4::bit_of(k) & 15) * scale + minimum;
}

}  // namespace

// Bytes of the panels of `groups` weights [n, k] of a quantization other than WHOLE.
OCTAVO_API(codes_size)(int quantization, int64_t n, int64_t k, int groups, int64_t* bytes) {
    for_codes(quantization, [=](auto of) { *bytes = ceil_div(n, NR) * groups * panel_bytes<decltype(of)>(k); });
    return 0;
}

// codes [n, k], contiguous, into the panels of one group of `to`; scales [n, 1] (8 bits), or scales and minima [n, chunks] that are exact in
// fp16. Columns beyond n are zeros.
OCTAVO_API(pack_codes)(const Weight* to, const uint8_t* codes, const float* scales, const float* minima, int group, int threads) {
    const Weight w = *to;
    const int64_t panels = ceil_div(w.n, NR), per_column = minima ? ceil_div(w.k, GROUP) : 1;
    for_type(w.type, [=](auto type) {
        typedef Products<decltype(type)> P;
        for_codes(w.quantization, [=](auto kind) {
            typedef decltype(kind) Q;
#pragma omp parallel for num_threads(threads)
            for (int64_t p = 0; p < panels; p++) {
                char* panel = (char*)w.panels + (p * w.groups + group) * panel_bytes<Q>(w.k);
                memset(panel, 0, panel_bytes<Q>(w.k));
                for (int64_t n = p * NR; n < min(w.n, (p + 1) * NR); n++)
                    pack_column<P>(kind, panel, n % NR, codes + n * w.k, w.k, scales + n * per_column,
                                   minima ? minima + n * per_column : nullptr);
            }
        });
    });
    return 0;
}

// Rows `ids` of a weight of one group, each value rounded once -> out [count, k]: an embedding whose weight is the head's. Ids are valid.
OCTAVO_API(rows_of_codes)(const Weight* from, const int64_t* ids, int64_t count, void* out, int threads) {
    const Weight w = *from;
    for_type(w.type, [=](auto type) {
        typedef decltype(type) T;
        for_codes(w.quantization, [=](auto kind) {
            typedef decltype(kind) Q;
#pragma omp parallel for num_threads(threads)
            for (int64_t i = 0; i < count; i++)
                for (int64_t d = 0; d < w.k; d += GROUP) {
                    float values[GROUP];
                    read_chunk<Products<T>>(kind, (const char*)w.panels + ids[i] / NR * panel_bytes<Q>(w.k), d / GROUP, ids[i] % NR, values);
                    for (int64_t e = 0; e < min(GROUP, w.k - d); e += W) {
                        T* to = (T*)out + i * w.k + d + e;
                        if (w.k - d - e >= W) store(to, load(values + e));
                        else store_first(to, load(values + e), w.k - d - e);
                    }
                }
        });
    });
    return 0;
}
