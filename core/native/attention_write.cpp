// Writing K and V of a step's tokens into their slots of the cache, with any strides.

#include "vec.h"

namespace {

// Rows of `heads` pieces of `bytes`; strides in bytes.
struct Rows {
    char* start;
    int64_t stride, head_stride;
};

OCTAVO_INLINE void copy_row(Rows to, int64_t slot, Rows from, int64_t token, int64_t heads, int64_t bytes) {
    char* target = to.start + slot * to.stride;
    const char* source = from.start + token * from.stride;
    if (to.head_stride == bytes && from.head_stride == bytes) memcpy(target, source, heads * bytes);
    else
        for (int64_t h = 0; h < heads; h++) memcpy(target + h * to.head_stride, source + h * from.head_stride, bytes);
}

}  // namespace

// k and v [tokens, heads, .] into the slots of their caches [slots, heads, .]; a slot below 0 is not written. `k_bytes`, `v_bytes`: of a
// head; strides in elements of `element` bytes.
OCTAVO_API(attention_write)
(int64_t heads, int64_t k_bytes, int64_t v_bytes, int64_t element, const int64_t* slots, int64_t tokens, char* k, int64_t k_token_stride,
 int64_t k_head_stride, char* v, int64_t v_token_stride, int64_t v_head_stride, char* k_cache, int64_t k_slot_stride,
 int64_t k_cache_head_stride, char* v_cache, int64_t v_slot_stride, int64_t v_cache_head_stride, int threads) {
    const Rows from_k = {k, k_token_stride * element, k_head_stride * element}, from_v = {v, v_token_stride * element, v_head_stride * element};
    const Rows to_k = {k_cache, k_slot_stride * element, k_cache_head_stride * element};
    const Rows to_v = {v_cache, v_slot_stride * element, v_cache_head_stride * element};
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        copy_row(to_k, slots[t], from_k, t, heads, k_bytes);
        copy_row(to_v, slots[t], from_v, t, heads, v_bytes);
    }
    return 0;
}
