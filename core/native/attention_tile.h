// Several queries over one KV head, of a row or of rows that share keys: tiles of queries by tiles of keys, as two products with a softmax in
// between (FlashAttention-2, Dao, 2023). A row of the products is one query and one of the heads that share the KV head. And one query over all
// KV heads, one head's products after the other's.
//
// K and V of a tile of keys are packed first, K across (so that one load holds W keys), V in pairs where the processor multiplies these: about
// 3 % of the work where vectors multiply, 12 % where tiles do, which saves packing a whole context once and keeping it.
//
// Tiles of keys, and the parts of TILE_PART keys that have a softmax of their own before they are joined, begin at absolute positions, and
// a key that a query does not see adds exactly nothing. So a query has the same bits in whatever pieces its prompt comes, as long as each
// has two tokens: one alone is decoded, in another order of sums.
#pragma once

#include "attention.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Queries times heads, as far as a row of the batch has them, and keys. Where the processor's tiles multiply, the rest weighs more: packing is
// shared by more rows, and K and V of fewer keys leave room in the L1 cache (9 % of a prompt's attention on a Sapphire Rapids).
#if defined(OCTAVO_TILES)
constexpr int64_t TILE_ROWS = 192, TILE_KEYS = 64;
#else
constexpr int64_t TILE_ROWS = 96, TILE_KEYS = 128;
#endif
constexpr int64_t TILE_PART = 1024;  // a multiple of TILE_KEYS

// Rows of a product: by 4 vectors these are 24 sums of 32 registers, or 8 of 16. Where the processor has tiles, those of one.
template <class T>
constexpr int PRODUCT_ROWS = W == 16 ? 6 : 2;
#if defined(OCTAVO_TILES)
template <>
constexpr int PRODUCT_ROWS<bf16> = TILE_HEIGHT;
#endif

OCTAVO_INLINE int64_t tile_tokens(const AttentionLayer& layer) { return max(1, TILE_ROWS / layer.group()); }

// Rows from one KV head to the next where an item has all of them.
template <class T>
OCTAVO_INLINE int64_t rows_of_head(int64_t group) {
    return group < PRODUCT_ROWS<T> ? group : ceil_div(group, PRODUCT_ROWS<T>) * PRODUCT_ROWS<T>;
}

template <class T>
struct TileSpace {
    typedef typename Line<T>::Operand Operand;
    int64_t rows, q_stride, sum_stride;  // rows: of the largest tile, a multiple of PRODUCT_ROWS
    Operand *q, *weights;                // [rows, q_stride], [PRODUCT_ROWS, TILE_KEYS]
    float *k, *v;                        // words [k_size / depth, TILE_KEYS], [TILE_KEYS / depth, sum_stride]
    float *dots, *sums;                  // [PRODUCT_ROWS, TILE_KEYS], [rows, sum_stride]
    float *highest, *total;              // [rows], [rows, W]: sums of lanes, which are added up at the end
    float *joined, *joined_highest, *joined_total;  // of the parts before: as sums, highest, total
    int64_t* positions;                  // [rows]
    TileSpace(const AttentionLayer& layer, Carver& carver) : q_stride(padded<T>(layer.k_size)), sum_stride(padded<T>(layer.v_size)) {
        const int64_t most = max(tile_tokens(layer) * layer.group(), layer.kv_heads * rows_of_head<T>(layer.group()));
        rows = ceil_div(most, PRODUCT_ROWS<T>) * PRODUCT_ROWS<T>;
        q = carver.take<Operand>(rows * q_stride);
        weights = carver.take<Operand>(PRODUCT_ROWS<T> * TILE_KEYS);
        k = carver.take<float>(q_stride / Line<T>::depth * TILE_KEYS);
        v = carver.take<float>(TILE_KEYS / Line<T>::depth * sum_stride);
        dots = carver.take<float>(PRODUCT_ROWS<T> * TILE_KEYS);
        sums = carver.take<float>(rows * sum_stride);
        highest = carver.take<float>(rows);
        total = carver.take<float>(rows * W);
        joined = carver.take<float>(rows * sum_stride);
        joined_highest = carver.take<float>(rows);
        joined_total = carver.take<float>(rows);
        positions = carver.take<int64_t>(rows);
    }
    // Before the first key of a part.
    void clear(int64_t live) const {
        const int64_t blocks = ceil_div(live, PRODUCT_ROWS<T>) * PRODUCT_ROWS<T>;
        for (int64_t r = 0; r < live; r++) highest[r] = LOWEST;
        memset(total, 0, blocks * W * sizeof(float));
        memset(sums, 0, blocks * sum_stride * sizeof(float));
    }
    // What a row has of this part.
    State part(int64_t r) const { return {highest[r], sum(load(total + r * W)), sums + r * sum_stride}; }
    // What a row has of all parts that were joined.
    State all(int64_t r) const { return {joined_highest[r], joined_total[r], joined + r * sum_stride}; }
    // This part joins those before it.
    void join_part(int64_t live) const {
        for (int64_t r = 0; r < live; r++) {
            State joint = all(r);
            join(joint, part(r), sum_stride);
            joined_highest[r] = joint.highest, joined_total[r] = joint.weights;
        }
    }
};

// sums += a [rows, steps] times b [steps, vectors W], words both.
template <class T, int rows, int vectors>
OCTAVO_INLINE void multiply_words(const typename Line<T>::Operand* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t steps,
                                  vf (&sums)[rows][vectors]) {
    typedef Line<T> L;
    for (int64_t s = 0; s < steps; s++) {
        vf words[vectors];
        OCTAVO_UNROLL for (int j = 0; j < vectors; j++) words[j] = load(b + s * b_stride + j * W);
        OCTAVO_UNROLL for (int i = 0; i < rows; i++) {
            vf operand = L::broadcast(a + i * a_stride + s * L::depth);
            OCTAVO_UNROLL for (int j = 0; j < vectors; j++) sums[i][j] = L::multiply(operand, words[j], sums[i][j]);
        }
    }
}

// A tile of keys of one row. Keys before the first that its queries see are that one once more, and so is the last up to a whole
// vector: only what the row wrote is ever read.
struct Keys {
    int64_t n = 0, slots[TILE_KEYS + W];
    void find(const AttentionStep& step, const AttentionItem& item, int64_t key) {
        n = min(TILE_KEYS, item.stop - key);
        const int64_t before = max(0, item.first - key);
        find_slots(step, item.row, key + before, n - before, slots + before);
        for (int64_t i = 0; i < before; i++) slots[i] = slots[before];
        for (int64_t i = n; i % W; i++) slots[i] = slots[n - 1];
    }
};

// K and V of a tile of keys and a KV head into words, zeros behind V, while those of the next tile are fetched.
template <class T>
static void pack_keys(const AttentionLayer& layer, const Operands<T>& in, int64_t kv_head, const TileSpace<T>& space, const Keys& keys,
                      const Keys& next, int64_t next_head) {
    typedef Line<T> L;
    const int64_t n = keys.n, *slots = keys.slots;
    const T *k = in.k + kv_head * in.k_head_stride, *v = in.v + kv_head * in.v_head_stride;
    const T *next_k = in.k + next_head * in.k_head_stride, *next_v = in.v + next_head * in.v_head_stride;
    const int64_t k_bytes = layer.k_size * (int64_t)sizeof(T), v_bytes = layer.v_size * (int64_t)sizeof(T);
    for (int64_t l = 0; l < lines_of<T>(layer.k_size); l++)
        for (int64_t key = 0; key < n; key += W) {
            if (l == 0 && key < next.n)
                OCTAVO_UNROLL for (int i = 0; i < W; i++) fetch(next_k + next.slots[key + i] * in.k_slot_stride, k_bytes);
            vf words[W];
            OCTAVO_UNROLL for (int i = 0; i < W; i++) words[i] = read_line(k + slots[key + i] * in.k_slot_stride, l, layer.k_size);
            transpose(words);
            OCTAVO_UNROLL for (int i = 0; i < W; i++) store(space.k + (l * W + i) * TILE_KEYS + key, words[i]);
        }
    for (int64_t key = 0; key < n; key += L::depth) {
        if (key < next.n)
            OCTAVO_UNROLL for (int i = 0; i < L::depth; i++) fetch(next_v + next.slots[key + i] * in.v_slot_stride, v_bytes);
        float* to = space.v + key / L::depth * space.sum_stride;
        for (int64_t l = 0; l < lines_of<T>(layer.v_size); l++) {
            vf words[L::vectors];
            L::columns(read_line(v + slots[key] * in.v_slot_stride, l, layer.v_size),
                       read_line(v + slots[key + L::depth - 1] * in.v_slot_stride, l, layer.v_size), words);
            OCTAVO_UNROLL for (int c = 0; c < L::vectors; c++) store(to + l * L::size + c * W, words[c]);
        }
    }
    int64_t written = ceil_div(n, L::depth);
    memset(space.v + written * space.sum_stride, 0, (TILE_KEYS / L::depth - written) * space.sum_stride * sizeof(float));
}

// A maximum stays until a score is so much higher (to base 2): weights grow to 256 at most, and what was summed is seldom scaled down.
constexpr float RISE = 8;

// Keys that a row of a tile sees, from the first key of the tile on.
struct Seen {
    int64_t from, to;
};

// Products q . k of one row become weights over `keys` keys; returns the factor by which what was summed so far shrinks: 1 while no score is
// higher than those before, which is most of the time.
template <class T>
OCTAVO_INLINE vf weigh_row(const Score& score, float* dots, int64_t keys, Seen seen, typename Line<T>::Operand* weights, float& highest_so_far,
                           float* total) {
    float factor = score.inner;
    if (score.capped || factor <= 0) {  // the highest product is not the highest score, or not by a factor
        for (int64_t i = 0; i < keys; i += W) store(dots + i, Score::of(score, load(dots + i)));
        factor = 1;
    }
    if (seen.from > 0 || seen.to < keys) {
        vi lane;
        for (int i = 0; i < W; i++) lane[i] = i;
        for (int64_t i = 0; i < keys; i += W) {
            vi key = lane + (int32_t)i;
            vf dot = load(dots + i);
            store(dots + i, (key >= (int32_t)max(seen.from, 0)) & (key < (int32_t)max(seen.to, 0)) ? dot : set1(HIDDEN));
        }
    }
    vf top = set1(highest_so_far), most = set1(HIDDEN), other = most;  // two each, to hide latencies; keys are a multiple of 2 W
    for (int64_t i = 0; i < keys; i += 2 * W) most = max(load(dots + i), most), other = max(load(dots + i + W), other);
    most = max(most, other) * factor;
    vf shrink = set1(1.0f), sums = load(total);
    if (any_above(most, top + RISE)) {
        const vf before = top;
        top = set1(highest(most));
        highest_so_far = top[0];
        if (before[0] > LOWEST) {  // else nothing was summed
            shrink = exp2(before - top);
            sums = sums * shrink;
        }
    }
    vf sum0 = {}, sum1 = {};
    for (int64_t i = 0; i < keys; i += 2 * W) {
        vf first = Line<T>::weight(fma(load(dots + i), set1(factor), -top)), second = Line<T>::weight(fma(load(dots + i + W), set1(factor), -top));
        sum0 += first, sum1 += second;
        store(weights + i, first), store(weights + i + W, second);
    }
    store(total, sums + (sum0 + sum1));
    return shrink;
}

// sums of PRODUCT_ROWS rows from `row` on = sums * shrink + weights times V of so many keys: `vectors` vectors of columns, or all.
template <class T, int vectors>
OCTAVO_INLINE void add_columns(const TileSpace<T>& space, const vf (&shrink)[PRODUCT_ROWS<T>], int64_t row, int64_t column, int64_t keys) {
    vf acc[PRODUCT_ROWS<T>][vectors];
    float* sums = space.sums + row * space.sum_stride + column;
    OCTAVO_UNROLL for (int i = 0; i < PRODUCT_ROWS<T>; i++) OCTAVO_UNROLL for (int j = 0; j < vectors; j++)
        acc[i][j] = load(sums + i * space.sum_stride + j * W) * shrink[i];
    multiply_words<T, PRODUCT_ROWS<T>, vectors>(space.weights, TILE_KEYS, space.v + column, space.sum_stride, keys / Line<T>::depth, acc);
    OCTAVO_UNROLL for (int i = 0; i < PRODUCT_ROWS<T>; i++) OCTAVO_UNROLL for (int j = 0; j < vectors; j++)
        store(sums + i * space.sum_stride + j * W, acc[i][j]);
}

template <class T>
OCTAVO_INLINE void add_values(const TileSpace<T>& space, const vf (&shrink)[PRODUCT_ROWS<T>], int64_t row, int64_t keys) {
    int64_t column = 0;
    for (; column + 4 * W <= space.sum_stride; column += 4 * W) add_columns<T, 4>(space, shrink, row, column, keys);
    for (; column + 2 * W <= space.sum_stride; column += 2 * W) add_columns<T, 2>(space, shrink, row, column, keys);
    for (; column < space.sum_stride; column += W) add_columns<T, 1>(space, shrink, row, column, keys);
}

// q . k of PRODUCT_ROWS rows from `row` on and of 4 W packed keys from `key` on. In fp32 a sum takes RUN products and is then added to the
// others: one sum over 128 products lost so many bits that outputs were off by 5e-6.
template <class T>
OCTAVO_INLINE void dots_of_rows(const TileSpace<T>& space, int64_t row, int64_t key, int64_t steps, vf (&dots)[PRODUCT_ROWS<T>][4]) {
    constexpr int64_t RUN = 32;
    const typename Line<T>::Operand* q = space.q + row * space.q_stride;
    const float* k = space.k + key;
    if (sizeof(T) < 4) return multiply_words<T, PRODUCT_ROWS<T>, 4>(q, space.q_stride, k, TILE_KEYS, steps, dots);
    for (int64_t first = 0; first < steps; first += RUN) {
        vf part[PRODUCT_ROWS<T>][4] = {};
        multiply_words<T, PRODUCT_ROWS<T>, 4>(q + first, space.q_stride, k + first * TILE_KEYS, TILE_KEYS, min(RUN, steps - first), part);
        OCTAVO_UNROLL for (int i = 0; i < PRODUCT_ROWS<T>; i++) OCTAVO_UNROLL for (int j = 0; j < 4; j++) dots[i][j] += part[i][j];
    }
}

// The same, stored.
template <class T>
OCTAVO_INLINE void multiply_keys(const AttentionLayer& layer, const TileSpace<T>& space, int64_t row, int64_t key) {
    vf dots[PRODUCT_ROWS<T>][4] = {};
    dots_of_rows(space, row, key, ceil_div(layer.k_size, Line<T>::depth), dots);
    OCTAVO_UNROLL for (int i = 0; i < PRODUCT_ROWS<T>; i++) OCTAVO_UNROLL for (int j = 0; j < 4; j++)
        store(space.dots + i * TILE_KEYS + key + j * W, dots[i][j]);
}

#if defined(OCTAVO_TILES)
// The same two products in the processor's tiles, for which pairs lie as they are wanted.

// Tiles 0 to 3 += rows of A [16, steps] times b [steps, 4 W].
OCTAVO_INLINE void multiply_rows(const bf16* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t steps) {
    for (int64_t s = 0; s < steps; s += TILE_WORDS) {
        const float* words = b + s * b_stride;
        load_tile<A>(a + 2 * s, a_stride * sizeof(bf16));
        load_tile<B>(words, b_stride * sizeof(float)), multiply_tiles<0>();
        load_tile<B>(words + W, b_stride * sizeof(float)), multiply_tiles<1>();
        load_tile<B>(words + 2 * W, b_stride * sizeof(float)), multiply_tiles<2>();
        load_tile<B>(words + 3 * W, b_stride * sizeof(float)), multiply_tiles<3>();
    }
}

OCTAVO_INLINE void multiply_keys(const AttentionLayer&, const TileSpace<bf16>& space, int64_t row, int64_t key) {
    constexpr int64_t row_bytes = TILE_KEYS * sizeof(float);
    float* dots = space.dots + key;
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    multiply_rows(space.q + row * space.q_stride, space.q_stride, space.k + key, TILE_KEYS, space.q_stride / 2);
    store_tile<0>(dots, row_bytes), store_tile<1>(dots + W, row_bytes), store_tile<2>(dots + 2 * W, row_bytes), store_tile<3>(dots + 3 * W, row_bytes);
}

OCTAVO_INLINE void add_values(const TileSpace<bf16>& space, const vf (&shrink)[TILE_HEIGHT], int64_t row, int64_t keys) {
    const int64_t row_bytes = space.sum_stride * sizeof(float);
    float* sums = space.sums + row * space.sum_stride;
    for (int i = 0; i < TILE_HEIGHT; i++)
        if (shrink[i][0] != 1.0f)
            for (int64_t d = 0; d < space.sum_stride; d += W) {
                float* at = sums + i * space.sum_stride + d;
                store(at, load(at) * shrink[i]);
            }
    int64_t column = 0;
    for (; column + 4 * W <= space.sum_stride; column += 4 * W) {
        float* at = sums + column;
        load_tile<0>(at, row_bytes), load_tile<1>(at + W, row_bytes), load_tile<2>(at + 2 * W, row_bytes), load_tile<3>(at + 3 * W, row_bytes);
        multiply_rows(space.weights, TILE_KEYS, space.v + column, space.sum_stride, keys / 2);
        store_tile<0>(at, row_bytes), store_tile<1>(at + W, row_bytes), store_tile<2>(at + 2 * W, row_bytes), store_tile<3>(at + 3 * W, row_bytes);
    }
    for (; column < space.sum_stride; column += W) {
        load_tile<0>(sums + column, row_bytes);
        for (int64_t s = 0; s < keys / 2; s += TILE_WORDS) {
            load_tile<A>(space.weights + 2 * s, TILE_KEYS * sizeof(bf16));
            load_tile<B>(space.v + s * space.sum_stride + column, row_bytes), multiply_tiles<0>();
        }
        store_tile<0>(sums + column, row_bytes);
    }
}
#endif

// PRODUCT_ROWS rows whose weights are known, and whose values are still to be added.
template <class T>
struct Weighed {
    int64_t row, keys = 0;
    vf shrink[PRODUCT_ROWS<T>];
};

// PRODUCT_ROWS rows from `row` on over the packed keys, of which they see `seen`; `live` of the rows exist. `before` has the rows before, and
// then these: values are added one block of rows later, when what was just stored as vectors can be read as tiles.
template <class T>
static void attend_rows(const AttentionLayer& layer, const TileSpace<T>& space, int64_t row, int64_t live, const Seen* seen, Weighed<T>& before) {
    constexpr int panel = 4 * W;
    int64_t last = 0, first = TILE_KEYS;
    for (int64_t i = 0; i < live; i++) last = max(last, seen[i].to), first = min(first, seen[i].from);
    if (last <= 0 || first >= TILE_KEYS) return;
    const int64_t keys = min(TILE_KEYS, ceil_div(last, panel) * panel);
    for (int64_t key = 0; key < keys; key += panel) multiply_keys(layer, space, row, key);
    if (before.keys) add_values(space, before.shrink, before.row, before.keys);
    const Score score(layer);
    before.row = row, before.keys = keys;
    for (int64_t i = 0; i < PRODUCT_ROWS<T>; i++)
        before.shrink[i] = i < live ? weigh_row<T>(score, space.dots + i * TILE_KEYS, keys, seen[i], space.weights + i * TILE_KEYS,
                                                   space.highest[row + i], space.total + (row + i) * W)
                                    : set1(1.0f);
}

// The item of a tile of queries and a KV head, or of one query and all KV heads, whose K and V of a position lie together.
// `following`: what this thread does afterwards, to fetch its first keys; null: not known, or no tile.
template <class T>
static void attend_tile(const AttentionLayer& layer, const AttentionStep& step, const Operands<T>& in, const AttentionItem& item,
                        const AttentionItem* following, Carver carver, float* records) {
    TileSpace<T> space(layer, carver);
    const int64_t group = layer.group(), size = record_size<T>(layer), rows = item.tokens * group;  // rows: of a KV head
    const int64_t first_head = max(0, item.kv_head), heads = item.kv_head < 0 ? layer.kv_heads : 1, stride = rows_of_head<T>(rows);
    const int64_t all_rows = (heads - 1) * stride + rows;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0, r = h * stride; t < item.tokens; t++)
            for (int64_t g = 0; g < group; g++, r++) {
                const T* q = in.q + (item.token + t) * in.q_token_stride + ((first_head + h) * group + g) * in.q_head_stride;
                to_operands(q, layer.k_size, space.q + r * space.q_stride);
                space.positions[r] = item.position + t;
            }
    memset(space.weights, 0, PRODUCT_ROWS<T> * TILE_KEYS * sizeof(*space.weights));
    const bool joins = item.record < 0 && item.first / item.part != (item.stop - 1) / item.part;
    if (joins) {
        for (int64_t r = 0; r < all_rows; r++) space.joined_highest[r] = LOWEST, space.joined_total[r] = 0;
        memset(space.joined, 0, all_rows * space.sum_stride * sizeof(float));
    }
    space.clear(all_rows);
#if defined(OCTAVO_TILES)
    if (PRODUCT_ROWS<T> == TILE_HEIGHT) configure_tiles(min(rows, TILE_HEIGHT));
#endif
    const int64_t begin = item.first / TILE_KEYS * TILE_KEYS;
    int64_t record = item.record;
    Keys both[2];
    both[0].find(step, item, begin);
    for (int64_t key = begin, tile = 0; key < item.stop; key += TILE_KEYS, tile++) {
        const Keys& keys = both[tile % 2];
        Keys& next = both[(tile + 1) % 2];
        const int64_t after = key + TILE_KEYS;
        int64_t next_head = first_head;
        if (after < item.stop) next.find(step, item, after);
        else if (following) next.find(step, *following, following->first / TILE_KEYS * TILE_KEYS), next_head = max(0, following->kv_head);
        else next.n = 0;
        for (int64_t h = 0; h < heads; h++) {
            pack_keys(layer, in, first_head + h, space, keys, next, next_head + h);
            Weighed<T> weighed;
            for (int64_t row = 0; row < rows; row += PRODUCT_ROWS<T>) {
                int64_t live = min(PRODUCT_ROWS<T>, rows - row), at = h * stride + row;
                Seen seen[PRODUCT_ROWS<T>];
                for (int64_t i = 0; i < live; i++) {
                    int64_t position = space.positions[at + i];
                    seen[i] = {layer.window ? position - layer.window + 1 - key : 0, min(keys.n, position + 1 - key)};
                }
                attend_rows(layer, space, at, live, seen, weighed);
            }
            if (weighed.keys) add_values(space, weighed.shrink, weighed.row, weighed.keys);
        }
        if (after % item.part && after < item.stop) continue;
        if (item.record >= 0) {
            for (int64_t h = 0; h < heads; h++)
                for (int64_t r = 0; r < rows; r++)
                    keep<T>(layer, space.part(h * stride + r), records + (record + r / group * item.record_step + h * group + r % group) * size);
            record += layer.heads;
        }
        if (joins) space.join_part(all_rows);
        if (after < item.stop) space.clear(all_rows);
    }
#if defined(OCTAVO_TILES)
    if (PRODUCT_ROWS<T> == TILE_HEIGHT) release_tiles();
#endif
    if (item.record >= 0) return;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < rows; r++) {
            const int64_t head = (first_head + h) * group + r % group, at = h * stride + r;
            finish(layer, head, joins ? space.all(at) : space.part(at), in.out + ((item.token + r / group) * layer.heads + head) * layer.v_size);
        }
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
