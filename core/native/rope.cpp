// Rotary embedding of the heads of many tokens.

#include "rope.h"

using namespace octavo::OCTAVO_LEVEL;

// x [tokens, heads, 2 * half] with strides in elements -> out, likewise, which may be x; cos, sin [tokens, half].
OCTAVO_API(rope)
(int type, const void* x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride, int64_t half, const float* cos,
 const float* sin, void* out, int64_t out_token_stride, int64_t out_head_stride, int threads) {
    for_type(type, [=](auto of) {
        typedef decltype(of) T;
#pragma omp parallel for num_threads(threads)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < heads; h++)
                rope_head((const T*)x + t * token_stride + h * head_stride, (T*)out + t * out_token_stride + h * out_head_stride,
                          cos + t * half, sin + t * half, half);
    });
    return 0;
}
