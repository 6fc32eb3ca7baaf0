// RMS norm of one row: x / rms(x) * weight, in fp32, rounded once.
#pragma once

#include "vec.h"

namespace octavo {
namespace OCTAVO_LEVEL {

template <class T>
static void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
    // Four sums hide the latency of fma; their order is fixed, so a row has the same result wherever it stands.
    vf squares[4] = {};
    int64_t k = 0;
    for (; k + 4 * W <= size; k += 4 * W)
        OCTAVO_UNROLL for (int i = 0; i < 4; i++) {
            vf v = load(x + k + i * W);
            squares[i] = fma(v, v, squares[i]);
        }
    for (; k < size; k += W) {
        vf v = load_first(x + k, min(W, size - k));
        squares[0] = fma(v, v, squares[0]);
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
    vf scale = set1(1.0f / sqrtf(mean + eps));
    for (k = 0; k + W <= size; k += W) store(out + k, load(x + k) * scale * load(weight + k));
    if (k < size) store_first(out + k, load_first(x + k, size - k) * scale * load_first(weight + k, size - k), size - k);
}

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
