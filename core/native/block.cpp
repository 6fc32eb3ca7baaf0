// The two halves of a transformer's block, one call each: what comes before attention, and the gated MLP. In between threads meet at
// barriers instead of leaving and entering OpenMP and Python.

#include "norm.h"
#include "rope.h"
#include "weight_only.h"

using namespace octavo::OCTAVO_LEVEL;
using octavo::scratch;
using octavo::Weight;

// As Python's `BlockInputs` (core/native/library.py) lays it out: what does not change from step to step.
struct BlockInputs {
    const Weight* packed;
    const void *norm, *q_norm, *k_norm;  // of k, and of a head; null: no norm of heads
    int64_t heads, kv_heads, head_size;
    float eps;
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

int mlp_of_slab(const Weight* gate_up, const Weight* down, void* x, int64_t rows, const void* norm, float eps, int threads) {
    const Weight first = *gate_up, second = *down;
    int status = 0;
    for_type(first.type, [&](auto of) {
        typedef decltype(of) T;
        int64_t normed_bytes = whole_lines(rows * first.k * sizeof(T)), inner_bytes = whole_lines(rows * first.n * sizeof(T));
        int64_t converted = max(scratch_for<T>(first, rows), scratch_for<T>(second, rows));
        char* space = (char*)scratch(normed_bytes + inner_bytes + converted);
        if (!space) {
            status = 1;
            return;
        }
        T *normed = (T*)space, *inner = (T*)(space + normed_bytes);
        char* inputs = space + normed_bytes + inner_bytes;
        in_parallel(threads, [&](Share share) {
            norm_rows((const T*)x, (const T*)norm, normed, rows, first.k, first.k, eps, share);
            barrier();
            Inputs in = inputs_of(first, (const T*)normed, first.k, rows, inputs, share);
            multiply_any<T>(first, in, rows, share, StoreGated<T>{inner, first.n, first.n});
            barrier();
            in = inputs_of(second, (const T*)inner, first.n, rows, inputs, share);
            multiply_any<T>(second, in, rows, share, Store<T>{(T*)x, second.n, (const T*)x, second.n, second.n});
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

// x [rows, hidden] += down(silu(gate(n)) * up(n)), n = norm(x).
OCTAVO_API(gated_mlp)(const Weight* gate_up, const Weight* down, void* x, int64_t rows, const void* norm, float eps, int threads) {
    return in_slabs(rows, [=](int64_t first, int64_t count) {
        return mlp_of_slab(gate_up, down, (void*)at(x, first * gate_up->k, gate_up->type), count, norm, eps, threads);
    });
}
