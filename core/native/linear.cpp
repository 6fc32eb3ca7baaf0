// Linears: plain, with a residual, and gated.

#include "weight_only.h"

using namespace octavo::OCTAVO_LEVEL;
using octavo::scratch;
using octavo::Weight;

namespace {

// x [rows, k], rows x_stride elements apart, times a packed weight; `sink(T())` makes what takes the sums. 1 where memory ran out.
template <class Sink>
int multiplied(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, int threads, Sink sink) {
    const Weight w = *packed;
    int status = 0;
    for_type(w.type, [&](auto of) {
        typedef decltype(of) T;
        int64_t bytes = scratch_for<T>(w, rows);
        char* space = bytes ? (char*)scratch(bytes) : nullptr;
        if (bytes && !space) {
            status = 1;
            return;
        }
        in_parallel(threads, [&](Share share) {
            Inputs in = inputs_of(w, (const T*)x, x_stride, rows, space, share);
            multiply_any<T>(w, in, rows, share, sink(T()));
        });
    });
    return status;
}

}  // namespace

namespace {

int linear_of_slab(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, const void* add, int64_t add_stride, void* out,
                   int64_t out_stride, int threads) {
    return multiplied(packed, x, x_stride, rows, threads, [=](auto of) {
        typedef decltype(of) T;
        return Store<T>{(T*)out, out_stride, (const T*)add, add_stride, packed->n};
    });
}

int swiglu_of_slab(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, void* out, int threads) {
    return multiplied(packed, x, x_stride, rows, threads, [=](auto of) {
        typedef decltype(of) T;
        return StoreGated<T>{(T*)out, packed->n, packed->n};
    });
}

}  // namespace

// x -> out [rows, n], rows out_stride apart. `add`: null, or a residual [rows, n] (perhaps out itself).
OCTAVO_API(linear)
(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, const void* add, int64_t add_stride, void* out, int64_t out_stride,
 int threads) {
    const int type = packed->type;
    return in_slabs(rows, [=](int64_t first, int64_t count) {
        return linear_of_slab(packed, at(x, first * x_stride, type), x_stride, count, at(add, first * add_stride, type), add_stride,
                              (void*)at(out, first * out_stride, type), out_stride, threads);
    });
}

// silu(gate(x)) * up(x): x -> out [rows, n], contiguous. The weight has two groups.
OCTAVO_API(swiglu)(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, void* out, int threads) {
    const int type = packed->type;
    return in_slabs(rows, [=](int64_t first, int64_t count) {
        return swiglu_of_slab(packed, at(x, first * x_stride, type), x_stride, count, (void*)at(out, first * packed->n, type), threads);
    });
}
