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

struct Counts {
    int64_t items, merges, records;
};

// Writes items and merges, or counts them where there is no memory yet.
struct Planner {
    const AttentionLayer& layer;
    AttentionItem* items;
    AttentionMerge* merges;
    Counts n;

    // The keys [item.first, stop) of some queries, in parts of `size` keys that are counted from `origin` on.
    void add(AttentionItem item, int64_t stop, int64_t origin, int64_t size) {
        int64_t first = item.first, parts = ceil_div(stop - origin, size);
        int64_t rows = item.tokens * (item.kv_head < 0 ? layer.heads : layer.group());
        if (parts > 1) {
            if (merges) merges[n.merges] = {item.token, item.tokens, item.kv_head, (int32_t)parts, n.records};
            n.merges++;
        }
        for (int64_t part = 0; part < parts; part++, n.items++) {
            item.first = (int32_t)max(first, origin + part * size);
            item.stop = (int32_t)min(stop, origin + (part + 1) * size);
            item.record = parts > 1 ? n.records : -1;
            if (parts > 1) n.records += rows;
            if (items) items[n.items] = item;
        }
    }

    void zeros(int64_t token, int64_t tokens) {
        if (items) items[n.items] = {0, (int32_t)token, (int32_t)tokens, 0, -1, 0, 0, -1};
        n.items++;
    }

    int64_t first_seen(int64_t position) const { return layer.window ? max(0, position - layer.window + 1) : 0; }

    // Tiles, the longest first: threads take items in turn, and the last ones should be short.
    void tiles(int64_t row, int64_t token, int64_t tokens, int64_t length) {
        int64_t height = tile_tokens(layer), position = length - tokens;
        for (int64_t tile = ceil_div(tokens, height) - 1; tile >= 0; tile--) {
            int64_t begin = tile * height, count = min(height, tokens - begin), stop = position + begin + count;
            int64_t first = first_seen(position + begin), size = tokens <= FEW_TOKENS ? TILE_PART : stop;
            for (int64_t h = 0; h < layer.kv_heads; h++)
                add({(int32_t)row, (int32_t)(token + begin), (int32_t)count, (int32_t)(position + begin), (int32_t)h, (int32_t)first, 0, -1},
                    stop, first / size * size, size);
        }
    }

    void decoding(int64_t row, int64_t token, int64_t length) {
        int64_t first = first_seen(length - 1), keys = length - first;
        int64_t parts = max(1, min(MOST_PARTS, keys / DECODE_PART)), size = ceil_div(ceil_div(keys, parts), 16) * 16;
        add({(int32_t)row, (int32_t)token, 1, (int32_t)(length - 1), -1, (int32_t)first, 0, -1}, length, first, size);
    }

    void plan(const AttentionStep& step) {
        n = {0, 0, 0};
        for (int many = 1; many >= 0; many--)
            for (int64_t row = 0; row < step.rows; row++) {
                int64_t token = step.query_start[row], tokens = step.query_start[row + 1] - token, length = step.seq_lens[row];
                if (length && tokens > 1 && many) tiles(row, token, tokens, length);
                if (length && tokens == 1 && !many) decoding(row, token, length);
                if (!length && tokens && !many) zeros(token, tokens);
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
    const int64_t size = record_size<T>(layer), group = layer.group(), heads = merge.kv_head < 0 ? layer.heads : group;
    const int64_t rows = merge.tokens * heads;
    for (int64_t r = 0; r < rows; r++) {
        const float* record = records + (merge.record + r) * size;
        State all = {LOWEST, 0, sums};
        memset(sums, 0, (size - W) * sizeof(float));
        for (int64_t part = 0; part < merge.parts; part++, record += rows * size)
            join(all, {record[0], record[1], (float*)record + W}, size - W);
        int64_t head = merge.kv_head < 0 ? r % heads : merge.kv_head * group + r % group, token = merge.token + r / heads;
        finish(layer, head, all, out + (token * layer.heads + head) * layer.v_size);
    }
}

template <class T>
void run_item(const AttentionLayer& layer, const AttentionStep& step, const Operands<T>& in, const AttentionPlan& plan, int64_t i, int64_t next,
              char* memory, float* records) {
    const AttentionItem& item = plan.items[i];
    Carver carver = {(uintptr_t)memory};
    if (item.first == item.stop)
        memset(in.out + item.token * layer.heads * layer.v_size, 0, item.tokens * layer.heads * layer.v_size * sizeof(T));
    else if (item.kv_head >= 0)
        attend_tile(layer, step, in, item, carver, records);
    else
        decode(layer, step, in, item, next < plan.num_items && plan.items[next].stop ? plan.items + next : nullptr, carver, records);
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
    Planner planner = {*layer, items, merges, {0, 0, 0}};
    planner.plan(*step);
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
