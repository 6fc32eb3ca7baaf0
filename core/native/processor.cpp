// What is known of the machine, compiled once for any processor: which levels it can run, and advice about memory.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

// Which sources this was built from (setup.py): the loader compares it with those that lie beside it.
OCTAVO_EXPORT int64_t octavo_abi() { return OCTAVO_ABI; }

#if defined(__x86_64__)
namespace {

bool has(unsigned word, int bit) { return word >> bit & 1; }

// Registers that the system saves when it changes tasks (XCR0): without it, instructions of a processor that has them must not be used.
uint32_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

constexpr uint32_t YMM = 0x6, ZMM = 0xe6;  // SSE and AVX state; with AVX-512's masks, upper halves and upper registers
constexpr uint32_t TILES = 0x60000;        // AMX's configuration and data

// Linux saves a process's tiles (8 KiB) only once it was asked to.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

// By CPUID's leaves 1 and 7 as the manuals number them, since compilers differ in what __builtin_cpu_supports knows by name.
struct Processor {
    bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;
    Processor() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return;  // OSXSAVE: there is xgetbv
        const bool fma = has(c, 12), avx = has(c, 28), f16c = has(c, 29);
        const uint32_t saved = saved_registers();
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = avx && fma && f16c && has(b, 5) && (saved & YMM) == YMM;
        const bool tiles = has(d, 22) && has(d, 24) && (saved & TILES) == TILES;
        avx512 = avx2 && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) && (saved & ZMM) == ZMM;  // F, DQ, BW, VL
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) avx512_bf16 = avx512 && has(a, 5);
        amx_bf16 = avx512_bf16 && tiles;
    }
};

}  // namespace
#endif

// Whether this processor has the instructions of a level (see setup.py), and the system saves its registers.
OCTAVO_EXPORT int octavo_processor_runs(const char* level) {
    if (!strcmp(level, "plain")) return 1;
#if defined(__x86_64__)
    const Processor processor;
    if (!strcmp(level, "avx2")) return processor.avx2;
    if (!strcmp(level, "avx512")) return processor.avx512;
    if (!strcmp(level, "avx512_bf16")) return processor.avx512_bf16;
    if (!strcmp(level, "amx_bf16")) return processor.amx_bf16 && may_use_tiles();
#endif
    return 0;
}

namespace octavo {

namespace {

struct Scratch {
    void* start = nullptr;
    int64_t bytes = 0;
    ~Scratch() { free(start); }
};

thread_local Scratch kept;

}  // namespace

// Memory of the calling thread, kept for the next call (activations of a step: some megabytes); null: there is none left.
void* scratch(int64_t bytes) {
    if (!kept.start || bytes > kept.bytes) {  // of no bytes too there is an address: null is a failure
        free(kept.start);
        kept.bytes = (bytes + bytes / 4 + 4096) / 4096 * 4096;  // a little more, since steps grow
        kept.start = aligned_alloc(4096, (size_t)kept.bytes);
        if (!kept.start) kept.bytes = 0;
    }
    return kept.start;
}

}  // namespace octavo
