// RMS norm of many rows.

#include "norm.h"

using namespace octavo::OCTAVO_LEVEL;

// x [outer, inner, size] with strides in elements, rows contiguous -> out [outer, inner, size], contiguous or x itself.
OCTAVO_API(norm)
(int type, const void* x, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t size, const void* weight,
 float eps, void* out, int64_t out_outer_stride, int64_t out_inner_stride, int threads) {
    for_type(type, [=](auto of) {
        typedef decltype(of) T;
#pragma omp parallel for num_threads(threads)
        for (int64_t row = 0; row < outer * inner; row++) {
            int64_t o = row / inner, i = row % inner;
            norm_row((const T*)x + o * outer_stride + i * inner_stride, (const T*)weight,
                     (T*)out + o * out_outer_stride + i * out_inner_stride, size, eps);
        }
    });
    return 0;
}
