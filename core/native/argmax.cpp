// The most likely ids: argmax over the columns of a linear, whose logits are never stored.
//
// Logits are rounded to the type that `linear` would store before they are compared, so ties are the same; the lowest id wins. 64 rows of
// 49,152 logits cost 0.2 ms here and 5.6 as a pass of their own. A row whose greatest logit is NaN or infinite has no id.

#include "weight_only.h"

using namespace octavo::OCTAVO_LEVEL;
using octavo::scratch;
using octavo::Weight;

namespace {

constexpr int64_t NOT_FINITE = -1, NOTHING_LEFT = -2;  // as core/sampler.py has them

// The best so far of each row, of one thread, whose columns come in rising order.
template <class T>
struct Best {
    float* values;  // [rows]
    int64_t* ids;
    int64_t n;
    template <int size>
    void operator()(int64_t column, int64_t row, int64_t count, float (&sums)[2][size]) const {
        for (int64_t i = 0; i < count; i++) {
            float* logits = &sums[0][i * NR];
            for (int64_t j = n - column; j < NR; j++) logits[j] = -INFINITY;
            vf v[3];
            OCTAVO_UNROLL for (int j = 0; j < 3; j++) v[j] = rounded(T(), load(logits + j * W));
            auto ordered = (v[0] == v[0]) & (v[1] == v[1]) & (v[2] == v[2]);
            float high = highest(ordered ? max(max(v[0], v[1]), v[2]) : set1(INFINITY));  // NaN is as infinity: nothing is above it
            if (!(high > values[row + i])) continue;
            values[row + i] = high;
            if (high == INFINITY) {
                ids[row + i] = NOT_FINITE;
                continue;
            }
            OCTAVO_UNROLL for (int j = 0; j < 3; j++) store(logits + j * W, v[j]);
            int64_t j = 0;
            while (logits[j] != high) j++;
            ids[row + i] = column + j;
        }
    }
};

int argmax_of_slab(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, int64_t* ids, int threads) {
    const Weight w = *packed;
    int status = 0;
    for_type(w.type, [&](auto of) {
        typedef decltype(of) T;
        int64_t converted = ceil_div(scratch_for<T>(w, rows), 64) * 64;
        char* space = (char*)scratch(converted + threads * rows * (sizeof(int64_t) + sizeof(float)));
        if (!space) {
            status = 1;
            return;
        }
        int64_t* all_ids = (int64_t*)(space + converted);  // [threads, rows]
        float* all_values = (float*)(all_ids + threads * rows);
        for (int64_t i = 0; i < threads * rows; i++) all_ids[i] = NOTHING_LEFT, all_values[i] = -INFINITY;
        in_parallel(threads, [&](Share share) {
            Inputs in = inputs_of(w, (const T*)x, x_stride, rows, space, share);
            multiply_any<T>(w, in, rows, share, Best<T>{all_values + share.thread * rows, all_ids + share.thread * rows, w.n});
        });
        for (int64_t r = 0; r < rows; r++) {  // threads have rising columns too
            int64_t best = r;
            for (int64_t i = r + rows; i < threads * rows; i += rows)
                if (all_values[i] > all_values[best]) best = i;
            ids[r] = all_ids[best];
        }
    });
    return status;
}

}  // namespace

// x [rows, k], rows x_stride elements apart -> ids [rows].
OCTAVO_API(argmax)(const Weight* packed, const void* x, int64_t x_stride, int64_t rows, int64_t* ids, int threads) {
    return in_slabs(rows, [=](int64_t first, int64_t count) {
        return argmax_of_slab(packed, at(x, first * x_stride, packed->type), x_stride, count, ids + first, threads);
    });
}
