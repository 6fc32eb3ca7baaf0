// Attention of a layer: the plan of a step (once), and its execution (once a layer).

#include <omp.h>

#include "attention.h"
#include "attention_decode.h"
#include "attention_tile.h"
#include "attention_write.h"

using namespace octavo;
using namespace octavo::OCTAVO_LEVEL;

namespace {

// A context is cut by its own length alone, so that a row has the same result in any batch and on any number of threads.
constexpr int64_t DECODE_PART = 256, MOST_PARTS = 16;  // keys of a part of a decoding row, at least; parts, at most
constexpr int64_t FEW_TOKENS = 64;                    // parts of a row of few queries (drafts, the end of a prompt) are items of their own
constexpr int64_t FEW_KEYS = 1024;                    // keys of a decoding row that go through tiles as one item; chosen on two cores

// Whether whole parts of a decoding row's context go through the processor's tiles, where rows that share them go together.
OCTAVO_INLINE bool decodes_in_tiles([[maybe_unused]] const AttentionLayer& layer) {
#if defined(OCTAVO_TILES)
    return layer.type == BF16;
#else
    return false;
#endif
}

struct Counts {
    int64_t items, merges, records;
};

// Writes items and merges, or counts them where there is no memory yet.
struct Planner {
    const AttentionLayer& layer;
    const AttentionStep& step;
    AttentionItem* items;
    AttentionMerge* merges;
    Counts n;

    void put(const AttentionItem& item) {
        if (items) items[n.items] = item;
        n.items++;
    }
    void put(const AttentionMerge& merge) {
        if (merges) merges[n.merges] = merge;
        n.merges++;
    }

    // The keys [item.first, stop), cut every `span` keys from `origin` on; item.record is that of the part that begins there.
    void cut(AttentionItem item, int64_t stop, int64_t origin, int64_t span) {
        const int64_t first = item.first, record = item.record;
        for (int64_t at = origin; at < stop; at += span) {
            item.first = (int32_t)max(first, at);
            item.stop = (int32_t)min(stop, at + span);
            item.record = record < 0 ? record : record + (at - origin) / item.part * layer.heads;
            put(item);
        }
    }

    // The same for one KV head after the other.
    void cut_heads(AttentionItem item, int64_t stop, int64_t origin, int64_t span) {
        const int64_t record = item.record;
        for (int64_t h = 0; h < layer.kv_heads; h++) {
            item.kv_head = (int32_t)h;
            item.record = record < 0 ? record : record + h * layer.group();
            cut(item, stop, origin, span);
        }
    }

    // Room for the partial results of the queries of an item.
    void take_records(AttentionItem& item, int64_t parts) {
        item.record = n.records, item.record_step = parts * layer.heads;
        n.records += item.tokens * item.record_step;
    }

    // The same, with what joins them.
    void merged(AttentionItem& item, int64_t parts) {
        take_records(item, parts);
        for (int32_t t = 0; t < item.tokens; t++) put(AttentionMerge{item.token + t, (int32_t)parts, item.record + t * item.record_step});
    }

    static AttentionItem item_of(int64_t row, int64_t token, int64_t tokens, int64_t position, int64_t first, int64_t part) {
        return {(int32_t)row, (int32_t)token, (int32_t)tokens, (int32_t)position, -1, (int32_t)first, 0, (int32_t)part, -1, 0};
    }

    void zeros(int64_t token, int64_t tokens) { put(item_of(0, token, tokens, 0, 0, 1)); }

    int64_t length(int64_t row) const { return step.seq_lens[row]; }
    int64_t tokens_of(int64_t row) const { return step.query_start[row + 1] - step.query_start[row]; }
    int64_t first_seen(int64_t position) const { return layer.window ? max(0, position - layer.window + 1) : 0; }

    // Tiles, the longest first: threads take items in turn, and the last ones should be short.
    void tiles(int64_t row, int64_t token, int64_t tokens) {
        int64_t height = tile_tokens(layer), position = length(row) - tokens;
        for (int64_t tile = ceil_div(tokens, height) - 1; tile >= 0; tile--) {
            int64_t begin = tile * height, count = min(height, tokens - begin), stop = position + begin + count;
            int64_t first = first_seen(position + begin), origin = first / TILE_PART * TILE_PART;
            int64_t span = tokens <= FEW_TOKENS ? TILE_PART : stop;
            AttentionItem item = item_of(row, token + begin, count, position + begin, first, TILE_PART);
            if (stop - origin > span) merged(item, ceil_div(stop - origin, TILE_PART));
            cut_heads(item, stop, origin, span);
        }
    }

    void decoding(int64_t row, int64_t token) {
        int64_t stop = length(row), first = first_seen(stop - 1), keys = stop - first;
        int64_t parts = max(1, min(MOST_PARTS, keys / DECODE_PART)), size = ceil_div(ceil_div(keys, parts), 16) * 16;
        AttentionItem item = item_of(row, token, 1, stop - 1, first, size);
        if (keys > size) merged(item, ceil_div(keys, size));
        cut(item, stop, first, size);
    }

    // ---- decoding rows in tiles: parts begin at absolute positions, so that rows can share them

    // Keys of a part: a multiple of DECODE_PART, so that the keys which a row sees are some MOST_PARTS parts at most.
    int64_t part_of(int64_t length) const {
        return ceil_div(layer.window ? min(length, layer.window) : length, DECODE_PART * MOST_PARTS) * DECODE_PART;
    }
    static int64_t span_of(int64_t part) { return max(1, FEW_KEYS / part) * part; }

    // Keys of whole parts that the rows have in the same slots.
    int64_t shared(int64_t row, int64_t other) const {
        const int64_t part = part_of(length(row)), most = min(length(row), length(other)) - 1;
        if (layer.window || !step.block_size || part_of(length(other)) != part) return 0;
        const int32_t *one = step.places + row * step.place_stride, *two = step.places + other * step.place_stride;
        int64_t blocks = 0;
        while (blocks * step.block_size < most && one[blocks] == two[blocks]) blocks++;
        return min(most, blocks * step.block_size) / part * part;
    }

    // The decoding rows from `row` on, up to `stop`, that have the same first keys as this one; `keys` becomes their number.
    int64_t family(int64_t row, int64_t stop, int64_t& keys) const {
        int64_t last = row + 1;
        keys = 0;
        for (; last < stop && length(last) && tokens_of(last) == 1; last++) {
            const int64_t now = shared(row, last);
            if (!now || now < keys) break;
            if (keys == 0) keys = now;
        }
        return last;
    }

    // Rows [row, stop): the first `keys` keys, which they share, for all of them at once; then each one's own. The last part, where it is not
    // whole, is computed as by processors without tiles: nobody shares it, and where one row has few keys, packing them is no gain.
    void decoding_in_tiles(int64_t row, int64_t stop, int64_t keys) {
        const int64_t token = step.query_start[row], part = part_of(length(row)), span = span_of(part), records = n.records;
        int64_t parts = 0;  // of the longest: all have room for as many
        for (int64_t r = row; r < stop; r++) parts = max(parts, ceil_div(length(r), part));
        for (int64_t r = row; keys && r < stop; r += tile_tokens(layer)) {
            AttentionItem item = item_of(r, token + r - row, min(tile_tokens(layer), stop - r), keys, 0, part);
            take_records(item, parts);
            cut_heads(item, keys, 0, span);
        }
        for (int64_t r = row; r < stop; r++) {
            const int64_t last = length(r), first = keys ? keys : first_seen(last - 1), origin = first / part * part;
            const int64_t whole = last / part * part, items = ceil_div(whole - origin, span) + (last > whole);
            AttentionItem item = item_of(r, token + r - row, 1, last - 1, first, part);
            if (keys) {
                const int64_t record = records + (r - row) * parts * layer.heads;
                put(AttentionMerge{item.token, (int32_t)ceil_div(last, part), record});
                item.record = record + keys / part * layer.heads;
            } else if (items > 1) {
                merged(item, ceil_div(last - origin, part));
            }
            cut(item, whole, origin, span);
            if (item.record >= 0) item.record += (whole - origin) / part * layer.heads;
            cut(item, last, whole, span);
        }
    }

    void plan() {
        n = {0, 0, 0};
        for (int64_t row = 0; row < step.rows; row++)
            if (length(row) && tokens_of(row) > 1) tiles(row, step.query_start[row], tokens_of(row));
        for (int64_t row = 0, next; row < step.rows; row = next) {
            const int64_t token = step.query_start[row], tokens = tokens_of(row);
            next = row + 1;
            if (!length(row) && tokens) zeros(token, tokens);
            if (!length(row) || tokens != 1) continue;
            if (decodes_in_tiles(layer)) {
                int64_t keys;
                next = family(row, step.rows, keys);
                decoding_in_tiles(row, next, keys);
            } else {
                decoding(row, token);
            }
        }
        int64_t end = step.rows ? step.query_start[step.rows] : 0;
        if (end < step.tokens) zeros(end, step.tokens - end);
    }
};

template <class T>
int64_t space_of_thread(const AttentionLayer& layer) {
    Carver decoding = {0}, tile = {0};
    DecodeSpace<T> first(layer, decoding);
    TileSpace<T> second(layer, tile);
    return max((int64_t)decoding.at, (int64_t)tile.at);
}

// Partial results of one merge, in the order of its parts.
template <class T>
void merge_parts(const AttentionLayer& layer, const AttentionMerge& merge, const float* records, T* out, float* sums) {
    const int64_t size = record_size<T>(layer);
    for (int64_t head = 0; head < layer.heads; head++) {
        const float* record = records + (merge.record + head) * size;
        State all = {LOWEST, 0, sums};
        memset(sums, 0, (size - W) * sizeof(float));
        for (int64_t part = 0; part < merge.parts; part++, record += layer.heads * size)
            join(all, {record[0], record[1], (float*)record + W}, size - W);
        finish(layer, head, all, out + (merge.token * layer.heads + head) * layer.v_size);
    }
}

template <class T>
void run_item(const AttentionLayer& layer, const AttentionStep& step, const Operands<T>& in, const AttentionPlan& plan, int64_t i, int64_t next,
              char* memory, float* records) {
    const AttentionItem& item = plan.items[i];
    const AttentionItem* following = next < plan.num_items && plan.items[next].stop ? plan.items + next : nullptr;
    if (following && (following->kv_head < 0) != (item.kv_head < 0)) following = nullptr;  // other keys come first there
    Carver carver = {(uintptr_t)memory};
    if (item.first == item.stop)
        memset(in.out + item.token * layer.heads * layer.v_size, 0, item.tokens * layer.heads * layer.v_size * sizeof(T));
    else if (item.kv_head >= 0 || (decodes_in_tiles(layer) && item.stop % item.part == 0))
        attend_tile(layer, step, in, item, following, carver, records);
    else
        decode(layer, step, in, item, following, carver, records);
}

constexpr int64_t SERIAL_WRITE = 128 * 1024;  // bytes that are written faster by one thread than two meet at a barrier

// `k`, `v`: what is written first; null: nothing.
template <class T>
void attend(const AttentionLayer& layer, const Operands<T>& in, const AttentionPlan& plan, const Writing* k, const Writing* v) {
    const AttentionStep& step = *plan.step;
    int64_t taken = 0;
    float* records = (float*)(plan.memory + plan.threads * plan.thread_bytes);
    const bool shared = k && step.tokens * k->heads * (k->bytes + v->bytes) > SERIAL_WRITE;
    if (k && !shared) write_tokens(*k, *v, plan.slots, 0, step.tokens);
#pragma omp parallel num_threads(plan.threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        char* memory = plan.memory + thread * plan.thread_bytes;
        if (shared) {
            write_tokens(*k, *v, plan.slots, step.tokens * thread / threads, step.tokens * (thread + 1) / threads);
#pragma omp barrier
        }
        // The first item is the thread's own, whichever thread comes first; the next one is taken before this one is run, so that its keys
        // can be fetched meanwhile.
        for (int64_t now = thread, next; now < plan.num_items; now = next) {
            next = threads + __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
            run_item(layer, step, in, plan, now, next, memory, records);
        }
        if (plan.num_merges) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
            for (int64_t m = 0; m < plan.num_merges; m++) merge_parts(layer, plan.merges[m], records, in.out, (float*)memory);
        }
    }
}

}  // namespace

// What a step needs of a layer: `sizes` becomes [items, merges, records, bytes of a thread's memory, bytes of a record]. Where there is
// memory for them, items and merges are written.
OCTAVO_API(attention_plan)
(const AttentionLayer* layer, const AttentionStep* step, AttentionItem* items, AttentionMerge* merges, int64_t* sizes) {
    Planner planner = {*layer, *step, items, merges, {0, 0, 0}};
    planner.plan();
    sizes[0] = planner.n.items, sizes[1] = planner.n.merges, sizes[2] = planner.n.records;
    for_type(layer->type, [&](auto of) {
        typedef decltype(of) T;
        sizes[3] = space_of_thread<T>(*layer);
        sizes[4] = record_size<T>(*layer) * sizeof(float);
    });
    return 0;
}

// k and v [tokens, kv_heads, .] are written into the cache, unless k is null; then q [tokens, heads, k_size] attends over it -> out [tokens,
// heads, v_size], contiguous. Strides in elements; the last dimension has no gaps.
OCTAVO_API(attention)
(const AttentionLayer* layer, const AttentionCache* cache, const AttentionPlan* plan, const void* q, int64_t q_token_stride,
 int64_t q_head_stride, char* k, int64_t k_token_stride, int64_t k_head_stride, char* v, int64_t v_token_stride, int64_t v_head_stride,
 void* out) {
    for_type(layer->type, [&](auto of) {
        typedef decltype(of) T;
        const AttentionCache& c = *cache;
        const Operands<T> in = {(const T*)q, q_token_stride, q_head_stride, (const T*)c.k, c.k_slot_stride, c.k_head_stride,
                                (const T*)c.v, c.v_slot_stride, c.v_head_stride, (T*)out};
        const int64_t size = sizeof(T);
        const Writing of_k = {{k, k_token_stride * size, k_head_stride * size}, {c.k, c.k_slot_stride * size, c.k_head_stride * size},
                              layer->kv_heads, layer->k_size * size};
        const Writing of_v = {{v, v_token_stride * size, v_head_stride * size}, {c.v, c.v_slot_stride * size, c.v_head_stride * size},
                              layer->kv_heads, layer->v_size * size};
        attend(*layer, in, *plan, k ? &of_k : nullptr, k ? &of_v : nullptr);
    });
    return 0;
}
