// Linears: plain, with a residual, and gated.

#include "gemm.h"

using namespace octavo::OCTAVO_LEVEL;
using octavo::scratch;
using octavo::Weight;

// x [rows, k], rows x_stride elements apart -> out [rows, n], contiguous. `add`: null, or a residual [rows, n] (perhaps out itself).
OCTAVO_API(linear)
(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, const void* add, int64_t add_stride, void* out, int64_t out_stride,
 int threads) {
    const Weight w = *packed;
    int status = 0;
    for_type(w.type, [&](auto of) {
        typedef decltype(of) T;
        int64_t bytes = scratch_for_inputs<T>(rows, w.k);
        char* space = bytes ? (char*)scratch(bytes) : nullptr;
        if (bytes && !space) {
            status = 1;
            return;
        }
        in_parallel(threads, [&](Share share) {
            Inputs in = as_inputs((const T*)x, x_stride, rows, w.k, space, share);
            multiply<T>(w, in, rows, share, Store<T>{(T*)out, out_stride, (const T*)add, add_stride, w.n});
        });
    });
    return status;
}

// silu(gate(x)) * up(x): x [rows, k] -> out [rows, n], contiguous. The weight has two groups.
OCTAVO_API(swiglu)(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, void* out, int threads) {
    const Weight w = *packed;
    int status = 0;
    for_type(w.type, [&](auto of) {
        typedef decltype(of) T;
        int64_t bytes = scratch_for_inputs<T>(rows, w.k);
        char* space = bytes ? (char*)scratch(bytes) : nullptr;
        if (bytes && !space) {
            status = 1;
            return;
        }
        in_parallel(threads, [&](Share share) {
            Inputs in = as_inputs((const T*)x, x_stride, rows, w.k, space, share);
            multiply<T>(w, in, rows, share, StoreGated<T>{(T*)out, w.n, w.n});
        });
    });
    return status;
}
