// What is known of the machine, compiled once for any processor: which levels it can run, and advice about memory.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

// Whether this processor has the instructions of a level (see setup.py), and the system saves its registers.
OCTAVO_EXPORT int octavo_processor_runs(const char* level) {
    if (!strcmp(level, "plain")) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vl");
    if (!strcmp(level, "avx2")) return avx2;
    if (!strcmp(level, "avx512")) return avx512;
    if (!strcmp(level, "avx512_bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return 0;
}

// Ask for huge pages: weights are read from end to end, and 4 KiB pages spend as long on address translation as on data.
// Only advice: where it is refused nothing changes.
OCTAVO_EXPORT void octavo_advise_huge_pages(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(start, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
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
