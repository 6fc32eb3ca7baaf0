// Weights into panels and rows out of them: see gemm.h for the layout.

#include "gemm.h"

using namespace octavo::OCTAVO_LEVEL;
using octavo::Weight;

// Bytes of the panels of `groups` weights [n, k], and how many columns of bias go with them.
OCTAVO_API(packed_sizes)(int type, int64_t n, int64_t k, int groups, int64_t* bytes, int64_t* columns) {
    for_type(type, [=](auto of) {
        typedef decltype(of) T;
        *columns = ceil_div(n, NR) * NR * groups;
        *bytes = *columns * steps_of<T>(k) * (int64_t)sizeof(typename Format<T>::Word);
    });
    return 0;
}

// weight [n, k], rows `stride` elements apart, into the panels of one group of `to`; n beyond the last column becomes zeros.
OCTAVO_API(pack)(const Weight* to, const void* weight, int64_t stride, int group, int threads) {
    const Weight w = *to;
    for_type(w.type, [=](auto of) {
        typedef decltype(of) T;
        typedef typename Format<T>::Word Word;
        constexpr int depth = Format<T>::depth;
        const int64_t steps = steps_of<T>(w.k), panels = ceil_div(w.n, NR);
#pragma omp parallel for num_threads(threads)
        for (int64_t panel = 0; panel < panels; panel++) {
            Word* words = (Word*)w.panels + (panel * w.groups + group) * steps * NR;
            for (int64_t j = 0; j < NR; j++) {
                const int64_t n = panel * NR + j, whole = n < w.n ? w.k / depth : 0;
                const T* row = (const T*)weight + n * stride;
                for (int64_t s = 0; s < whole; s++) memcpy(words + s * NR + j, row + s * depth, sizeof(Word));  // of a fixed size: one move
                for (int64_t s = whole; s < steps; s++) {
                    T values[depth] = {};
                    if (n < w.n) memcpy(values, row + s * depth, (w.k - s * depth) * sizeof(T));
                    memcpy(words + s * NR + j, values, sizeof(Word));
                }
            }
        }
    });
    return 0;
}

// Rows `ids` of a packed weight of one group -> out [count, k]: an embedding whose weight is the head's. Ids are valid.
OCTAVO_API(rows)(const Weight* from, const int64_t* ids, int64_t count, void* out, int threads) {
    const Weight w = *from;
    for_type(w.type, [=](auto of) {
        typedef decltype(of) T;
        typedef typename Format<T>::Word Word;
        constexpr int depth = Format<T>::depth;
        const int64_t steps = steps_of<T>(w.k);
#pragma omp parallel for num_threads(threads)
        for (int64_t i = 0; i < count; i++) {
            const Word* words = (const Word*)w.panels + ids[i] / NR * steps * NR + ids[i] % NR;
            T* to = (T*)out + i * w.k;
            for (int64_t s = 0; s < steps; s++) memcpy(to + s * depth, words + s * NR, min(depth, w.k - s * depth) * sizeof(T));
        }
    });
    return 0;
}
