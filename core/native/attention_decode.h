// One query of a row over a part of its context, all heads: as fast as memory gives K and V.
//
// K and V are read as they lie in the cache. While scores are computed, V of the same keys is fetched; while V is summed up, K of the next
// keys (of this item, or of the one that the thread takes next).
#pragma once

#include "attention.h"

namespace octavo {
namespace OCTAVO_LEVEL {

constexpr int DECODE_ROWS = W == 16 ? 4 : 2;  // query heads that share a load of V: 16 sums of 32 registers, or 8 of 16
constexpr int TILE_VECTORS = 4;               // vectors of columns at a time

template <class T>
struct DecodeSpace {
    typedef typename Line<T>::Operand Operand;
    int64_t q_stride, sum_stride;
    Operand *q, *weights;           // [heads, q_stride], [heads, CHUNK]
    float *scores, *sums;           // [heads, CHUNK], [heads, sum_stride]
    float *highest, *total;         // [heads]
    DecodeSpace(const AttentionLayer& layer, Carver& carver) : q_stride(padded<T>(layer.k_size)), sum_stride(padded<T>(layer.v_size)) {
        q = carver.take<Operand>(layer.heads * q_stride);
        weights = carver.take<Operand>(layer.heads * CHUNK);
        scores = carver.take<float>(layer.heads * CHUNK);
        sums = carver.take<float>(layer.heads * sum_stride);
        highest = carver.take<float>(layer.heads);
        total = carver.take<float>(layer.heads);
    }
};

// q . k of W keys whose rows are `rows` elements behind k. `lines` 0: as many as `size` takes.
template <class T, int lines>
OCTAVO_INLINE vf dots(const typename Line<T>::Operand* q, const T* k, const int64_t* rows, int64_t size) {
    typedef Line<T> L;
    vf products[W];
    OCTAVO_UNROLL for (int i = 0; i < W; i++) {
        const T* row = k + rows[i];
        vf sum = {};
        if (lines) {
            OCTAVO_UNROLL for (int l = 0; l < lines; l++) sum = L::multiply(load_bits<vf>(q + l * L::size), L::read(row + l * L::size), sum);
        } else {
            int64_t whole = size / L::size;
            for (int64_t l = 0; l < whole; l++) sum = L::multiply(load_bits<vf>(q + l * L::size), L::read(row + l * L::size), sum);
            if (size % L::size) sum = L::multiply(load_bits<vf>(q + whole * L::size), L::read_first(row + whole * L::size, size % L::size), sum);
        }
        products[i] = sum;
    }
    return sums(products);
}

// Scores of n keys for all heads.
template <class T, int lines>
static void score_keys(const AttentionLayer& layer, const Operands<T>& in, const DecodeSpace<T>& space, const int64_t* slots, int64_t n) {
    const Score score(layer);
    const int64_t group = layer.group();
    for (int64_t key = 0; key < n; key += W) {
        int64_t rows[W];
        for (int i = 0; i < W; i++) rows[i] = slots[key + i] * in.k_slot_stride;
        for (int64_t h = 0; h < layer.kv_heads; h++) {
            OCTAVO_UNROLL for (int i = 0; i < W; i++)
                fetch(in.v + slots[key + i] * in.v_slot_stride + h * in.v_head_stride, layer.v_size * (int64_t)sizeof(T));
            for (int64_t g = h * group; g < (h + 1) * group; g++) {
                vf dot = dots<T, lines>(space.q + g * space.q_stride, in.k + h * in.k_head_stride, rows, layer.k_size);
                store(space.scores + g * CHUNK + key, Score::of(score, dot));
            }
        }
    }
    if (n % W)
        for (int64_t g = 0; g < layer.heads; g++)
            for (int64_t i = n; i % W; i++) space.scores[g * CHUNK + i] = HIDDEN;
}

// Scores become weights; what was summed so far is scaled down where the maximum rose.
template <class T>
static void weigh_keys(const AttentionLayer& layer, const DecodeSpace<T>& space, int64_t n) {
    for (int64_t g = 0; g < layer.heads; g++) {
        const float* scores = space.scores + g * CHUNK;
        vf top = set1(space.highest[g]), total = {};
        for (int64_t i = 0; i < n; i += W) top = max(load(scores + i), top);
        top = set1(highest(top));
        for (int64_t i = 0; i < n; i += W) {
            vf weight = exp2(load(scores + i) - top);
            total += weight;
            store(space.weights + g * CHUNK + i, weight);
        }
        vf shrink = space.highest[g] > LOWEST ? exp2(set1(space.highest[g]) - top) : vf{};
        space.total[g] = space.total[g] * shrink[0] + sum(total);
        if (top[0] == space.highest[g]) continue;
        space.highest[g] = top[0];
        float* sums = space.sums + g * space.sum_stride;
        for (int64_t d = 0; d < space.sum_stride; d += W) store(sums + d, load(sums + d) * shrink);
    }
}

// Where the next keys lie: K of W keys at a time is fetched while V of W keys is summed up.
template <class T>
struct NextKeys {
    const T* k;  // null: nothing to fetch
    const int64_t* slots;
    int64_t n, slot_stride, bytes;
};

// `rows` heads and `lines` lines of columns over n keys. `whole`: the last line is a whole one, else it has `last` elements.
template <class T, int rows, int lines, bool whole>
static void sum_values(const typename Line<T>::Operand* weights, const T* v, const int64_t* slots, int64_t slot_stride, int64_t n, int64_t last,
                       float* sums, int64_t sum_stride, NextKeys<T> next) {
    typedef Line<T> L;
    constexpr int vectors = lines * L::vectors;
    vf acc[rows][vectors];
    OCTAVO_UNROLL for (int r = 0; r < rows; r++) OCTAVO_UNROLL for (int c = 0; c < vectors; c++) acc[r][c] = load(sums + r * sum_stride + c * W);
    for (int64_t key = 0; key < n; key += L::depth) {
        const T *row = v + slots[key] * slot_stride, *second = v + slots[key + L::depth - 1] * slot_stride;
        if (next.k && key < next.n)
            OCTAVO_UNROLL for (int i = 0; i < L::depth; i++) fetch(next.k + next.slots[key + i] * next.slot_stride, next.bytes);
        vf columns[lines][L::vectors];
        OCTAVO_UNROLL for (int l = 0; l < lines; l++) {
            if (whole || l < lines - 1) L::columns(L::read(row + l * L::size), L::read(second + l * L::size), columns[l]);
            else L::columns(L::read_first(row + l * L::size, last), L::read_first(second + l * L::size, last), columns[l]);
        }
        OCTAVO_UNROLL for (int r = 0; r < rows; r++) {
            vf weight = L::broadcast(weights + r * CHUNK + key);
            OCTAVO_UNROLL for (int l = 0; l < lines; l++) OCTAVO_UNROLL for (int c = 0; c < L::vectors; c++)
                acc[r][l * L::vectors + c] = L::multiply(weight, columns[l][c], acc[r][l * L::vectors + c]);
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < rows; r++) OCTAVO_UNROLL for (int c = 0; c < vectors; c++) store(sums + r * sum_stride + c * W, acc[r][c]);
}

template <class T, int lines, bool whole>
OCTAVO_INLINE void sum_values_of(int64_t rows, const typename Line<T>::Operand* weights, const T* v, const int64_t* slots, int64_t slot_stride,
                                 int64_t n, int64_t last, float* sums, int64_t sum_stride, NextKeys<T> next) {
    switch (rows) {
        case 1: return sum_values<T, 1, lines, whole>(weights, v, slots, slot_stride, n, last, sums, sum_stride, next);
        case 2: return sum_values<T, 2, lines, whole>(weights, v, slots, slot_stride, n, last, sums, sum_stride, next);
        case 3: return sum_values<T, 3, lines, whole>(weights, v, slots, slot_stride, n, last, sums, sum_stride, next);
        case 4: return sum_values<T, 4, lines, whole>(weights, v, slots, slot_stride, n, last, sums, sum_stride, next);
    }
}

// All heads' weighted sums of V, while the next keys are fetched.
template <class T>
static void add_values(const AttentionLayer& layer, const Operands<T>& in, const DecodeSpace<T>& space, const int64_t* slots, int64_t n,
                       const int64_t* next_slots, int64_t next_n) {
    typedef Line<T> L;
    constexpr int tile = TILE_VECTORS / L::vectors;
    const int64_t group = layer.group(), lines = lines_of<T>(layer.v_size);
    for (int64_t h = 0; h < layer.kv_heads; h++) {
        NextKeys<T> next = {next_n ? in.k + h * in.k_head_stride : nullptr, next_slots, next_n, in.k_slot_stride,
                            layer.k_size * (int64_t)sizeof(T)};
        for (int64_t g = 0; g < group; g += DECODE_ROWS)
            for (int64_t l = 0; l < lines; next.k = nullptr) {
                int64_t rows = min(DECODE_ROWS, group - g), head = h * group + g, column = l * L::size;
                int64_t left = layer.v_size - column, count = left >= tile * L::size ? tile : 1;
                const auto* weights = space.weights + head * CHUNK;
                const T* v = in.v + h * in.v_head_stride + column;
                float* sums = space.sums + head * space.sum_stride + column;
                if (count == tile)
                    sum_values_of<T, tile, true>(rows, weights, v, slots, in.v_slot_stride, n, 0, sums, space.sum_stride, next);
                else if (left >= L::size)
                    sum_values_of<T, 1, true>(rows, weights, v, slots, in.v_slot_stride, n, 0, sums, space.sum_stride, next);
                else
                    sum_values_of<T, 1, false>(rows, weights, v, slots, in.v_slot_stride, n, left, sums, space.sum_stride, next);
                l += count;
            }
    }
}

template <class T>
OCTAVO_INLINE void score_keys_of(const AttentionLayer& layer, const Operands<T>& in, const DecodeSpace<T>& space, const int64_t* slots,
                                 int64_t n) {
    switch (layer.k_size % Line<T>::size ? 0 : layer.k_size / Line<T>::size) {
        case 2: return score_keys<T, 2>(layer, in, space, slots, n);
        case 4: return score_keys<T, 4>(layer, in, space, slots, n);
        case 8: return score_keys<T, 8>(layer, in, space, slots, n);
        default: return score_keys<T, 0>(layer, in, space, slots, n);
    }
}

// The item of a decoding row. `next`: what this thread does afterwards, to fetch its first keys; null: not known, or no decoding row.
template <class T>
static void decode(const AttentionLayer& layer, const AttentionStep& step, const Operands<T>& in, const AttentionItem& item,
                   const AttentionItem* next, Carver carver, float* records) {
    DecodeSpace<T> space(layer, carver);
    const T* q = in.q + item.token * in.q_token_stride;
    for (int64_t g = 0; g < layer.heads; g++) {
        to_operands(q + g * in.q_head_stride, layer.k_size, space.q + g * space.q_stride);
        space.highest[g] = LOWEST, space.total[g] = 0;
    }
    memset(space.sums, 0, layer.heads * space.sum_stride * sizeof(float));
    int64_t slots[2][CHUNK], n = min(CHUNK, item.stop - item.first);
    int64_t *now = slots[0], *then = slots[1];
    find_slots(step, item.row, item.first, n, now);
    for (int64_t key = item.first; key < item.stop; key += CHUNK) {
        score_keys_of(layer, in, space, now, n);
        weigh_keys(layer, space, n);
        int64_t left = item.stop - key - CHUNK, next_n = 0;
        if (left > 0) find_slots(step, item.row, key + CHUNK, next_n = min(CHUNK, left), then);
        else if (next) find_slots(step, next->row, next->first, next_n = min(CHUNK, next->stop - next->first), then);
        add_values(layer, in, space, now, n, then, next_n);
        int64_t* swapped = now;
        now = then, then = swapped, n = next_n;
    }
    for (int64_t g = 0; g < layer.heads; g++) {
        const State all = {space.highest[g], space.total[g], space.sums + g * space.sum_stride};
        if (item.record < 0) finish(layer, g, all, in.out + (item.token * layer.heads + g) * layer.v_size);
        else keep<T>(layer, all, records + (item.record + g) * record_size<T>(layer));
    }
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
