// Rotary embedding of one head in the half-split form (GPT-NeoX), in fp32, rounded once; in place.
#pragma once

#include "vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

template <class T>
static void rope_head(const T* x, T* out, const float* cos, const float* sin, int64_t half) {
    int64_t d = 0;
    for (; d + W <= half; d += W) {
        vf a = load(x + d), b = load(x + half + d), c = load(cos + d), s = load(sin + d);
        store(out + d, a * c - b * s);
        store(out + half + d, b * c + a * s);
    }
    if (int64_t n = half - d) {
        vf a = load_first(x + d, n), b = load_first(x + half + d, n), c = load_first(cos + d, n), s = load_first(sin + d, n);
        store_first(out + d, a * c - b * s, n);
        store_first(out + half + d, b * c + a * s, n);
    }
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
