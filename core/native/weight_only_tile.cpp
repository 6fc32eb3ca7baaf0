// Tiles of products with weights of 8 or 4 bits: up to MR rows, a panel, a chunk. See weight_only.h.

#include "weight_only.h"

namespace octavo {
namespace OCTAVO_LEVEL {

namespace {

// Where a tile reads codes: taken apart on the way, or from what `unpack` left.
template <class P, class Q>
struct Packed {
    const char* chunk;
    OCTAVO_INLINE vf get(const Packed& from, int64_t base, int u, int j) { return Q::template codes<P>(from.chunk, base, u, j); }
};
struct Unpacked {
    const float* words;
    OCTAVO_INLINE vf get(const Unpacked& from, int64_t base, int u, int j) { return load(from.words + (base + u) * NR + j * W); }
};

template <class P, int rows, class Codes>
OCTAVO_INLINE void add_product(const ChunkInputs& in, const Codes& codes, int64_t base, int u, vf (&sums)[rows][3]) {
    typedef Format<P> F;
    vf w[3];
    OCTAVO_UNROLL for (int j = 0; j < 3; j++) w[j] = Codes::get(codes, base, u, j);
    OCTAVO_UNROLL for (int i = 0; i < rows; i++) {
        vf a = F::input(in.x + i * in.stride + (base + u) * sizeof(typename F::Input));
        OCTAVO_UNROLL for (int j = 0; j < 3; j++) sums[i][j] = F::multiply(a, w[j], sums[i][j]);
    }
}

template <class P, class Q, int rows, class Codes>
__attribute__((noinline)) void add_rows(const ChunkInputs in, Codes codes, const char* chunk, float* totals) {
    vf sums[rows][3];
    Q::begin(totals, sums);
    int64_t p = 0;
    for (; p + 8 <= in.products; p += 8) {
        constexpr int64_t bytes = 8 * Q::group_bytes / products_of_group<P>;
        if (rows == 1)  // as fast as memory gives: fetch what is read next, and on into the next panel, 4 KiB before
            OCTAVO_UNROLL for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(chunk + 4096 + p / 8 * bytes + line, 0, 3);
        OCTAVO_UNROLL for (int u = 0; u < 8; u++) add_product<P>(in, codes, p, u, sums);
    }
    for (; p < in.products; p++) add_product<P>(in, codes, p & ~7, (int)(p & 7), sums);
    Q::template end<P>(chunk, in.sums, in.sums_stride, sums, totals);
}

template <class P, class Q, class Codes>
void add(const ChunkInputs& in, Codes codes, const char* chunk, float* totals) {
#define OCTAVO_ROWS(n) \
    case n: return add_rows<P, Q, MR >= n ? n : 1>(in, codes, chunk, totals);
    switch (in.rows) {
        OCTAVO_ROWS(1) OCTAVO_ROWS(2) OCTAVO_ROWS(3) OCTAVO_ROWS(4)
        OCTAVO_ROWS(5) OCTAVO_ROWS(6) OCTAVO_ROWS(7) OCTAVO_ROWS(8)
    }
#undef OCTAVO_ROWS
}

}  // namespace

template <class P, class Q>
void add_chunk(const ChunkInputs& in, const char* chunk, float* totals) {
    add<P, Q>(in, Packed<P, Q>{chunk}, chunk, totals);
}
template <class P, class Q>
void add_chunk(const ChunkInputs& in, const char* chunk, const float* words, float* totals) {
    add<P, Q>(in, Unpacked{words}, chunk, totals);
}
template <class P, class Q>
void unpack(const char* chunk, float* words) {
    for (int base = 0; base < products_of_group<P>; base += 8)
        OCTAVO_UNROLL for (int u = 0; u < 8; u++) OCTAVO_UNROLL for (int j = 0; j < 3; j++)
            store(words + (base + u) * NR + j * W, Q::template codes<P>(chunk, base, u, j));
}

#define OCTAVO_INSTANCES(P, Q) \
    template void add_chunk<P, Q>(const ChunkInputs&, const char*, float*); \
    template void add_chunk<P, Q>(const ChunkInputs&, const char*, const float*, float*); \
    template void unpack<P, Q>(const char*, float*);
OCTAVO_INSTANCES(f32, Int8)
OCTAVO_INSTANCES(f32, Int4)
#if defined(OCTAVO_PAIRS)
OCTAVO_INSTANCES(bf16, Int8)
OCTAVO_INSTANCES(bf16, Int4)
#endif

}  // namespace OCTAVO_LEVEL
}  // namespace octavo
