// Calls the functions of the library's plain level with made-up inputs and prints the results, bit by bit: built for another processor and
// for this one, both must print the same (test_other_processors.py). `blocks` only calls others.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "attention.h"
#include "gemm.h"

using octavo::AttentionCache;
using octavo::AttentionItem;
using octavo::AttentionLayer;
using octavo::AttentionMerge;
using octavo::AttentionPlan;
using octavo::AttentionStep;
using octavo::Weight;

struct BlockInputs {  // of block.cpp
    const Weight* packed;
    const void *norm, *q_norm, *k_norm;
    int64_t heads, kv_heads, head_size;
    float eps;
};
struct BlockOutputs {
    const Weight *out, *gate_up, *down;
    const void* norm;
    float eps;
};

extern "C" {
int octavo_norm_plain(int, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, float, void*, int64_t, int64_t, int);
int octavo_rope_plain(int, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, const float*, const float*, void*, int64_t, int64_t, int);
int octavo_packed_sizes_plain(int, int64_t, int64_t, int, int64_t*, int64_t*);
int octavo_pack_plain(const Weight*, const void*, int64_t, int, int);
int octavo_rows_plain(const Weight*, const int64_t*, int64_t, void*, int);
int octavo_linear_plain(const Weight*, const void*, int64_t, int64_t, const void*, int64_t, void*, int64_t, int);
int octavo_swiglu_plain(const Weight*, const void*, int64_t, int64_t, void*, int);
int octavo_argmax_plain(const Weight*, const void*, int64_t, int64_t, int64_t*, int);
int octavo_attention_inputs_plain(const BlockInputs*, const void*, int64_t, const float*, const float*, void*, int);
int octavo_attention_outputs_plain(const BlockOutputs*, const void*, int64_t, int64_t, void*, int);
int octavo_attention_plan_plain(const AttentionLayer*, const AttentionStep*, AttentionItem*, AttentionMerge*, int64_t*);
int octavo_attention_plain(const AttentionLayer*, const AttentionCache*, const AttentionPlan*, const void*, int64_t, int64_t, char*, int64_t,
                           int64_t, char*, int64_t, int64_t, void*);
int octavo_codes_size_plain(int, int64_t, int64_t, int, int64_t*);
int octavo_pack_codes_plain(const Weight*, const uint8_t*, const float*, const float*, int, int);
int octavo_rows_of_codes_plain(const Weight*, const int64_t*, int64_t, void*, int);
int octavo_processor_runs(const char*);
}

static uint32_t state;
static float random_value() {  // from -2 to 2, in steps that every type holds nearly
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)(state >> 8) / 4194304.0f - 2.0f;
}

typedef std::vector<char> Bytes;
static const int SIZES[] = {4, 2, 2};

static Bytes values(int type, int64_t count) {
    Bytes bytes(count * SIZES[type]);
    for (int64_t i = 0; i < count; i++) {
        float x = random_value();
        if (type == 0) memcpy(&bytes[i * 4], &x, 4);
        else {
            uint16_t half = type == 1 ? (uint16_t)(octavo::OCTAVO_LEVEL::to_bits(x) >> 16) : octavo::OCTAVO_LEVEL::float_to_half(x);
            memcpy(&bytes[i * 2], &half, 2);
        }
    }
    return bytes;
}
static std::vector<float> angles(int64_t count) {
    std::vector<float> found(count);
    for (float& x : found) x = random_value() / 2;
    return found;
}

static void print(const char* name, int type, const void* data, int64_t bytes) {
    printf("%s %d ", name, type);
    for (int64_t i = 0; i < bytes; i++) printf("%02x", ((const unsigned char*)data)[i]);
    printf("\n");
}

struct Packed {
    Bytes panels;
    std::vector<float> bias;
    Weight weight;
    Packed(int type, int64_t n, int64_t k, int groups, bool biased) {
        int64_t bytes, columns;
        octavo_packed_sizes_plain(type, n, k, groups, &bytes, &columns);
        panels.resize(bytes);
        if (biased) bias = angles(columns);
        weight = {panels.data(), biased ? bias.data() : nullptr, n, k, type, groups};
        for (int group = 0; group < groups; group++) octavo_pack_plain(&weight, values(type, n * k).data(), k, group, 2);
    }
};

static void linears(int type) {
    const int64_t k = 61, n = 70, size = SIZES[type];
    Packed one(type, n, k, 1, true), gate_up(type, n, k, 2, false), down(type, k, n, 1, false), qkv(type, 5 * 14, k, 1, false), back(type, k, n, 1, false);
    for (int64_t rows : {1, 3, 9, 517}) {
        Bytes x = values(type, rows * k), out = values(type, rows * n), norm = values(type, k), head_norm = values(type, 14);
        octavo_linear_plain(&one.weight, x.data(), k, rows, out.data(), n, out.data(), n, 2);
        print("linear", type, out.data(), rows * n * size);
        octavo_swiglu_plain(&gate_up.weight, x.data(), k, rows, out.data(), 2);
        print("swiglu", type, out.data(), rows * n * size);
        std::vector<int64_t> ids(rows);
        octavo_argmax_plain(&one.weight, x.data(), k, rows, ids.data(), 2);
        print("argmax", type, ids.data(), rows * 8);
        Bytes looked_up(rows * k * size);
        octavo_rows_plain(&one.weight, ids.data(), rows, looked_up.data(), 2);
        print("rows", type, looked_up.data(), rows * k * size);
        std::vector<float> cos = angles(rows * 7), sin = angles(rows * 7);
        BlockInputs block = {&qkv.weight, norm.data(), head_norm.data(), head_norm.data(), 3, 1, 14, 1e-5f};
        octavo_attention_inputs_plain(&block, x.data(), rows, cos.data(), sin.data(), out.data(), 2);
        print("attention_inputs", type, out.data(), rows * n * size);
        BlockOutputs outputs = {&back.weight, &gate_up.weight, &down.weight, norm.data(), 1e-5f};
        octavo_attention_outputs_plain(&outputs, out.data(), n, rows, x.data(), 2);
        print("attention_outputs", type, x.data(), rows * k * size);
        octavo_norm_plain(type, out.data(), rows, 5, n, 14, 14, head_norm.data(), 1e-5f, out.data(), n, 14, 2);
        octavo_rope_plain(type, out.data(), rows, 5, n, 14, 7, cos.data(), sin.data(), out.data(), n, 14, 2);
        print("norm and rope", type, out.data(), rows * n * size);
    }
}

static void codes(int type, int quantization) {
    const int64_t k = 61, n = 70, size = SIZES[type], per_row = quantization == 1 ? 1 : 2;
    int64_t bytes;
    octavo_codes_size_plain(quantization, n, k, 1, &bytes);
    Bytes panels(bytes);
    Weight weight = {panels.data(), nullptr, n, k, type, 1, quantization};
    std::vector<uint8_t> chosen(n * k);
    for (uint8_t& code : chosen) code = quantization == 1 ? (uint8_t)(int8_t)(random_value() * 60) : (uint8_t)(random_value() * 3.5f + 7.5f);
    std::vector<float> scales(n * per_row), minima(n * per_row);  // exact in fp16
    for (float& x : scales) x = (float)(int)(random_value() * 100) / 1024.0f;
    for (float& x : minima) x = (float)(int)(random_value() * 100) / 256.0f;
    octavo_pack_codes_plain(&weight, chosen.data(), scales.data(), quantization == 1 ? nullptr : minima.data(), 0, 2);
    for (int64_t rows : {1, 3, 9, 70}) {
        Bytes x = values(type, rows * k), out = values(type, rows * n), looked_up(rows * k * size);
        octavo_linear_plain(&weight, x.data(), k, rows, out.data(), n, out.data(), n, 2);
        print("linear of codes", type, out.data(), rows * n * size);
        std::vector<int64_t> ids(rows);
        for (int64_t i = 0; i < rows; i++) ids[i] = n - 1 - i;
        octavo_rows_of_codes_plain(&weight, ids.data(), rows, looked_up.data(), 2);
        print("rows of codes", type, looked_up.data(), rows * k * size);
    }
}

static void attention(int type, int64_t window, float softcap, bool sinks, bool paged) {
    const int64_t heads = 6, kv_heads = 2, k_size = 22, v_size = 17, size = SIZES[type];
    std::vector<float> sink = angles(heads);
    AttentionLayer layer = {heads, kv_heads, k_size, v_size, window, sinks ? sink.data() : nullptr, 0.4f, softcap, type};
    // a decoding row, the end of a prompt, a whole prompt, an empty row; regions one after another
    std::vector<int32_t> starts = {0, 1, 8, 138, 139}, lengths = {1400, 1210, 130, 0}, places = {0, 1400, 2610, 0};
    const int64_t slots = 2740, tokens = 139;
    std::vector<int64_t> to;
    for (int row = 0; row < 3; row++)
        for (int32_t t = starts[row + 1] - starts[row]; t > 0; t--) to.push_back(places[row] + lengths[row] - t);
    to.push_back(-1);
    // paged: blocks of 10 slots, which every region begins with
    const int64_t block = 10, columns = 140;
    std::vector<int32_t> table(4 * columns);
    for (int row = 0; row < 4; row++)
        for (int c = 0; c < columns; c++) table[row * columns + c] = places[row] / block + c;
    AttentionStep step = {starts.data(), lengths.data(), places.data(), 1, 4, tokens, 0};
    if (paged) step = {starts.data(), lengths.data(), table.data(), columns, 4, tokens, block};
    int64_t sizes[5];
    octavo_attention_plan_plain(&layer, &step, nullptr, nullptr, sizes);
    std::vector<AttentionItem> items(sizes[0]);
    std::vector<AttentionMerge> merges(sizes[1]);
    octavo_attention_plan_plain(&layer, &step, items.data(), merges.data(), sizes);
    Bytes memory(2 * sizes[3] + sizes[2] * sizes[4] + 64);
    char* aligned = (char*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    Bytes k_cache = values(type, slots * kv_heads * k_size), v_cache = values(type, slots * kv_heads * v_size);
    AttentionCache cache = {k_cache.data(), kv_heads * k_size, k_size, v_cache.data(), kv_heads * v_size, v_size};
    AttentionPlan plan = {&step, to.data(), items.data(), merges.data(), sizes[0], sizes[1], aligned, sizes[3], 2};
    Bytes q = values(type, tokens * heads * k_size), k = values(type, tokens * kv_heads * k_size), v = values(type, tokens * kv_heads * v_size);
    Bytes out(tokens * heads * v_size * size);
    octavo_attention_plain(&layer, &cache, &plan, q.data(), heads * k_size, k_size, k.data(), kv_heads * k_size, k_size, v.data(),
                           kv_heads * v_size, v_size, out.data());
    print("attention", type, out.data(), (int64_t)out.size());
    print("cache", type, k_cache.data() + (places[2] + 100) * kv_heads * k_size * size, 30 * kv_heads * k_size * size);
}

int main() {
    for (int type = 0; type < 3; type++) {
        state = 1;
        linears(type);
        codes(type, 1);
        codes(type, 2);
        for (bool paged : {false, true}) {
            attention(type, 0, 0.0f, false, paged);
            attention(type, 200, 3.0f, true, paged);
        }
    }
    printf("runs plain %d, avx9 %d\n", octavo_processor_runs("plain"), octavo_processor_runs("avx9"));
}
