// The cache write alone; `attention` does it too.

#include "attention_write.h"

using namespace octavo::OCTAVO_LEVEL;

// k and v [tokens, heads, .] into the slots of their caches [slots, heads, .]; a slot below 0 is not written. `k_bytes`, `v_bytes`: of a
// head; strides in elements of `element` bytes.
OCTAVO_API(attention_write)
(int64_t heads, int64_t k_bytes, int64_t v_bytes, int64_t element, const int64_t* slots, int64_t tokens, char* k, int64_t k_token_stride,
 int64_t k_head_stride, char* v, int64_t v_token_stride, int64_t v_head_stride, char* k_cache, int64_t k_slot_stride,
 int64_t k_cache_head_stride, char* v_cache, int64_t v_slot_stride, int64_t v_cache_head_stride, int threads) {
    const Rows from_k = {k, k_token_stride * element, k_head_stride * element}, from_v = {v, v_token_stride * element, v_head_stride * element};
    const Rows to_k = {k_cache, k_slot_stride * element, k_cache_head_stride * element};
    const Rows to_v = {v_cache, v_slot_stride * element, v_cache_head_stride * element};
    const Writing of_k = {from_k, to_k, heads, k_bytes}, of_v = {from_v, to_v, heads, v_bytes};
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t < tokens; t++) write_tokens(of_k, of_v, slots, t, t + 1);
    return 0;
}
