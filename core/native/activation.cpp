// silu(gate) * up, in fp32, rounded once. Linears fuse it (mlp.cpp); this form is for models that have gate and up apart.

#include "vec.h"

using namespace octavo::OCTAVO_LEVEL;

// gate, up [rows, size] with row strides in elements -> out [rows, size], contiguous.
OCTAVO_API(silu_mul)
(int type, const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, int64_t rows, int64_t size, void* out, int threads) {
    for_type(type, [=](auto of) {
        typedef decltype(of) T;
#pragma omp parallel for num_threads(threads)
        for (int64_t row = 0; row < rows; row++) {
            const T *g = (const T*)gate + row * gate_stride, *u = (const T*)up + row * up_stride;
            T* to = (T*)out + row * size;
            int64_t k = 0;
            for (; k + W <= size; k += W) store(to + k, silu(load(g + k)) * load(u + k));
            if (k < size) store_first(to + k, silu(load_first(g + k, size - k)) * load_first(u + k, size - k), size - k);
        }
    });
    return 0;
}
