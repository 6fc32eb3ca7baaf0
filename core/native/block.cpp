// The two sides of a transformer's block, one call each: what comes before attention, and all that comes after it. In between threads meet
// at barriers instead of leaving and entering OpenMP and Python. And all blocks of a model in one call, with the attention of attention.cpp.

#include "attention.h"
#include "norm.h"
#include "rope.h"
#include "weight_only.h"

using namespace octavo::OCTAVO_LEVEL;
using octavo::AttentionCall;
using octavo::scratch;
using octavo::Weight;

// As Python's `BlockInputs` (core/native/library.py) lays it out: what does not change from step to step.
struct BlockInputs {
    const Weight* packed;
    const void *norm, *q_norm, *k_norm;  // of k, and of a head; null: no norm of heads
    int64_t heads, kv_heads, head_size;
    float eps;
};

// As Python's `BlockOutputs`.
struct BlockOutputs {
    const Weight *out, *gate_up, *down;
    const void* norm;  // of x with attention's part
    float eps;
};

// As Python's `Block`: a layer.
struct Block {
    const BlockInputs* before;
    const BlockOutputs* after;
};

namespace {

// This thread's share of the norms of x [rows, size] -> out, `stride` elements apart.
template <class T>
void norm_rows(const T* x, const T* weight, T* out, int64_t rows, int64_t size, int64_t stride, float eps, Share share) {
    for (int64_t r = share.begin(rows); r < share.end(rows); r++) norm_row(x + r * size, weight, out + r * stride, size, eps);
}

OCTAVO_INLINE int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

int inputs_of_slab(const BlockInputs& block, const void* x, int64_t rows, const float* cos, const float* sin, void* out, int threads) {
    const Weight w = *block.packed;
    const void *norm = block.norm, *q_norm = block.q_norm, *k_norm = block.k_norm;
    const int64_t heads = block.heads, kv_heads = block.kv_heads, head_size = block.head_size;
    const float eps = block.eps;
    int status = 0;
    for_type(w.type, [&](auto of) {
        typedef decltype(of) T;
        int64_t normed_bytes = whole_lines(rows * w.k * sizeof(T));
        char* space = (char*)scratch(normed_bytes + scratch_for<T>(w, rows));
        if (!space) {
            status = 1;
            return;
        }
        T* normed = (T*)space;
        in_parallel(threads, [&](Share share) {
            norm_rows((const T*)x, (const T*)norm, normed, rows, w.k, w.k, eps, share);
            barrier();
            Inputs in = inputs_of(w, (const T*)normed, w.k, rows, space + normed_bytes, share);
            multiply_any<T>(w, in, rows, share, Store<T>{(T*)out, w.n, nullptr, 0, w.n});
            barrier();
            for (int64_t r = share.begin(rows); r < share.end(rows); r++)
                for (int64_t h = 0; h < heads + kv_heads; h++) {
                    T* head = (T*)out + r * w.n + h * head_size;
                    const T* weight = (const T*)(h < heads ? q_norm : k_norm);
                    if (weight) norm_row(head, weight, head, head_size, eps);
                    rope_head(head, head, cos + r * (head_size / 2), sin + r * (head_size / 2), head_size / 2);
                }
        });
    });
    return status;
}

int outputs_of_slab(const BlockOutputs& block, const void* attended, int64_t stride, int64_t rows, void* x, int threads) {
    const Weight out = *block.out, gate_up = *block.gate_up, down = *block.down;
    const void* norm = block.norm;
    const float eps = block.eps;
    int status = 0;
    for_type(out.type, [&](auto of) {
        typedef decltype(of) T;
        const int64_t size = out.n, normed_bytes = whole_lines(rows * size * sizeof(T)), inner_bytes = whole_lines(rows * gate_up.n * sizeof(T));
        int64_t converted = max(scratch_for<T>(out, rows), max(scratch_for<T>(gate_up, rows), scratch_for<T>(down, rows)));
        char* space = (char*)scratch(normed_bytes + inner_bytes + converted);
        if (!space) {
            status = 1;
            return;
        }
        T *normed = (T*)space, *inner = (T*)(space + normed_bytes);
        char* inputs = space + normed_bytes + inner_bytes;
        in_parallel(threads, [&](Share share) {
            const Store<T> add = {(T*)x, size, (const T*)x, size, size};
            multiply_any<T>(out, inputs_of(out, (const T*)attended, stride, rows, inputs, share), rows, share, add);
            barrier();
            norm_rows((const T*)x, (const T*)norm, normed, rows, size, size, eps, share);
            barrier();
            multiply_any<T>(gate_up, inputs_of(gate_up, (const T*)normed, size, rows, inputs, share), rows, share,
                            StoreGated<T>{inner, gate_up.n, gate_up.n});
            barrier();
            multiply_any<T>(down, inputs_of(down, (const T*)inner, gate_up.n, rows, inputs, share), rows, share, add);
        });
    });
    return status;
}

}  // namespace

// x [rows, k] -> q, k and v next to each other in out [rows, (heads + 2 kv_heads) * head_size]: norm, projection, then for q and k a norm
// of each head where there are weights for it, and RoPE by cos, sin [rows, head_size / 2].
OCTAVO_API(attention_inputs)
(const BlockInputs* block, const void* x, int64_t rows, const float* cos, const float* sin, void* out, int threads) {
    const Weight& w = *block->packed;
    const int64_t half = block->head_size / 2;
    return in_slabs(rows, [&](int64_t first, int64_t count) {
        return inputs_of_slab(*block, at(x, first * w.k, w.type), count, cos + first * half, sin + first * half,
                              (void*)at(out, first * w.n, w.type), threads);
    });
}

// x [rows, n] += out(attended), then x += down(silu(gate(y)) * up(y)), y = norm(x). attended [rows, k], rows `stride` elements apart.
OCTAVO_API(attention_outputs)(const BlockOutputs* block, const void* attended, int64_t stride, int64_t rows, void* x, int threads) {
    const Weight& out = *block->out;
    return in_slabs(rows, [=](int64_t first, int64_t count) {
        return outputs_of_slab(*block, at(attended, first * stride, out.type), stride, count, (void*)at(x, first * out.n, out.type), threads);
    });
}

// x [rows, hidden] through `count` layers. `qkv` and `attended` have room for q, k and v of a layer, and for what its attention gives.
OCTAVO_API(blocks)
(const Block* blocks, const AttentionCall* attention, int64_t count, void* x, int64_t rows, const float* cos, const float* sin, void* qkv,
 void* attended, int threads) {
    for (int64_t layer = 0; layer < count; layer++) {
        const BlockInputs& before = *blocks[layer].before;
        const BlockOutputs& after = *blocks[layer].after;
        const AttentionCall& call = attention[layer];
        const int64_t stride = before.packed->n, size = before.head_size;
        char* k = (char*)at(qkv, before.heads * size, before.packed->type);
        char* v = (char*)at(k, before.kv_heads * size, before.packed->type);
        if (OCTAVO_CALL(attention_inputs)(&before, x, rows, cos, sin, qkv, threads)) return 1;
        OCTAVO_CALL(attention)(call.layer, call.cache, call.plan, qkv, stride, size, k, stride, size, v, stride, size, attended);
        if (OCTAVO_CALL(attention_outputs)(&after, attended, after.out->k, rows, x, threads)) return 1;
    }
    return 0;
}
