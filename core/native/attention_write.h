// Writing K and V of a step's tokens into their slots of the cache, with any strides.
#pragma once

#include "vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

// Rows of heads; strides in bytes.
struct Rows {
    char* start;
    int64_t stride, head_stride;
};

// K or V of tokens, and where they go: `bytes` of a head.
struct Writing {
    Rows from, to;
    int64_t heads, bytes;
    void operator()(int64_t slot, int64_t token) const {
        char* target = to.start + slot * to.stride;
        const char* source = from.start + token * from.stride;
        if (to.head_stride == bytes && from.head_stride == bytes) memcpy(target, source, heads * bytes);
        else
            for (int64_t h = 0; h < heads; h++) memcpy(target + h * to.head_stride, source + h * from.head_stride, bytes);
    }
};

// Tokens first to stop - 1; a slot below 0 is not written.
static inline void write_tokens(const Writing& k, const Writing& v, const int64_t* slots, int64_t first, int64_t stop) {
    for (int64_t t = first; t < stop; t++)
        if (slots[t] >= 0) k(slots[t], t), v(slots[t], t);
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
