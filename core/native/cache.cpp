// Writing K or V of a step's tokens into their slots of the cache.

#include "vec.h"

using namespace octavo::OCTAVO_LEVEL;

// values [tokens, row_bytes] at any token stride (bytes) -> cache [slots, row_bytes]; a slot below 0 is not written.
OCTAVO_API(store_slots)
(const char* values, int64_t token_stride, const int64_t* slots, int64_t tokens, int64_t row_bytes, char* cache, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= 0) memcpy(cache + slots[t] * row_bytes, values + t * token_stride, row_bytes);
    return 0;
}
