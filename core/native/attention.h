// Attention over a paged cache: what is computed is cut into items, each independent of the others and of the number of threads.
//
// A decoding row (one query) is cut into parts of its context, all heads in each, since all KV heads of a position lie together
// (attention_decode.h). A row of several queries is cut into tiles of queries, one KV head in each (attention_tile.h). Where the processor
// has tiles, whole parts of a decoding row's context go there too, and rows that share their first blocks do so together. An item that has
// all keys of its queries writes its output; others leave partial results, which are merged in the order of their parts.
#pragma once

#include "vec.h"

namespace octavo {

// As Python lays them out: AttentionCall in core/native/library.py, the others in plugins/kernels/cpu_paged/structures.py.

struct AttentionLayer {
    int64_t heads, kv_heads, k_size, v_size, window;  // window 0: none
    const float* sinks;                               // [heads]; null: none
    float scale, softcap;                             // softcap 0: none
    int32_t type;
    __attribute__((always_inline)) int64_t group() const { return heads / kv_heads; }
};

// The cache of a layer: k [slots, kv_heads, k_size] and v [slots, kv_heads, v_size], strides in elements; the last dimension has no gaps.
struct AttentionCache {
    char* k;
    int64_t k_slot_stride, k_head_stride;
    char* v;
    int64_t v_slot_stride, v_head_stride;
};

struct AttentionStep {
    const int32_t *query_start, *seq_lens, *places;  // places: starts of regions [rows], or a block table [rows, place_stride]
    int64_t place_stride, rows, tokens, block_size;  // block_size 0: regions
};

struct AttentionItem {
    int32_t row, token, tokens, position;  // queries: `tokens` of the batch from `token` on, the first at `position` of its row
    int32_t kv_head;                       // -1: all
    int32_t first, stop;                   // keys; none: the output is zeros
    int32_t part;                          // keys that have a softmax of their own before they are joined to others
    int64_t record, record_step;           // of the first query, head and part; from a query to the next. -1: the item is whole
};

// A query whose partial results are joined, in the order of the parts: records [parts, heads] from `record` on.
struct AttentionMerge {
    int32_t token, parts;
    int64_t record;
};

// What the layers of one shape share in a step.
struct AttentionPlan {
    const AttentionStep* step;
    const int64_t* slots;  // [tokens], where K and V of the tokens are written; below 0: nowhere
    const AttentionItem* items;
    const AttentionMerge* merges;
    int64_t num_items, num_merges;
    char* memory;  // of each thread `thread_bytes`, then the partial results; whole cache lines
    int64_t thread_bytes;
    int32_t threads;
};

// One layer's attention in a step.
struct AttentionCall {
    const AttentionLayer* layer;
    const AttentionCache* cache;
    const AttentionPlan* plan;
};

namespace OCTAVO_LEVEL {

constexpr int64_t CHUNK = 128;  // keys between two looks at the softmax's maximum
constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // a maximum before there was a key: exp2(LOWEST - LOWEST) is 1, not NaN
constexpr float HIDDEN = -INFINITY;

// How rows of K and V are multiplied: `size` elements at a time, which are W words as K, and `vectors` vectors of columns as V.
// An Operand is q or a softmax weight, which is 2^x; `depth` of them make a word.
template <class T>
struct Line {
    typedef f32 Operand;
    static constexpr int size = W, vectors = 1, depth = 1;
    OCTAVO_INLINE vf read(const T* p) { return load(p); }
    OCTAVO_INLINE vf read_first(const T* p, int64_t n) { return load_first(p, n); }
    OCTAVO_INLINE vf broadcast(const Operand* p) { return set1(*p); }
    OCTAVO_INLINE vf multiply(vf a, vf b, vf sum) { return fma(a, b, sum); }
    OCTAVO_INLINE vf weight(vf x) { return exp2(x); }
    OCTAVO_INLINE void columns(vf row, vf, vf (&to)[1]) { to[0] = row; }
    OCTAVO_INLINE void natural_order(vf (&)[1]) {}
};

#if defined(OCTAVO_PAIRS)
template <>
struct Line<bf16> {
    typedef bf16 Operand;
    static constexpr int size = 2 * W, vectors = 2, depth = 2;
    OCTAVO_INLINE vf read(const bf16* p) { return load_bits<vf>(p); }
    OCTAVO_INLINE vf read_first(const bf16* p, int64_t n) { return load_pairs_first(p, n); }
    OCTAVO_INLINE vf broadcast(const Operand* p) { return set1(from_bits(load_bits<uint32_t>(p))); }
    OCTAVO_INLINE vf multiply(vf a, vf b, vf sum) { return multiply_pairs(a, b, sum); }
    OCTAVO_INLINE vf weight(vf x) { return exp2_of_bf16(x); }
    OCTAVO_INLINE void columns(vf row, vf next, vf (&to)[2]) { zip_columns(row, next, to); }
    OCTAVO_INLINE void natural_order(vf (&v)[2]) { unzip_columns(v); }
};
#endif

template <class T>
OCTAVO_INLINE int64_t lines_of(int64_t size) {
    return ceil_div(size, Line<T>::size);
}
template <class T>
OCTAVO_INLINE int64_t padded(int64_t size) {
    return lines_of<T>(size) * Line<T>::size;
}

// Line l of a row of `size` elements.
template <class T>
OCTAVO_INLINE vf read_line(const T* row, int64_t l, int64_t size) {
    int64_t left = size - l * Line<T>::size;
    return left >= Line<T>::size ? Line<T>::read(row + l * Line<T>::size) : Line<T>::read_first(row + l * Line<T>::size, left);
}

// q [size] as operands, zeros up to a whole line.
template <class T>
OCTAVO_INLINE void to_operands(const T* q, int64_t size, typename Line<T>::Operand* to) {
    if (Line<T>::depth == 2) {
        memset(to, 0, padded<T>(size) * sizeof(*to));
        memcpy(to, q, size * sizeof(T));
        return;
    }
    for (int64_t d = 0; d < size; d += W) store((f32*)to + d, size - d >= W ? load(q + d) : load_first(q + d, size - d));
}

// The cache of a layer and the step's q and output; strides in elements.
template <class T>
struct Operands {
    const T* q;
    int64_t q_token_stride, q_head_stride;
    const T* k;
    int64_t k_slot_stride, k_head_stride;
    const T* v;
    int64_t v_slot_stride, v_head_stride;
    T* out;  // [tokens, heads, v_size]
};

// What a layer makes of q . k, in the logarithm to base 2.
struct Score {
    float inner, cap;
    bool capped;
    explicit Score(const AttentionLayer& layer)
        : inner(layer.softcap ? layer.scale / layer.softcap : layer.scale * LOG2E), cap(layer.softcap * LOG2E), capped(layer.softcap != 0) {}
    OCTAVO_INLINE vf of(const Score& s, vf dot) { return __builtin_expect(s.capped, 0) ? s.cap * tanh(dot * s.inner) : dot * s.inner; }
};

// Slots of the positions first to first + n - 1 of a row; the last is repeated up to a whole number of vectors, so that nothing but what
// the row wrote is ever read.
OCTAVO_INLINE void find_slots(const AttentionStep& step, int64_t row, int64_t first, int64_t n, int64_t* slots) {
    if (step.block_size) {
        const int32_t* table = step.places + row * step.place_stride + first / step.block_size;
        int64_t offset = first % step.block_size;
        for (int64_t i = 0; i < n; table++, offset = 0) {
            int64_t slot = *table * step.block_size, stop = min(n, i + step.block_size - offset);
            for (; i < stop; i++) slots[i] = slot + offset++;
        }
    } else {
        for (int64_t i = 0; i < n; i++) slots[i] = step.places[row] + first + i;
    }
    for (int64_t i = n; i % W; i++) slots[i] = slots[n - 1];
}

// Fetch a row into the L2 cache. At the bandwidth of memory the next keys must be on their way before they are asked for: on a Zen 4 it
// halved the decode of 64 rows of 256 positions, from 22 to 12 ms a step of 30 layers.
OCTAVO_INLINE void fetch(const void* p, int64_t bytes) {
    __builtin_prefetch(p, 0, 2);
    if (bytes > 64) __builtin_prefetch((const char*)p + 64, 0, 2);
    for (int64_t b = 128; __builtin_expect(b < bytes, 0); b += 64) __builtin_prefetch((const char*)p + b, 0, 2);
}

// Pieces of a thread's memory, one after another; without memory it only counts.
struct Carver {
    uintptr_t at;
    template <class Piece>
    Piece* take(int64_t n) {
        uintptr_t piece = at;
        at += ceil_div(n * (int64_t)sizeof(Piece), 64) * 64;
        return (Piece*)piece;
    }
};

// ---- results

// Floats of a partial result: the maximum, the sum of weights, then from W on the weighted sum of V, in the order of `columns`.
template <class T>
OCTAVO_INLINE int64_t record_size(const AttentionLayer& layer) {
    return W + padded<T>(layer.v_size);
}

// sum [size, in the order of `columns`] * inverse -> out.
template <class T>
OCTAVO_INLINE void divide(const float* sum, float inverse, int64_t size, T* out) {
    for (int64_t d = 0; d < size; d += Line<T>::size) {
        vf v[Line<T>::vectors];
        OCTAVO_UNROLL for (int i = 0; i < Line<T>::vectors; i++) v[i] = load(sum + d + i * W) * inverse;
        Line<T>::natural_order(v);
        for (int i = 0; i < Line<T>::vectors && d + i * W < size; i++) {
            int64_t left = size - d - i * W;
            if (left >= W) store(out + d + i * W, v[i]);
            else store_first(out + d + i * W, v[i], left);
        }
    }
}

// What one query and head have of the keys so far: the highest score, the sum of weights, the weighted sum of V.
struct State {
    float highest, weights;
    float* sum;
};

// a = a and b, whose keys come later; `size` floats of their sums, whole vectors. Of nothing and b it is b, to the bit.
OCTAVO_INLINE void join(State& a, const State& b, int64_t size) {
    const float top = b.highest > a.highest ? b.highest : a.highest;
    const vf shrink_a = a.highest > LOWEST ? exp2(set1(a.highest - top)) : vf{}, shrink_b = exp2(set1(b.highest - top));
    a.highest = top;
    a.weights = a.weights * shrink_a[0] + b.weights * shrink_b[0];
    for (int64_t d = 0; d < size; d += W) store(a.sum + d, load(a.sum + d) * shrink_a + load(b.sum + d) * shrink_b);
}

// The output of one query and head over all its keys. A sink is a key without a value; it comes last, so that the sums before it are the
// same wherever a context was cut.
template <class T>
OCTAVO_INLINE void finish(const AttentionLayer& layer, int64_t head, const State& state, T* out) {
    float scale = 1.0f, weights = state.weights;
    if (layer.sinks) {
        const float sink = layer.sinks[head] * LOG2E, top = sink > state.highest ? sink : state.highest;
        scale = exp2(set1(state.highest - top))[0];
        weights = weights * scale + exp2(set1(sink - top))[0];
    }
    divide(state.sum, scale / weights, layer.v_size, out);
}

// What one query and head have of a part.
template <class T>
OCTAVO_INLINE void keep(const AttentionLayer& layer, const State& state, float* record) {
    record[0] = state.highest;
    record[1] = state.weights;
    memcpy(record + W, state.sum, padded<T>(layer.v_size) * sizeof(float));
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo

// Of attention.cpp.
OCTAVO_API(attention)
(const octavo::AttentionLayer* layer, const octavo::AttentionCache* cache, const octavo::AttentionPlan* plan, const void* q,
 int64_t q_token_stride, int64_t q_head_stride, char* k, int64_t k_token_stride, int64_t k_head_stride, char* v, int64_t v_token_stride,
 int64_t v_head_stride, void* out);
